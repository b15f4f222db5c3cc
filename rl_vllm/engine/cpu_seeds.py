"""Make seeded requests safe on CPUs.

vLLM samples a token also for a request whose prompt is only partly processed, throws it away, and then turns that
request's random stream back by an offset. CPU streams have no offset: in vLLM 0.32 the attempt ends the engine. Here
the stream's state is kept before such a token is drawn and put back after, and vLLM's own attempt finds no stream.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import torch

Method = Callable[..., Any]


def install() -> None:
    """Correct vLLM's CPU model runner in this process. Idempotent."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if "_rl_vllm_seeds" not in vars(CPUModelRunner):
        CPUModelRunner._rl_vllm_seeds = True
        CPUModelRunner._sample = _keeping_streams(CPUModelRunner._sample)
        CPUModelRunner._bookkeeping_sync = _hiding_streams(CPUModelRunner._bookkeeping_sync)


def _keeping_streams(sample: Method) -> Method:
    @wraps(sample)
    def wrapped(runner: Any, *args: Any, **kwargs: Any) -> Any:
        states = [(stream, stream.get_state()) for _, stream in _discarded_streams(runner)]
        result = sample(runner, *args, **kwargs)
        for stream, state in states:
            stream.set_state(state)
        return result

    return wrapped


def _hiding_streams(bookkeeping: Method) -> Method:
    @wraps(bookkeeping)
    def wrapped(runner: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = _discarded_streams(runner)
        streams = runner.input_batch.generators
        for row, _ in hidden:
            del streams[row]
        try:
            return bookkeeping(runner, *args, **kwargs)
        finally:
            streams.update(hidden)

    return wrapped


def _discarded_streams(runner: Any) -> list[tuple[int, torch.Generator]]:
    """Rows of this step whose token is thrown away, with their random streams."""
    batch = runner.input_batch
    rows = np.flatnonzero(runner.discard_request_mask.np[: batch.num_reqs]).tolist()
    return [(row, batch.generators[row]) for row in rows if row in batch.generators]

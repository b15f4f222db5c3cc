"""What a person sees while a call runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
from tqdm.auto import tqdm

from rl_vllm.types import CompletionBatch


class Bar(Protocol):
    """What is used of a ``tqdm`` bar."""

    postfix: Mapping[str, object] | str | None

    def update(self, n: float | None = 1) -> object: ...

    def close(self) -> object: ...


class Progress:
    """A progress bar over prompts, with tokens per second and failures; a context manager.

    Args:
        total: Prompts to answer.
        use_tqdm: Whether to show one; or what to build it with, called with the arguments that ``vllm.LLM.generate``
            gives to its own: ``total``, ``desc``, ``dynamic_ncols`` and ``postfix``.
        clock: Seconds that never go back.
    """

    def __init__(
        self,
        *,
        total: int,
        use_tqdm: bool | Callable[..., Bar] = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._started = clock()
        self._tokens = 0
        self._failed = 0
        self._bar: Bar | None = None
        if use_tqdm:
            # tqdm.auto draws a widget in notebooks and text elsewhere.
            build = tqdm if use_tqdm is True else use_tqdm
            self._bar = build(total=total, desc="Processed prompts", dynamic_ncols=True, postfix="0 tokens/s")

    def update(self, chunk: CompletionBatch) -> None:
        """Count the prompts that a chunk answers, each with all its samples or a failure."""
        if self._bar is None:
            return
        self._tokens += len(chunk.tokens_T)
        self._failed += len(chunk.failures)
        seconds = self._clock() - self._started
        text = f"{self._tokens / seconds:,.0f} tokens/s" if seconds > 0 else ""
        self._bar.postfix = f"{text}, {self._failed} failed" if self._failed else text
        self._bar.update(len(np.unique(chunk.numbers_N)) + len(chunk.failures))

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()

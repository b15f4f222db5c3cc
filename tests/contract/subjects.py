"""What the contract is tested on: one service per implementation, with the truth about its answers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from rl_vllm import AsyncVLLM, SamplingConfig
from rl_vllm.protocols import Engine
from rl_vllm.testing import FakeEngine, Gate
from rl_vllm.types import CompletionBatch, PromptBatch, RequestBatch, WeightUpdate

T = TypeVar("T")

WAIT_S = 60.0
CALL_TIMEOUT_S = 120.0
# Ids that every implementation's vocabulary has, none of them special.
PROMPTS = [[*[7, 3, 30, 41, 9, 12][: 2 + row % 5], 10 + row] for row in range(12)]
GREEDY = SamplingConfig(max_tokens=6, temperature=0.0, ignore_eos=True)
# So many tokens that a request is still at work when somebody comes to stop it.
ENDLESS = SamplingConfig(n=8, max_tokens=None, ignore_eos=True)


class Truth(Protocol):
    """The right answers, from elsewhere than the code under test."""

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The most likely next ids, one after the other."""
        ...

    def logprobs(self, prompt: Sequence[int], response: Sequence[int]) -> list[float]:
        """Logprob of each response id after the prompt."""
        ...


class StatedTruth:
    """The fakes' rules, worked out anew: ids count up from the prompt's sum, their logprobs are eighths.

    Args:
        shift: What an adapter adds.
    """

    def __init__(self, shift: int = 0) -> None:
        self._shift = shift

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        return [3 + (sum(prompt) + self._shift + position) % 61 for position in range(count)]

    def logprobs(self, prompt: Sequence[int], response: Sequence[int]) -> list[float]:
        return [-(1 + token % 7) / 8 for token in response]


class ModelTruth:
    """A Hugging Face model.

    Args:
        model: A causal language model in float32.
    """

    def __init__(self, model: object) -> None:
        self._model = model

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self._logits(ids)[-1].argmax()))
        return ids[len(prompt) :]

    def logprobs(self, prompt: Sequence[int], response: Sequence[int]) -> list[float]:
        import torch

        ids = [*prompt, *response]
        scores = torch.log_softmax(self._logits(ids)[len(prompt) - 1 : -1], -1)
        return [float(scores[place, token]) for place, token in enumerate(response)]

    def _logits(self, ids: Sequence[int]):  # type: ignore[no-untyped-def]
        import torch

        with torch.no_grad():
            return self._model(torch.tensor([ids])).logits[0].float()  # type: ignore[operator]


@dataclass
class Subject:
    """A running service and what the tests must know to use it.

    Attributes:
        name: "fake", "local" or "ray".
        service: What is tested.
        truth: Its answers with the weights of the checkpoint.
        trained: Its answers with the weights of ``update(..., trained=True)``.
        update: Makes an update of a version, with trained weights or the checkpoint's.
        broken_update: Makes one that cannot be staged.
        adapter: Folder of an adapter, or None where the engines run without.
        adapter_truth: Its answers.
        holding: Keeps requests from ending while a test looks at them.
    """

    name: str
    service: AsyncVLLM
    truth: Truth
    trained: Truth
    update: Callable[[int, bool], WeightUpdate]
    broken_update: Callable[[int], WeightUpdate]
    adapter: Path | None = None
    adapter_truth: Truth | None = None
    holding: Callable[[], AbstractContextManager[None]] = nullcontext
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(10**9))

    @property
    def engine(self) -> Engine:
        core = self.service._core
        assert core is not None
        return core.replicas.by_index(0).engine

    def run(self, call: Callable[[], Awaitable[T]]) -> T:
        """Await something on the loop that owns the engines."""
        assert self.service._loop is not None
        return self.service._loop.run(call, timeout_s=CALL_TIMEOUT_S, waited_for="the engine")

    def requests(
        self, rows: Sequence[Sequence[int]], sampling: SamplingConfig, loras: Sequence[str | None] | None = None
    ) -> RequestBatch:
        prompts = replace(PromptBatch.from_rows(rows), loras=None if loras is None else tuple(loras))
        return RequestBatch(np.array([next(self.numbers) for _ in rows]), prompts, (sampling,) * len(rows))

    def ask(self, requests: RequestBatch) -> CompletionBatch:
        """The engine's answer, by request and sample."""

        async def gather() -> CompletionBatch:
            return CompletionBatch.concatenate([chunk async for chunk in self.engine.stream(requests)])

        return self.run(gather).sorted_rows()

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, f"waited {WAIT_S:g} s for {what}"
            time.sleep(0.02)

    def num_running(self) -> int:
        """Requests in all engines, by the engines' own counts."""
        found = self.service.metrics()
        return sum(each.num_running + each.num_waiting for each in found if each is not None)

    def wait_until_idle(self) -> None:
        self.wait_until(lambda: self.num_running() == 0, "the engines to be idle")


@contextmanager
def held(engines: Sequence[FakeEngine]) -> Iterator[None]:
    """Fakes answer at once; here their requests wait until they are aborted, or the block ends."""
    gate = Gate()
    scripts = [engine.script for engine in engines]
    for engine in engines:
        engine.script = replace(engine.script, gate=lambda _request: gate)
    try:
        yield
    finally:
        for engine, script in zip(engines, scripts, strict=True):
            engine.script = script
        gate.open()

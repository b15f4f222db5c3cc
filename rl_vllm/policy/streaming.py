"""The policy on event loops: a whole call that is awaited, and rows as their samples finish."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from tensordict import TensorDictBase

from rl_vllm.errors import ConfigError, GenerationError
from rl_vllm.policy.columns import Slots, slots_from
from rl_vllm.policy.inputs import PromptInput, check_prompts
from rl_vllm.policy.options import PolicyOptions
from rl_vllm.protocols import AsyncGenerationService, GenerationService
from rl_vllm.types import BadPrompt, CompletionBatch, PromptBatch, RequestFailure, SamplingConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Asked:
    """One call, read.

    Attributes:
        given: B prompts.
        sampling: Settings of the call.
        shape: Of the result.
        device: Of the result.
    """

    given: PromptInput
    sampling: SamplingConfig
    shape: torch.Size
    device: torch.device | None


@runtime_checkable
class _Streams(Protocol):
    """What tells an :class:`AsyncGenerationService` from others; no property of it is read for that."""

    def agenerate_batch(self) -> Any: ...

    def stream_batch(self) -> Any: ...


class AsyncCalls:
    """What a policy does on any event loop; its user has the parts of a blocking call."""

    options: PolicyOptions
    generate: bool
    _service: GenerationService

    def stream(
        self, tensordict: TensorDictBase, **overrides: object
    ) -> AsyncGenerator[tuple[int, TensorDictBase], None]:
        """Generate for every prompt of the batch, yielding rows as their samples finish.

        Closing the iterator (``contextlib.aclosing`` does) and cancelling its reader abort the rest in the engines.

        Args:
            tensordict: Prompts under ``in_keys``. It is not written to.
            overrides: Sampling settings for this call only, merged over the configured ones.

        Yields:
            ``(index, row)``: the row's position in the flattened result, prompt-major (``prompt * n + sample``), and a
            tensordict of batch size ``()`` with the policy's ``out_keys``, unpadded. Every position comes once; with
            ``on_bad_prompt=MARK`` also the invalid ones.

        Raises:
            ConfigError: The service cannot stream; and what ``forward`` raises.
        """
        if not self.generate:
            raise ConfigError("generate=False scores whole batches: call the policy, or await acall(), not stream()")
        service = async_service(self._service)
        # Here and not in the iterator: calls get their seeds in the order in which they are made.
        return self._stream(service, tensordict, self._call_sampling(overrides))

    async def acall(
        self, tensordict: TensorDictBase, tensordict_out: TensorDictBase | None = None, **overrides: object
    ) -> TensorDictBase:
        """As ``forward``, awaited on any event loop; cancelling the caller aborts everything in the engines.

        Raises:
            ConfigError: The service cannot be awaited; and what ``forward`` raises.
        """
        if not self.generate:
            return await asyncio.to_thread(self.forward, tensordict, tensordict_out, **overrides)
        service, sampling = async_service(self._service), self._call_sampling(overrides)
        asked = await asyncio.to_thread(self._ask, tensordict, tensordict_out, sampling)
        prompts = self._checked(asked.given.prompts)
        completions = await service.agenerate_batch(
            prompts, sampling, timeout_s=self.options.timeout_s, on_bad_prompt=self.options.on_bad_prompt
        )
        warn_of_failures(completions, len(prompts))
        return await asyncio.to_thread(self._answer, asked, completions, tensordict, tensordict_out)

    async def _stream(
        self, service: AsyncGenerationService, tensordict: TensorDictBase, sampling: SamplingConfig
    ) -> AsyncGenerator[tuple[int, TensorDictBase], None]:
        asked = await asyncio.to_thread(self._ask, tensordict, None, sampling)
        prompts, n = self._checked(asked.given.prompts), sampling.n
        waiting = set(range(len(prompts) * n))
        chunks = service.stream_batch(
            prompts, sampling, timeout_s=self.options.timeout_s, on_bad_prompt=self.options.on_bad_prompt
        )
        async with aclosing(chunks):
            async for chunk in chunks:
                warn_of_failures(chunk, len(prompts))
                indices, rows = await asyncio.to_thread(self._rows_of, asked, chunk)
                for index, row in zip(indices, rows, strict=True):
                    if index not in waiting:
                        raise GenerationError(((index // n, f"the service returned sample {index % n} twice"),))
                    waiting.remove(index)
                    yield index, row
        if waiting:
            row, sample = divmod(min(waiting), n)
            raise GenerationError(((row, f"the service returned neither sample {sample} nor a failure"),))

    @torch.no_grad()
    def _rows_of(self, asked: Asked, chunk: CompletionBatch) -> tuple[list[int], list[TensorDictBase]]:
        """Positions and rows of a chunk's samples, and of the samples that its failures leave without an answer."""
        given, n = asked.given, asked.sampling.n
        failed = [(failure, sample) for failure in chunk.failures for sample in range(n)]
        indices = (chunk.numbers_N * n + chunk.samples_N).tolist()
        indices += [failure.number * n + sample for failure, sample in failed]
        # Every sample as if it were the only one of a prompt of its own.
        rows = [index // n for index in indices]
        alone = replace(
            chunk,
            numbers_N=np.arange(len(chunk), dtype=np.int64),
            samples_N=np.zeros(len(chunk), np.int32),
            failures=tuple(RequestFailure(len(chunk) + i, each.reason) for i, (each, _) in enumerate(failed)),
        )
        mine = PromptInput(
            given.prompts.take(rows),
            text_B=None if given.text_B is None else [given.text_B[row] for row in rows],
            history=None if given.history is None else given.history[rows],
            device=given.device,
        )
        slots = slots_from(mine.prompts, alone, n=1)
        part = Asked(mine, replace(asked.sampling, n=1), torch.Size([len(rows)]), asked.device)
        written = self._write(part, slots, pad=False).unbind(0) if rows else ()
        return indices, [self._named(row) for row in written]

    def _checked(self, prompts: PromptBatch) -> PromptBatch:
        if self.options.on_bad_prompt is BadPrompt.RAISE:
            check_prompts(prompts)
        return prompts

    def forward(
        self, tensordict: TensorDictBase, tensordict_out: TensorDictBase | None = None, **overrides: object
    ) -> TensorDictBase:
        raise NotImplementedError

    def _named(self, row: TensorDictBase) -> TensorDictBase:
        raise NotImplementedError

    def _call_sampling(self, overrides: dict[str, object]) -> SamplingConfig:
        raise NotImplementedError

    def _ask(
        self, tensordict: TensorDictBase, tensordict_out: TensorDictBase | None, sampling: SamplingConfig
    ) -> Asked:
        raise NotImplementedError

    def _write(self, asked: Asked, slots: Slots, *, pad: bool) -> TensorDictBase:
        raise NotImplementedError

    def _answer(
        self,
        asked: Asked,
        completions: CompletionBatch,
        tensordict: TensorDictBase,
        tensordict_out: TensorDictBase | None,
    ) -> TensorDictBase:
        raise NotImplementedError


def async_service(service: GenerationService) -> AsyncGenerationService:
    """The same service, if it can be awaited.

    Raises:
        ConfigError: It cannot.
    """
    if not isinstance(service, _Streams):
        raise ConfigError(
            f"{type(service).__name__} has no stream_batch() and agenerate_batch(): stream() and acall() need a "
            "service that implements rl_vllm.protocols.AsyncGenerationService, as AsyncVLLM does; forward() does not"
        )
    return cast("AsyncGenerationService", service)


def warn_of_failures(completions: CompletionBatch, num_prompts: int) -> None:
    """Log how many prompts got no completion, and why the first did not."""
    if completions.failures:
        first = completions.failures[0]
        logger.warning(
            "%d of %d prompts got no completion; first, prompt %d: %s",
            len(completions.failures), num_prompts, first.number, first.reason,
        )  # fmt: skip

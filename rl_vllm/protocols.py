"""The seams: what the layers know of each other.

Policy and weights see only this module, so both run against the fakes in :mod:`rl_vllm.testing`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch

from rl_vllm.types import (
    BadPrompt,
    CommitReport,
    CompletionBatch,
    EngineMetrics,
    InFlight,
    KVCache,
    ModelInfo,
    PromptBatch,
    RequestBatch,
    SamplingConfig,
    TensorSpec,
    WeightUpdate,
)


@runtime_checkable
class Engine(Protocol):
    """One inference engine, in this process or behind a proxy; all methods run on the event loop that owns it."""

    async def model_info(self) -> ModelInfo:
        """Facts about the loaded model."""
        ...

    def stream(self, batch: RequestBatch) -> AsyncGenerator[CompletionBatch, None]:
        """Generate, yielding columns as requests finish; each request once, with all its samples or a failure.

        Closing the iterator aborts what is pending.

        Raises:
            EngineDiedError: The engine is gone; what was not yielded is lost.
        """
        ...

    async def abort(self, numbers: Sequence[int]) -> None:
        """Stop work on these requests at once; unknown numbers are ignored."""
        ...

    async def metrics(self) -> EngineMetrics:
        """The engine's own counts, as of now."""
        ...

    async def check_health(self) -> None:
        """Raise :class:`EngineDiedError` when the engine cannot serve."""
        ...

    async def weight_specs(self) -> tuple[TensorSpec, ...]:
        """The tensors a trainer must send, under checkpoint names, tied heads left out."""
        ...

    async def stage_weights(self, update: WeightUpdate, *, timeout_s: float) -> None:
        """Make the update's bytes ready to load, while generation goes on; raises with the reason when they are not."""
        ...

    async def commit_weights(self, update: WeightUpdate, *, in_flight: InFlight, kv: KVCache) -> CommitReport:
        """Pause, load, settle the cache, set the version last, resume."""
        ...

    async def reset_prefix_cache(self) -> bool:
        """Forget cached KV; False when running requests hold some of it."""
        ...

    async def collective_rpc(
        self, method: str, *, timeout_s: float, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> list[object]:
        """Call a method on every worker."""
        ...

    async def shutdown(self) -> None:
        """Stop the engine and its processes. Idempotent."""
        ...


class GenerationService(Protocol):
    """All replicas behind one front. Methods block, and may be called from any thread."""

    @property
    def num_replicas(self) -> int: ...

    @property
    def weight_version(self) -> int:
        """The newest version that was committed on every serving replica; 0 for the weights loaded at launch."""
        ...

    def model_info(self) -> ModelInfo: ...

    def generate_batch(
        self,
        prompts: PromptBatch,
        sampling: SamplingConfig,
        *,
        timeout_s: float | None = None,
        on_bad_prompt: BadPrompt = BadPrompt.RAISE,
    ) -> CompletionBatch:
        """Answer a batch: samples ordered by prompt row, then by sample; ``numbers_N`` holds rows.

        Args:
            prompts: B prompts; an empty batch returns at once.
            sampling: Used by every row. ``max_tokens`` is clamped to what each row's context leaves.
            timeout_s: Limit for the whole batch, or None for the configured one; on expiry everything is aborted.
            on_bad_prompt: ``RAISE`` refuses the batch before anything is sent; ``MARK`` lists the row in ``failures``.

        Raises:
            BadPromptError: A prompt is empty, too long or out of the vocabulary, with ``on_bad_prompt=RAISE``.
            GenerationError: The engine refused rows, with ``on_bad_prompt=RAISE``.
            DeadlineError: ``timeout_s`` passed.
            NoReplicaServesError: Every replica has died or failed a refit.
            ServiceNotRunningError: Before launch or after shutdown.
        """
        ...

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        """The tensors a trainer must send; cached after the first call."""
        ...

    def stage_weights(self, update: WeightUpdate, *, timeout_s: float) -> None:
        """Stage on every replica; on failure every replica keeps its weights.

        Raises:
            RefitError: Names the replicas that failed and the first one's reason.
        """
        ...

    def commit_weights(
        self, update: WeightUpdate, *, in_flight: InFlight, kv: KVCache, timeout_s: float
    ) -> tuple[CommitReport, ...]:
        """Commit on every replica; a replica that fails serves nothing until a refit completes on it.

        Raises:
            RefitError: Names the replicas that failed and the first one's reason.
        """
        ...


class WeightSource(Protocol):
    """The trainer's weights under checkpoint names, materialised one at a time."""

    def specs(self) -> tuple[TensorSpec, ...]:
        """Names, dtypes and full shapes of what iteration yields, in order, without moving anything."""
        ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A fresh pass over plain, full tensors, detached."""
        ...


class WeightTransport(Protocol):
    """Moves bytes from the trainer to where engines can load them."""

    name: str

    def stage(self, source: WeightSource, version: int, *, timeout_s: float) -> WeightUpdate:
        """Put one version where every engine can read it, and describe it.

        Raises:
            RefitError: The bytes could not be staged; earlier versions are untouched.
        """
        ...

    def retire(self, version: int) -> None:
        """Every replica serves ``version`` now: older ones may go."""
        ...

    def discard(self, update: WeightUpdate) -> None:
        """Remove a staged version that will not be committed."""
        ...

    def close(self) -> None:
        """Release everything. Idempotent."""
        ...

"""What policy and weights know of the service."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from rl_vllm.types import (
    AdapterState,
    AdapterUpdate,
    BadPrompt,
    CommitReport,
    CompletionBatch,
    InFlight,
    KVCache,
    ModelInfo,
    PromptBatch,
    SamplingConfig,
    TensorSpec,
    WeightReceiver,
    WeightUpdate,
)


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
        sampling: SamplingConfig | Sequence[SamplingConfig],
        *,
        timeout_s: float | None = None,
        on_bad_prompt: BadPrompt = BadPrompt.RAISE,
        actor_index: int | None = None,
    ) -> CompletionBatch:
        """Answer a batch: samples ordered by prompt row, then by sample; ``numbers_N`` holds rows.

        Args:
            prompts: B prompts; an empty batch returns at once.
            sampling: Used by every row, or one for each. ``max_tokens`` is clamped to what each row's context leaves.
                When one row asks for an optional column, the rows that did not hold ``()`` or NaN in it.
            timeout_s: Limit for the whole batch, or None for the configured one; on expiry everything is aborted.
            on_bad_prompt: ``RAISE`` refuses the batch before anything is sent; ``MARK`` lists the row in ``failures``.
            actor_index: The one replica that answers; None lets the service choose.

        Raises:
            BadPromptError: A prompt is empty, too long or out of the vocabulary, with ``on_bad_prompt=RAISE``.
            GenerationError: The engine refused rows, with ``on_bad_prompt=RAISE``.
            ConfigError: There is not one ``sampling`` for each prompt.
            DeadlineError: ``timeout_s`` passed.
            NoReplicaServesError: Fewer replicas serve, or are on their way, than the floor.
            ServiceOverloadedError: Too many requests are outstanding and the service was configured to refuse.
            ServiceAsleepError: The engines sleep, or have woken without weights.
            ServiceNotRunningError: Before launch or after shutdown.
        """
        ...

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        """The tensors a trainer must send; cached after the first call."""
        ...

    def weight_receivers(self) -> tuple[WeightReceiver, ...]:
        """The replicas that a refit which begins now would go to, with their workers and the machines they are on."""
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


@runtime_checkable
class AsyncGenerationService(GenerationService, Protocol):
    """A service that can be awaited, and that hands over samples as they finish; on any event loop."""

    async def agenerate_batch(
        self,
        prompts: PromptBatch,
        sampling: SamplingConfig | Sequence[SamplingConfig],
        *,
        timeout_s: float | None = None,
        on_bad_prompt: BadPrompt = BadPrompt.RAISE,
        actor_index: int | None = None,
    ) -> CompletionBatch:
        """As :meth:`generate_batch`; cancelling the caller aborts everything in the engines."""
        ...

    def stream_batch(
        self,
        prompts: PromptBatch,
        sampling: SamplingConfig | Sequence[SamplingConfig],
        *,
        timeout_s: float | None = None,
        on_bad_prompt: BadPrompt = BadPrompt.RAISE,
        actor_index: int | None = None,
    ) -> AsyncGenerator[CompletionBatch, None]:
        """As :meth:`generate_batch`, in chunks in the order in which samples finish.

        Every sample comes once, whole, those of one prompt together or one by one; ``numbers_N`` holds rows. All chunks
        have the same optional columns, and can be joined with :meth:`CompletionBatch.concatenate`. The work begins when
        the first chunk is asked for, which also raises what is wrong with the arguments. ``aclose()`` and cancelling
        the reader abort in the engines what is unfinished. The deadline is for the engines: a reader may take as long
        as it likes, and nothing is lost.

        With ``on_bad_prompt=MARK``, ``failures`` come in the chunks, once for each row. With ``RAISE``, rows that the
        engine refused are in no chunk, and named by the error that follows the last one.

        Raises:
            GenerationError, DeadlineError: As :meth:`generate_batch`, after the chunks of the samples that finished.
        """
        ...


@runtime_checkable
class AdapterService(GenerationService, Protocol):
    """A service whose adapters can be trained while it serves."""

    def trained_adapters(self) -> Mapping[str, int]:
        """The version that answers for each trained adapter; no engine is asked."""
        ...

    def adapter_state(self) -> AdapterState:
        """Which adapters there are, and what others would fit."""
        ...

    def stage_adapter(self, update: AdapterUpdate, *, timeout_s: float) -> float:
        """Load a version on every replica, or on none; requests may name it, and none gets it by another name.

        Old versions that hold the last slot are waited for, within the same limit.

        Returns:
            How long the slowest replica took, in seconds.

        Raises:
            AdapterRefitError: Phase "stage": names the replicas that failed and the first one's reason.
        """
        ...

    def commit_adapter(self, update: AdapterUpdate, *, default: bool) -> int:
        """Give a staged version to every request that begins from now on and names its adapter.

        The old version goes when no request of its is in flight.

        Args:
            update: As staged.
            default: Whether requests that name no adapter get it too.

        Returns:
            The number of replicas that have it.
        """
        ...

    def discard_adapter(self, update: AdapterUpdate) -> None:
        """Remove a staged version that will not be committed."""
        ...

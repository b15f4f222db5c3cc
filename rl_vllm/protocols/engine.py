"""What the service knows of an engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol, runtime_checkable

from rl_vllm.types import (
    CommitReport,
    CompletionBatch,
    EmbeddingBatch,
    EmbeddingRequest,
    EngineMetrics,
    InFlight,
    KVCache,
    LoRAAdapter,
    LoRALimits,
    ModelInfo,
    RequestBatch,
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

    def stream_pieces(self, batch: RequestBatch) -> AsyncGenerator[CompletionBatch, None]:
        """Generate, yielding each sample's new tokens as they are made.

        A chunk holds at most one piece of a sample; its ``finish_N`` is ``UNFINISHED`` but for the last piece, which
        may be without tokens. Failures and closing as in :meth:`stream`.
        """
        ...

    def embed(self, request: EmbeddingRequest) -> AsyncGenerator[EmbeddingBatch, None]:
        """Pool hidden states into one vector per prompt, yielding as prompts finish; closing as in :meth:`stream`.

        Raises:
            UnsupportedByEngineError: The model does not do this task.
        """
        ...

    async def abort(self, numbers: Sequence[int]) -> None:
        """Stop work on these requests at once; unknown numbers are ignored.

        Whoever streams them gets what was generated, with the finish reason ``ABORT``.
        """
        ...

    async def metrics(self) -> EngineMetrics:
        """The engine's own counts, as of now."""
        ...

    async def prometheus(self) -> str:
        """The engine's own metrics in Prometheus' text format; empty when it keeps none."""
        ...

    async def check_health(self) -> None:
        """Ask every process of the engine and return when each has answered; a hang does not return.

        Raises:
            EngineDiedError: The engine cannot serve.
        """
        ...

    async def engine_config(self) -> object:
        """The engine's own configuration object: vLLM's ``VllmConfig``."""
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

    async def reset_mm_cache(self) -> None:
        """Forget cached multi-modal inputs."""
        ...

    async def lora_limits(self) -> LoRALimits | None:
        """What adapters it takes, or None when it runs without LoRA."""
        ...

    async def add_lora(self, adapter: LoRAAdapter) -> None:
        """Load an adapter; from then on prompts may name it. One of the same name and number is loaded already: no-op.

        Raises:
            UnsupportedByEngineError: The engine runs without LoRA.
            ConfigError: The adapter cannot be loaded, with the engine's reason.
        """
        ...

    async def remove_lora(self, name: str) -> bool:
        """Unload an adapter; False when there is none of this name.

        Raises:
            ConfigError: Unfinished requests use it.
        """
        ...

    async def list_loras(self) -> tuple[LoRAAdapter, ...]:
        """The loaded adapters, by number."""
        ...

    async def pin_lora(self, name: str) -> None:
        """Keep an adapter loaded; raises :class:`ConfigError` when there is none of this name."""
        ...

    async def sleep(self, level: int) -> None:
        """Give memory back: KV is dropped, and the weights go to the host (level 1) or are dropped too (level 2)."""
        ...

    async def wake_up(self, tags: tuple[str, ...] | None) -> None:
        """Take memory again: ``weights``, ``kv_cache``, or None for both."""
        ...

    async def is_sleeping(self) -> bool: ...

    async def start_profile(self) -> None:
        """Raises :class:`UnsupportedByEngineError` when the engine was started without a profiler."""
        ...

    async def stop_profile(self) -> None: ...

    async def collective_rpc(
        self, method: str, *, timeout_s: float, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> list[object]:
        """Call a method on every worker."""
        ...

    async def shutdown(self) -> None:
        """Stop the engine and its processes. Idempotent."""
        ...

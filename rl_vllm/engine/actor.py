"""A vLLM engine in a Ray actor. This module loads vLLM only inside the actor's process."""

from __future__ import annotations

import os
import pickle
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from rl_vllm.config import EngineConfig
from rl_vllm.engine import reaper
from rl_vllm.engine.cpu_cores import CoreLease
from rl_vllm.engine.plugin import DIE_WITH_PARENT
from rl_vllm.engine.start_error import OutputMark, start_error
from rl_vllm.engine.starting import set_variable
from rl_vllm.errors import EngineStartError
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

if TYPE_CHECKING:
    from rl_vllm.engine.vllm_engine import VLLMEngine


class EngineActor:
    """The :class:`~rl_vllm.protocols.Engine` protocol, served by a Ray actor of its own.

    Args:
        config: The engine's settings.
        replica: Index of the replica it serves.
        on_cpu: Whether vLLM runs on CPUs here.
    """

    def __init__(self, config: EngineConfig, replica: int, *, on_cpu: bool) -> None:
        self._config = config
        self._replica = replica
        self._on_cpu = on_cpu
        self._lease: CoreLease | None = None
        self._engine: VLLMEngine | None = None
        # Detached from this process, so that it outlives it in every case; ends when nothing is left to clean up.
        reaper.start(os.getpid())

    async def start(self) -> ModelInfo:
        """Load the model and make a first token.

        Raises:
            EngineStartError: With the reason that the failing process gave.
        """
        mark = OutputMark()
        self._set_environment()
        try:
            # vLLM is imported here: the cores it sees are fixed when it is loaded.
            from rl_vllm.engine.vllm_engine import VLLMEngine

            self._engine = VLLMEngine(self._config, replica=self._replica, on_cpu=self._on_cpu)
            await self._engine.start()
        except Exception as error:
            raise start_error(error, mark, self._config, self._replica, on_cpu=self._on_cpu) from error
        return await self._engine.model_info()

    def _set_environment(self) -> None:
        # The plugin reads it in every process the engine starts; this one's pid tells the owner from them.
        os.environ[DIE_WITH_PARENT] = str(os.getpid())
        # Ray's actors run their event loop in a thread that vLLM must not fork from.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        if self._on_cpu:
            self._lease = CoreLease(num_workers=self._config.num_workers, cores_per_worker=self._config.cpu_cores)
            for name, value in self._lease.environment.items():
                set_variable(name, value)

    @property
    def _running(self) -> VLLMEngine:
        if self._engine is None:
            raise EngineStartError(self._replica, "it was used before it started")
        return self._engine

    async def model_info(self) -> ModelInfo:
        return await self._running.model_info()

    async def stream(self, batch: RequestBatch) -> AsyncGenerator[CompletionBatch, None]:
        async with aclosing(self._running.stream(batch)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def stream_pieces(self, batch: RequestBatch) -> AsyncGenerator[CompletionBatch, None]:
        async with aclosing(self._running.stream_pieces(batch)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def embed(self, request: EmbeddingRequest) -> AsyncGenerator[EmbeddingBatch, None]:
        async with aclosing(self._running.embed(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def abort(self, numbers: Sequence[int]) -> None:
        await self._running.abort(numbers)

    async def metrics(self) -> EngineMetrics:
        return await self._running.metrics()

    async def prometheus(self) -> str:
        return await self._running.prometheus()

    async def check_health(self) -> None:
        await self._running.check_health()

    async def engine_config(self) -> object:
        return await self._running.engine_config()

    async def pickled_engine_config(self) -> bytes:
        """For the driver, which unpickles it where that may take seconds."""
        return pickle.dumps(await self._running.engine_config())

    async def weight_specs(self) -> tuple[TensorSpec, ...]:
        return await self._running.weight_specs()

    async def stage_weights(self, update: WeightUpdate, *, timeout_s: float) -> None:
        await self._running.stage_weights(update, timeout_s=timeout_s)

    async def commit_weights(self, update: WeightUpdate, *, in_flight: InFlight, kv: KVCache) -> CommitReport:
        return await self._running.commit_weights(update, in_flight=in_flight, kv=kv)

    async def reset_prefix_cache(self) -> bool:
        return await self._running.reset_prefix_cache()

    async def reset_mm_cache(self) -> None:
        await self._running.reset_mm_cache()

    async def lora_limits(self) -> LoRALimits | None:
        return await self._running.lora_limits()

    async def add_lora(self, adapter: LoRAAdapter) -> None:
        await self._running.add_lora(adapter)

    async def remove_lora(self, name: str) -> bool:
        return await self._running.remove_lora(name)

    async def list_loras(self) -> tuple[LoRAAdapter, ...]:
        return await self._running.list_loras()

    async def pin_lora(self, name: str) -> None:
        await self._running.pin_lora(name)

    async def sleep(self, level: int) -> None:
        await self._running.sleep(level)

    async def wake_up(self, tags: tuple[str, ...] | None) -> None:
        await self._running.wake_up(tags)

    async def is_sleeping(self) -> bool:
        return await self._running.is_sleeping()

    async def start_profile(self) -> None:
        await self._running.start_profile()

    async def stop_profile(self) -> None:
        await self._running.stop_profile()

    async def collective_rpc(
        self, method: str, *, timeout_s: float, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> list[object]:
        return await self._running.collective_rpc(method, timeout_s=timeout_s, args=args, kwargs=kwargs)

    async def shutdown(self) -> None:
        if self._engine is not None:
            await self._engine.shutdown()
        if self._lease is not None:
            self._lease.release()

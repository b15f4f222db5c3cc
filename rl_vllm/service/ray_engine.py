"""The driver's end of an engine in a Ray actor."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import Any, TypeVar

from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from rl_vllm.errors import EngineDiedError
from rl_vllm.types import (
    CommitReport,
    CompletionBatch,
    EngineMetrics,
    InFlight,
    KVCache,
    ModelInfo,
    RequestBatch,
    TensorSpec,
    WeightUpdate,
)

T = TypeVar("T")


class RayEngine:
    """Proxy with the :class:`~rl_vllm.protocols.Engine` protocol; errors arrive as the engine raised them.

    Args:
        actor: A :class:`~rl_vllm.engine.actor.EngineActor`.
        replica: Index of the replica it serves.
    """

    def __init__(self, actor: ActorHandle, replica: int) -> None:
        self.actor: Any = actor
        self._replica = replica

    async def start(self) -> ModelInfo:
        """Load the model; see :meth:`EngineActor.start`."""
        return await self._call(self.actor.start.remote())

    async def model_info(self) -> ModelInfo:
        return await self._call(self.actor.model_info.remote())

    async def stream(self, batch: RequestBatch) -> AsyncGenerator[CompletionBatch, None]:
        chunks = self.actor.stream.options(num_returns="streaming").remote(batch)
        ended = False
        try:
            async for reference in chunks:
                yield await self._call(reference)
            ended = True
        except RayActorError as error:
            ended = True
            raise EngineDiedError(self._replica, _first_line(error)) from error
        except EngineDiedError:
            ended = True
            raise
        finally:
            if not ended:
                # Fire and forget: this may run while the caller is being cancelled, and the engine needs no answer.
                self.actor.abort.remote(batch.numbers_B.tolist())

    async def abort(self, numbers: Sequence[int]) -> None:
        await self._call(self.actor.abort.remote(list(numbers)))

    async def metrics(self) -> EngineMetrics:
        return await self._call(self.actor.metrics.remote())

    async def check_health(self) -> None:
        await self._call(self.actor.check_health.remote())

    async def weight_specs(self) -> tuple[TensorSpec, ...]:
        return await self._call(self.actor.weight_specs.remote())

    async def stage_weights(self, update: WeightUpdate, *, timeout_s: float) -> None:
        await self._call(self.actor.stage_weights.remote(update, timeout_s=timeout_s))

    async def commit_weights(self, update: WeightUpdate, *, in_flight: InFlight, kv: KVCache) -> CommitReport:
        return await self._call(self.actor.commit_weights.remote(update, in_flight=in_flight, kv=kv))

    async def reset_prefix_cache(self) -> bool:
        return await self._call(self.actor.reset_prefix_cache.remote())

    async def collective_rpc(
        self, method: str, *, timeout_s: float, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> list[object]:
        return await self._call(self.actor.collective_rpc.remote(method, timeout_s=timeout_s, args=args, kwargs=kwargs))

    async def shutdown(self) -> None:
        await self._call(self.actor.shutdown.remote())

    async def _call(self, reference: Awaitable[T]) -> T:
        try:
            return await reference
        except RayActorError as error:
            raise EngineDiedError(self._replica, _first_line(error)) from error
        except RayTaskError as error:
            # Ray's wrapper is also an instance of the class that was raised, but not that object and not picklable.
            raise error.cause from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__

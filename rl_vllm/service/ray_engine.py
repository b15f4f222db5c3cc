"""The driver's end of an engine in a Ray actor."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import Any, TypeVar

from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from rl_vllm.errors import EngineDiedError, ReplicaCallError
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

T = TypeVar("T")


class RayEngine:
    """Proxy with the :class:`~rl_vllm.protocols.Engine` protocol; errors arrive as the engine raised them.

    Once the actor is known to be dead, every call raises :class:`EngineDiedError` without asking Ray. What Ray says
    otherwise (it cannot reach the actor, or has lost an answer) is a :class:`ReplicaCallError` for a call; for a stream
    it is an :class:`EngineDiedError`, because what was not yielded is lost.

    Args:
        actor: A :class:`~rl_vllm.engine.actor.EngineActor`.
        replica: Index of the replica it serves.
    """

    def __init__(self, actor: ActorHandle, replica: int) -> None:
        self.actor: Any = actor
        self._replica = replica
        self._death: EngineDiedError | None = None

    async def start(self) -> ModelInfo:
        """Load the model; see :meth:`EngineActor.start`."""
        info: ModelInfo = await self._call("start")
        return info

    async def model_info(self) -> ModelInfo:
        info: ModelInfo = await self._call("model_info")
        return info

    def stream(self, batch: RequestBatch) -> AsyncGenerator[CompletionBatch, None]:
        return self._stream("stream", batch)

    def stream_pieces(self, batch: RequestBatch) -> AsyncGenerator[CompletionBatch, None]:
        return self._stream("stream_pieces", batch)

    def embed(self, request: EmbeddingRequest) -> AsyncGenerator[EmbeddingBatch, None]:
        return self._stream("embed", request)

    async def _stream(self, method: str, request: RequestBatch | EmbeddingRequest) -> AsyncGenerator[Any, None]:
        self._require_alive()
        chunks = getattr(self.actor, method).options(num_returns="streaming").remote(request)
        has_ended = False
        try:
            async for reference in chunks:
                yield await self._answer(method, reference)
            has_ended = True
        except EngineDiedError:
            has_ended = True
            raise
        except RayError as error:
            has_ended = isinstance(error, RayActorError)
            raise self._dead(error) if has_ended else self._lost(error) from error
        except ReplicaCallError as error:
            raise self._lost(error) from error
        finally:
            if not has_ended:
                # Fire and forget: this may run while the caller is being cancelled, and the engine needs no answer.
                self.actor.abort.remote(request.numbers_B.tolist())

    async def abort(self, numbers: Sequence[int]) -> None:
        await self._call("abort", list(numbers))

    async def metrics(self) -> EngineMetrics:
        metrics: EngineMetrics = await self._call("metrics")
        return metrics

    async def prometheus(self) -> str:
        text: str = await self._call("prometheus")
        return text

    async def check_health(self) -> None:
        await self._call("check_health")

    async def engine_config(self) -> object:
        # Unpickling imports vLLM, which takes seconds: not on the loop.
        return await asyncio.to_thread(pickle.loads, await self._call("pickled_engine_config"))

    async def weight_specs(self) -> tuple[TensorSpec, ...]:
        specs: tuple[TensorSpec, ...] = await self._call("weight_specs")
        return specs

    async def stage_weights(self, update: WeightUpdate, *, timeout_s: float) -> None:
        await self._call("stage_weights", update, timeout_s=timeout_s)

    async def commit_weights(self, update: WeightUpdate, *, in_flight: InFlight, kv: KVCache) -> CommitReport:
        report: CommitReport = await self._call("commit_weights", update, in_flight=in_flight, kv=kv)
        return report

    async def reset_prefix_cache(self) -> bool:
        return bool(await self._call("reset_prefix_cache"))

    async def reset_mm_cache(self) -> None:
        await self._call("reset_mm_cache")

    async def lora_limits(self) -> LoRALimits | None:
        limits: LoRALimits | None = await self._call("lora_limits")
        return limits

    async def add_lora(self, adapter: LoRAAdapter) -> None:
        await self._call("add_lora", adapter)

    async def remove_lora(self, name: str) -> bool:
        return bool(await self._call("remove_lora", name))

    async def list_loras(self) -> tuple[LoRAAdapter, ...]:
        adapters: tuple[LoRAAdapter, ...] = await self._call("list_loras")
        return adapters

    async def pin_lora(self, name: str) -> None:
        await self._call("pin_lora", name)

    async def sleep(self, level: int) -> None:
        await self._call("sleep", level)

    async def wake_up(self, tags: tuple[str, ...] | None) -> None:
        await self._call("wake_up", tags)

    async def is_sleeping(self) -> bool:
        return bool(await self._call("is_sleeping"))

    async def start_profile(self) -> None:
        await self._call("start_profile")

    async def stop_profile(self) -> None:
        await self._call("stop_profile")

    async def collective_rpc(
        self, method: str, *, timeout_s: float, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> list[object]:
        answers: list[object] = await self._call(
            "collective_rpc", method, timeout_s=timeout_s, args=args, kwargs=kwargs
        )
        return answers

    async def shutdown(self) -> None:
        await self._call("shutdown")

    async def _call(self, method: str, *args: object, **kwargs: object) -> Any:
        self._require_alive()
        return await self._answer(method, getattr(self.actor, method).remote(*args, **kwargs))

    async def _answer(self, method: str, reference: Awaitable[Any]) -> Any:
        try:
            return await reference
        except RayTaskError as error:
            # Ray's wrapper is also an instance of the class that was raised, but not that object and not picklable.
            if isinstance(error.cause, RayError):
                # What was raised cannot be pickled: Ray tells of it in an error of its own.
                raise self._failed(method, error.cause) from error
            raise error.cause from None
        except ActorUnavailableError as error:
            raise self._failed(method, error) from error
        except RayActorError as error:
            raise self._dead(error) from error
        except RayError as error:
            raise self._failed(method, error) from error

    def _require_alive(self) -> None:
        if self._death is not None:
            raise EngineDiedError(self._death.replica, self._death.reason)

    def _dead(self, error: RayActorError) -> EngineDiedError:
        death = EngineDiedError(self._replica, _first_line(error))
        if not isinstance(error, ActorUnavailableError):
            self._death = death
        return death

    def _lost(self, error: Exception) -> EngineDiedError:
        return EngineDiedError(self._replica, f"an answer was lost: {_first_line(error)}")

    def _failed(self, method: str, error: RayError) -> ReplicaCallError:
        return ReplicaCallError(f"{method}()", ((self._replica, f"{type(error).__name__}: {_first_line(error)}"),))


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__

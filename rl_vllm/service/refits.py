"""A refit as the service carries it out: the same call on every replica, and what a failure makes of each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rl_vllm.errors import DeadlineError, EngineDiedError, RefitError
from rl_vllm.service.replicas import Replica, ReplicaSet
from rl_vllm.types import CommitReport, InFlight, KVCache, ReplicaState, TensorSpec, WeightUpdate

T = TypeVar("T")


class WeightsControl:
    """Weights of all replicas; used on the service's loop only."""

    def __init__(self, replicas: ReplicaSet) -> None:
        self._replicas = replicas
        self._specs: tuple[TensorSpec, ...] | None = None

    async def specs(self) -> tuple[TensorSpec, ...]:
        if self._specs is None:
            # A stale replica knows them as well; serving() says what is wrong when there is none of either.
            replica = (self._replicas.living() or self._replicas.serving())[0]
            self._specs = await replica.engine.weight_specs()
        return self._specs

    async def stage(self, update: WeightUpdate, timeout_s: float) -> None:
        """Stage everywhere or raise; no replica's weights have changed either way.

        A replica that turns out to be dead fails this update; the next one goes on without it.
        """
        replicas = self._targets(update, "stage")
        results = await self._on_all(replicas, lambda r: r.engine.stage_weights(update, timeout_s=timeout_s), timeout_s)
        for replica, result in zip(replicas, results, strict=True):
            if isinstance(result, EngineDiedError):
                self._replicas.set_state(replica, ReplicaState.DEAD, str(result))
        _raise_failures(update, "stage", replicas, results)

    async def commit(
        self, update: WeightUpdate, *, in_flight: InFlight, kv: KVCache, timeout_s: float
    ) -> tuple[CommitReport, ...]:
        """Commit everywhere; a replica on which it failed is stale and serves nothing, the others serve the update.

        A stale replica's engine stays paused: whoever watches the replicas must take its unfinished requests elsewhere.
        """
        replicas = self._targets(update, "commit")
        results = await self._on_all(
            replicas, lambda r: r.engine.commit_weights(update, in_flight=in_flight, kv=kv), timeout_s
        )
        for replica, result in zip(replicas, results, strict=True):
            if isinstance(result, CommitReport):
                replica.version = result.version
                self._replicas.set_state(replica, ReplicaState.SERVING, f"version {result.version} committed")
            elif isinstance(result, EngineDiedError):
                self._replicas.set_state(replica, ReplicaState.DEAD, str(result))
            else:
                self._replicas.set_state(replica, ReplicaState.STALE, f"commit of version {update.version} failed")
        _raise_failures(update, "commit", replicas, results)
        return tuple(result for result in results if isinstance(result, CommitReport))

    def _targets(self, update: WeightUpdate, phase: str) -> list[Replica]:
        replicas = self._replicas.living()
        if not replicas:
            indices = tuple(replica.index for replica in self._replicas.all)
            raise RefitError(update.version, phase, indices, "no replica is alive")
        return replicas

    @staticmethod
    async def _on_all(
        replicas: list[Replica], call: Callable[[Replica], Coroutine[Any, Any, T]], timeout_s: float
    ) -> list[T | BaseException]:
        async def one(replica: Replica) -> T:
            try:
                async with asyncio.timeout(timeout_s):
                    return await call(replica)
            except TimeoutError as error:
                if isinstance(error, DeadlineError):
                    raise
                raise DeadlineError(f"replica {replica.index}", timeout_s) from error

        return await asyncio.gather(*(one(replica) for replica in replicas), return_exceptions=True)


def _raise_failures(
    update: WeightUpdate, phase: str, replicas: list[Replica], results: list[T | BaseException]
) -> None:
    failed = [(r.index, e) for r, e in zip(replicas, results, strict=True) if isinstance(e, BaseException)]
    if not failed:
        return
    index, first = failed[0]
    reason = first.reason if isinstance(first, RefitError) else str(first)
    raise RefitError(update.version, phase, tuple(i for i, _ in failed), f"replica {index}: {reason}") from first

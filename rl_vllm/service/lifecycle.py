"""What happens to replicas after launch: death, restart, arrival and departure."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager

from rl_vllm.config import HealthConfig, ServiceConfig, require_at_least
from rl_vllm.errors import ConfigError, RefitError
from rl_vllm.service.executors import Executor
from rl_vllm.service.health import Heartbeats
from rl_vllm.service.observe.counters import ServiceCounters
from rl_vllm.service.replicas import Replica, ReplicaSet
from rl_vllm.types import ReplicaState

logger = logging.getLogger(__name__)

# Doubling must end somewhere, or a generous budget would be spent waiting.
_LONGEST_PAUSE_S = 60.0


class Lifecycle:
    """Notices deaths, restarts what died, and adds and removes replicas; used on the service's loop only.

    Args:
        replicas: Where states are kept.
        executor: Starts and stops engines.
        config: The service's settings.
        counters: Where deaths and restarts are counted.
        restore: Gives a replica that has just started what the others have: adapters, then the last committed weights.
            A :class:`RefitError` from it leaves the replica stale, until a refit completes; any other error makes the
            start a failed one.
    """

    def __init__(
        self,
        replicas: ReplicaSet,
        executor: Executor,
        config: ServiceConfig,
        counters: ServiceCounters,
        *,
        restore: Callable[[Replica], Awaitable[None]],
    ) -> None:
        self._replicas = replicas
        self._executor = executor
        self._config = config
        self._counters = counters
        self._restore = restore
        self._heartbeats = Heartbeats(replicas, config.health)
        self._reviving: dict[Replica, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving: set[Replica] = set()
        self._is_closed = False

    def start(self) -> None:
        """Begin the heartbeats and look after the replicas."""
        self._replicas.watch(self._replica_changed)
        for replica in self._replicas.all:
            self._heartbeats.watch(replica)

    async def close(self) -> None:
        """End heartbeats and restarts; engines are left as they are. Idempotent."""
        self._is_closed = True
        self._replicas.unwatch(self._replica_changed)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._heartbeats.close()

    def quiet(self, replica: Replica) -> AbstractContextManager[None]:
        """Suspend a replica's heartbeat during a call that may keep its engine from answering: commit, sleep, ..."""
        return self._heartbeats.quiet(replica)

    async def add(self, count: int) -> list[int]:
        """Start further replicas, at the same time, and let them serve.

        Returns:
            Their indices, which no replica had before. One that could not be given what the others have is stale until
            the next refit, or is started again, as after a restart.

        Raises:
            ConfigError: ``count`` is below 1.
            NotEnoughResourcesError: They do not fit; none of them is left.
            EngineStartError: One did not start; none of them is left.
            DeadlineError: One took too long; none of them is left.
        """
        require_at_least("count", count, 1)
        added = [self._replicas.enlist() for _ in range(count)]
        for replica in added:
            replica.awaited = True
        try:
            engines = await asyncio.gather(
                *(self._executor.start_one(replica.index) for replica in added), return_exceptions=True
            )
            for engine in engines:
                if isinstance(engine, BaseException):
                    raise engine
            for replica, engine in zip(added, engines, strict=True):
                assert not isinstance(engine, BaseException)
                self._replicas.renew(replica, engine)
                self._heartbeats.watch(replica)
            results = await asyncio.gather(*(self._enter(r, "it started") for r in added), return_exceptions=True)
            for replica, result in zip(added, results, strict=True):
                if isinstance(result, BaseException):
                    self._replicas.set_state(replica, ReplicaState.DEAD, _in_words(result))
        except BaseException:
            await asyncio.gather(*(self._withdraw(replica, "it did not start") for replica in added))
            raise
        return [replica.index for replica in added]

    async def remove(self, index: int) -> None:
        """Stop a replica for good: it gets nothing new, finishes what it has, and is no longer listed.

        What it has not finished within the limit for calls moves to the others.

        Raises:
            ReplicaIndexError: There is none with this index.
            ConfigError: Fewer than ``min_serving`` would be left to serve, or it is being removed already.
        """
        replica = self._replicas.by_index(index)
        if replica in self._leaving:
            raise ConfigError(f"replica {index} is being removed already")
        left, floor = len([r for r in self._replicas.serving_now() if r is not replica]), self._replicas.min_serving
        if left < floor:
            raise ConfigError(f"without replica {index}, {left} replicas would serve, fewer than min_serving={floor}")
        serves = replica.state.serves
        self._leaving.add(replica)
        try:
            if serves:
                await self._drain(replica)
            await self._withdraw(replica, "it was removed")
        finally:
            self._leaving.discard(replica)
            if not self._is_closed and replica.state is not ReplicaState.RETIRED:
                self._resume(replica)

    def _resume(self, replica: Replica) -> None:
        """Look after a replica again whose removal was given up, wherever that was."""
        self._heartbeats.watch(replica)
        if replica.state is ReplicaState.DRAINING:
            self._replicas.set_state(replica, ReplicaState.HEALTHY, "its removal was given up")
        elif replica.state in (ReplicaState.DEAD, ReplicaState.RESTARTING) and replica not in self._reviving:
            # Its death came while it was leaving, or the removal had ended its restart.
            self._begin_revival(replica)

    async def _drain(self, replica: Replica) -> None:
        self._replicas.set_state(replica, ReplicaState.DRAINING, "it is being removed")
        limit_s = self._config.rpc_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await replica.idle.wait()
        except TimeoutError:
            count = replica.outstanding_requests
            logger.info(
                "replica %d: %d requests were not finished within %.0f s and move", replica.index, count, limit_s
            )

    async def _withdraw(self, replica: Replica, reason: str) -> None:
        """Stop a replica, whatever it is doing, and list it no longer."""
        replica.awaited = False
        task = self._reviving.pop(replica, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._heartbeats.forget(replica)
        self._replicas.set_state(replica, ReplicaState.RETIRED, reason)
        await self._stop(replica)
        self._replicas.dismiss(replica)

    def _replica_changed(self, replica: Replica) -> None:
        if replica.state is not ReplicaState.DEAD or replica in self._reviving:
            return
        self._counters.deaths += 1
        if replica not in self._leaving:
            self._begin_revival(replica)

    def _begin_revival(self, replica: Replica) -> None:
        replica.awaited = replica.restarts < self._config.health.max_restarts
        task = asyncio.create_task(self._revive(replica), name=f"replica-{replica.index}-restart")
        self._reviving[replica] = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _revive(self, replica: Replica) -> None:
        """Start a dead replica again until it is up or its budget is spent."""
        health = self._config.health
        while replica.restarts < health.max_restarts:
            pause_s = _pause_s(health, replica.restarts)
            replica.restarts += 1
            attempt = f"restart {replica.restarts} of {health.max_restarts}"
            self._replicas.set_state(replica, ReplicaState.RESTARTING, f"{attempt}, after: {replica.reason}")
            await asyncio.sleep(pause_s)
            # Gathered, because whatever a start runs into is a failed start.
            (error,) = await asyncio.gather(self._start_again(replica, attempt), return_exceptions=True)
            if error is None:
                self._counters.restarts += 1
                return
            self._replicas.set_state(replica, ReplicaState.DEAD, f"{attempt} failed: {_in_words(error)}")
        del self._reviving[replica]
        replica.awaited = False
        self._replicas.set_state(
            replica, ReplicaState.RETIRED, f"{health.max_restarts} restarts are used up; last, {replica.reason}"
        )
        await self._stop(replica)

    async def _start_again(self, replica: Replica, attempt: str) -> None:
        started = time.perf_counter()
        await self._executor.stop_one(replica.index)
        self._replicas.renew(replica, await self._executor.start_one(replica.index))
        await self._enter(replica, f"{attempt} took {time.perf_counter() - started:.1f} s")

    async def _enter(self, replica: Replica, how: str) -> None:
        """Give a replica that has just started what the others have, and let it serve."""
        try:
            await self._restore(replica)
        except RefitError as error:
            state, reason = ReplicaState.STALE, f"{how}, but {_in_words(error)}"
        else:
            state, reason = ReplicaState.HEALTHY, f"{how}; it has version {replica.version}"
        # In the same step as the end of the restore: a commit that begins from now on reaches this replica.
        self._reviving.pop(replica, None)
        replica.awaited = False
        self._replicas.set_state(replica, state, reason)

    async def _stop(self, replica: Replica) -> None:
        (error,) = await asyncio.gather(self._executor.stop_one(replica.index), return_exceptions=True)
        if error is not None:
            logger.warning("replica %d could not be stopped: %s", replica.index, _in_words(error))


def _pause_s(health: HealthConfig, num_restarts: int) -> float:
    """Seconds before the next restart, after this many."""
    if not num_restarts:
        return 0.0
    doublings = min(num_restarts - 1, 32)
    return min(health.restart_pause_s * 2.0**doublings, max(health.restart_pause_s, _LONGEST_PAUSE_S))


def _in_words(error: BaseException) -> str:
    return str(error) or type(error).__name__

"""A service's inner parts over fake engines, without a loop thread of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

from rl_vllm.config import HealthConfig
from rl_vllm.service.dispatch import Dispatcher
from rl_vllm.service.lifecycle import Lifecycle
from rl_vllm.service.observe.counters import ServiceCounters
from rl_vllm.service.refits import WeightsControl
from rl_vllm.service.replicas import Replica, ReplicaSet
from rl_vllm.service.router import Router
from rl_vllm.testing import FakeEngine, FakeExecutor, FakeExecutorScript
from rl_vllm.types import CompletionBatch, InFlight, KVCache, PromptBatch, ReplicaState, SamplingConfig

from .conftest import TWO_TOKENS, service_config, update

# A fake that is well answers a check in the same step of the loop: no load on the machine makes it miss this limit.
QUICK = HealthConfig(heartbeat_period_s=0.002, heartbeat_timeout_s=0.02, max_failures=2, restart_pause_s=0.001)
EVENTUALLY_S = 60.0


class Fleet:
    """Replicas that are watched, restarted and refitted; use it as an async context manager."""

    def __init__(
        self,
        *fakes: FakeEngine,
        make: Callable[[int], FakeEngine] = FakeEngine,
        health: HealthConfig = QUICK,
        restore: Callable[[Replica], object] | None = None,
        **settings: object,
    ) -> None:
        self.config = service_config(len(fakes), health=health, **settings)
        self.counters = ServiceCounters()
        self.replicas = ReplicaSet(list(fakes), min_serving=health.min_serving)
        self.router = Router(self.config.routing, block_size=16)
        self.dispatcher = Dispatcher(self.replicas, self.router, self.counters, self.config)
        self.executor = FakeExecutor(fakes, script=FakeExecutorScript(make=make))
        self.lifecycle = Lifecycle(
            self.replicas,
            self.executor,
            self.config,
            self.counters,
            restore=lambda replica: (restore or self.weights.restore)(replica),
        )
        self.weights = WeightsControl(
            self.replicas, router=self.router, counters=self.counters, quiet=self.lifecycle.quiet
        )

    async def __aenter__(self) -> Fleet:
        self.lifecycle.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.lifecycle.close()
        await self.executor.close()

    async def generate(
        self,
        batch: PromptBatch,
        rows: list[int] | None = None,
        sampling: SamplingConfig = TWO_TOKENS,
        *,
        only: int | None = None,
    ) -> CompletionBatch:
        rows = list(range(len(batch))) if rows is None else rows
        async with aclosing(self.dispatcher.stream(batch, rows, [sampling] * len(rows), only=only)) as stream:
            return CompletionBatch.concatenate([chunk async for chunk in stream])

    async def pieces(self, batch: PromptBatch, sampling: SamplingConfig = TWO_TOKENS) -> CompletionBatch:
        settings = [sampling] * len(batch)
        async with aclosing(self.dispatcher.stream_pieces(batch, list(range(len(batch))), settings)) as stream:
            return CompletionBatch.concatenate([chunk async for chunk in stream])

    async def stage(self, version: int) -> None:
        await self.weights.stage(update(version), timeout_s=EVENTUALLY_S)

    async def commit(self, version: int, timeout_s: float = EVENTUALLY_S) -> None:
        await self.weights.commit(update(version), in_flight=InFlight.KEEP, kv=KVCache.RECOMPUTE, timeout_s=timeout_s)

    async def refit(self, version: int) -> None:
        await self.stage(version)
        await self.commit(version)

    def engine(self, index: int) -> FakeEngine:
        """The engine that a replica has now."""
        engine = self.replicas.by_index(index).engine
        assert isinstance(engine, FakeEngine)
        return engine

    @property
    def states(self) -> list[ReplicaState]:
        return [replica.state for replica in self.replicas.all]

    @property
    def outstanding(self) -> list[tuple[int, int]]:
        return [(replica.outstanding_requests, replica.outstanding_tokens) for replica in self.replicas.all]

    async def until_state(self, index: int, state: ReplicaState) -> Replica:
        replica = self.replicas.by_index(index)
        await until(lambda: replica.state is state)
        return replica


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition of this loop's own making."""
    async with asyncio.timeout(EVENTUALLY_S):
        while not condition():  # noqa: ASYNC110 (many parts make it true; none of them knows of tests)
            await asyncio.sleep(0.001)

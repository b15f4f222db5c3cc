"""Many requests over many replicas that die, hang, dawdle and are refitted: none is lost, none comes twice."""

from __future__ import annotations

import asyncio
import gc
import random

import numpy as np
import psutil
import pytest

from rl_vllm.config import HealthConfig
from rl_vllm.errors import RefitError
from rl_vllm.testing import FakeEngine, FakeEngineScript
from rl_vllm.types import CompletionBatch, PromptBatch, ReplicaState

from .conftest import update
from .fleet import EVENTUALLY_S, Fleet, until

NUM_REPLICAS = 64
# Long against a period, so that the heartbeats of 64 replicas cost little; hangs are noticed after half a second.
HEALTH = HealthConfig(
    heartbeat_period_s=0.05, heartbeat_timeout_s=0.2, max_failures=2, max_restarts=10_000, restart_pause_s=1e-6
)
NUM_CALLERS = 12
LARGEST_BATCH = 512
GROWTH_BYTES = 50_000_000


class Soak:
    """Callers, chaos and refits on one fleet."""

    def __init__(self, num_requests: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.left = num_requests
        self.answered = 0
        self.cancelled_calls = 0
        self.num_hangs = 0
        self.refitted = 0
        self.fleet = Fleet(
            *(FakeEngine(index, script=self._script()) for index in range(NUM_REPLICAS)),
            make=lambda index: FakeEngine(index, script=self._script()),
            health=HEALTH,
            max_outstanding_requests=2048,
        )

    def _script(self) -> FakeEngineScript:
        """One engine in eight is slow."""
        delay_s = 0.02 if self.random.random() < 1 / 8 else 0.001
        return FakeEngineScript(delay_s=lambda _request: delay_s)

    async def run(self) -> None:
        total = self.left
        async with self.fleet:
            chaos, refits = self._chaos(total), self._refit_at([total // 3, 2 * total // 3])
            callers = [self._caller() for _ in range(NUM_CALLERS)]
            await asyncio.gather(chaos, refits, *callers)
            assert self.answered == total
            await self._check_that_nothing_remains()

    async def _caller(self) -> None:
        while self.left:
            count = min(self.left, self.random.randint(1, LARGEST_BATCH))
            self.left -= count
            rows = [[self.random.randrange(3, 64) for _ in range(self.random.randint(1, 4))] for _ in range(count)]
            batch = PromptBatch.from_rows(rows)
            while True:
                work = asyncio.create_task(self.fleet.generate(batch))
                if self.random.random() < 0.05:
                    # Given up by its caller, who asks again.
                    await asyncio.wait([work], timeout=self.random.random() * 0.02)
                    work.cancel()
                    await asyncio.gather(work, return_exceptions=True)
                    self.cancelled_calls += 1
                    continue
                check_answers(rows, await work)
                break
            self.answered += count

    async def _chaos(self, total: int) -> None:
        """Something happens with every hundredth answer: four deaths and a hang in ten."""
        for event in range(total // 100):
            await until(lambda event=event: self.answered >= 100 * event)
            busy = [r for r in self.fleet.replicas.all if r.state.is_up and r.outstanding_requests]
            if not busy:
                continue
            engine = self.fleet.engine(self.random.choice(busy).index)
            # The fakes remember what they were given; that is not the service's memory.
            engine.batches.clear()
            if event % 10 in (1, 3, 5, 7):
                engine.kill("chaos")
            elif event % 10 == 8:
                engine.hang()
                self.num_hangs += 1
                if self.num_hangs % 3 == 0:
                    asyncio.get_running_loop().call_later(0.3, engine.go_on)

    async def _refit_at(self, moments: list[int]) -> None:
        version = 0
        for moment in moments:
            await until(lambda moment=moment: self.answered >= moment)
            while self.fleet.counters.refits <= self.refitted:
                version += 1
                try:
                    await self._refit(version)
                except RefitError:
                    # A replica died or hung in the middle of it.
                    continue
            self.refitted += 1

    async def _refit(self, version: int) -> None:
        await self.fleet.weights.stage(update(version), timeout_s=2.0)
        await self.fleet.commit(version, timeout_s=2.0)

    async def _check_that_nothing_remains(self) -> None:
        fleet = self.fleet
        for replica in fleet.replicas.all:
            fleet.engine(replica.index).go_on()
        await until(lambda: all(state is ReplicaState.HEALTHY for state in fleet.states))
        assert fleet.outstanding == [(0, 0)] * NUM_REPLICAS
        assert fleet.dispatcher.admission.outstanding == 0
        assert [(await replica.engine.metrics()).num_running for replica in fleet.replicas.all] == [0] * NUM_REPLICAS
        assert {replica.version for replica in fleet.replicas.all} == {fleet.weights.committed.version}
        counters = fleet.counters
        assert counters.requests == counters.completed + counters.cancelled
        assert counters.failed == 0
        # The run was no stroll.
        assert min(counters.deaths, counters.rerouted, self.cancelled_calls, self.num_hangs) > 0
        assert counters.refits == 2


def check_answers(rows: list[list[int]], batch: CompletionBatch) -> None:
    """Each row once, with the stated answer: token t of a prompt is 3 + (sum of the prompt + t) % 61."""
    assert batch.failures == ()
    batch = batch.sorted_rows()
    assert batch.numbers_N.tolist() == list(range(len(rows)))
    sums = np.array([sum(row) for row in rows])
    expected = np.stack([3 + sums % 61, 3 + (sums + 1) % 61], axis=1)
    assert batch.tokens_T.reshape(-1, 2).tolist() == expected.tolist()


async def test_ten_thousand_requests_are_each_answered_once():
    async with asyncio.timeout(4 * EVENTUALLY_S):
        await Soak(10_000, seed=7).run()


@pytest.mark.slow
async def test_a_hundred_thousand_requests_are_each_answered_once_and_leave_no_memory_behind():
    await Soak(5_000, seed=1).run()
    before = resident_bytes()
    await Soak(100_000, seed=7).run()
    assert resident_bytes() - before < GROWTH_BYTES


def resident_bytes() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

import pytest

from rl_vllm.service.observe.sampler import Sampler
from rl_vllm.service.replicas import ReplicaSet
from rl_vllm.testing import FakeEngine
from rl_vllm.types import EngineMetrics, ReplicaSample, ReplicaState


class Scripted(FakeEngine):
    """Says what it is told to, and counts how often it was asked."""

    def __init__(self, replica: int, *, tokens: int = 0, running: int = 0) -> None:
        super().__init__(replica)
        self.says = EngineMetrics(num_running=running, num_waiting=1, kv_cache_usage=0.25, generated_tokens=tokens)
        self.asked = 0

    async def metrics(self) -> EngineMetrics:
        self.asked += 1
        await super().metrics()
        return self.says

    def make(self, tokens: int) -> None:
        self.says = EngineMetrics(num_running=1, num_waiting=0, kv_cache_usage=0.5, generated_tokens=tokens)


class Clock:
    """Stands still until it is told the time."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def sampler(replicas: ReplicaSet, **settings: object) -> Sampler:
    return Sampler(replicas, **{"period_s": None, "timeout_s": 60.0, **settings})


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while True:
            if condition():
                return
            await asyncio.sleep(0.005)


async def test_a_sample_is_what_each_engine_said():
    replicas = ReplicaSet([Scripted(0, tokens=10, running=3), Scripted(1, tokens=20, running=4)])
    asking = sampler(replicas)
    await asking.sample(within_s=60)

    assert [(s.replica, s.running, s.waiting, s.kv_usage, s.generated_tokens) for s in asking.timeline()] == [
        (0, 3, 1, 0.25, 10),
        (1, 4, 1, 0.25, 20),
    ]
    assert replicas.all[1].metrics == replicas.all[1].engine.says


async def test_a_hundred_tokens_in_two_seconds_are_fifty_per_second():
    engine, clock = Scripted(0, tokens=40), Clock()
    asking = sampler(ReplicaSet([engine]), clock=clock)
    await asking.sample(within_s=60)
    clock.now_s += 2
    engine.make(140)
    await asking.sample(within_s=60)
    clock.now_s += 4
    await asking.sample(within_s=60)

    assert [s.tokens_per_s for s in asking.timeline()] == [None, 50.0, 0.0]


async def test_two_samples_in_one_moment_do_not_make_a_rate():
    engine, clock = Scripted(0), Clock()
    asking = sampler(ReplicaSet([engine]), clock=clock)
    await asking.sample(within_s=60)
    clock.now_s += 1
    engine.make(30)
    await asking.sample(within_s=60)
    clock.now_s += 0.001
    engine.make(40)
    await asking.sample(within_s=60)
    clock.now_s += 0.999
    await asking.sample(within_s=60)

    assert [s.tokens_per_s for s in asking.timeline()] == [None, 30.0, 30.0, 10.0]


async def test_a_restarted_engine_has_no_rate_at_first():
    clock = Clock()
    replicas = ReplicaSet([Scripted(0, tokens=1000)])
    asking = sampler(replicas, clock=clock)
    await asking.sample(within_s=60)
    replicas.set_state(replicas.all[0], ReplicaState.DEAD, "killed")
    replicas.renew(replicas.all[0], Scripted(0, tokens=5))
    replicas.set_state(replicas.all[0], ReplicaState.HEALTHY, "restarted")
    clock.now_s += 1
    await asking.sample(within_s=60)

    assert [(s.generated_tokens, s.tokens_per_s) for s in asking.timeline()] == [(1000, None), (5, None)]


async def test_a_replica_that_hangs_delays_no_other_and_is_asked_once():
    silent, quick = Scripted(0), Scripted(1)
    silent.hang()
    asking = sampler(ReplicaSet([silent, quick]), period_s=0.001)
    asking.start()
    await until(lambda: quick.asked >= 5)

    assert silent.asked == 1
    assert {s.replica for s in asking.timeline()} == {1}
    silent.go_on()
    await until(lambda: silent.asked >= 3)
    await asking.close()


@pytest.fixture
async def reported() -> list[object]:
    """What asyncio was told of errors that nobody waited for."""
    found: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: found.append(context.get("exception")))
    return found


async def test_what_a_replica_said_is_forgotten_when_it_does_not_answer_in_time(reported):
    replicas = ReplicaSet([Scripted(0)])
    asking = sampler(replicas, timeout_s=0.01)
    await asking.sample(within_s=60)
    assert replicas.all[0].metrics is not None
    replicas.all[0].engine.hang()
    await asking.sample(within_s=60)

    assert replicas.all[0].metrics is None
    assert asking.latest() == {}
    assert replicas.all[0].state is ReplicaState.HEALTHY
    gc.collect()
    assert reported == []


async def test_a_late_answer_still_counts():
    engine = Scripted(0)
    engine.hang()
    replicas = ReplicaSet([engine])
    asking = sampler(replicas)
    await asking.sample(within_s=0.01)
    assert asking.timeline() == []
    engine.go_on()
    await until(lambda: replicas.all[0].metrics is not None)

    assert len(asking.timeline()) == 1


async def test_a_dead_engine_is_unknown_and_its_state_is_left_alone(reported):
    replicas = ReplicaSet([Scripted(0), Scripted(1)])
    asking = sampler(replicas)
    await asking.sample(within_s=60)
    replicas.all[0].engine.kill("killed")
    await asking.sample(within_s=60)

    assert replicas.all[0].metrics is None
    assert list(asking.latest()) == [1]
    assert replicas.all[0].state is ReplicaState.HEALTHY
    gc.collect()
    assert reported == []


@pytest.mark.parametrize("state", [ReplicaState.DEAD, ReplicaState.RESTARTING, ReplicaState.RETIRED])
async def test_a_replica_that_is_not_up_is_not_asked_and_not_known(state):
    replicas = ReplicaSet([Scripted(0), Scripted(1)])
    asking = sampler(replicas)
    await asking.sample(within_s=60)
    replicas.set_state(replicas.all[0], state, "")
    assert list(asking.latest()) == [1]
    await asking.sample(within_s=60)

    assert [engine.asked for engine in (r.engine for r in replicas.all)] == [1, 2]


async def test_replicas_may_come_and_go():
    replicas = ReplicaSet([Scripted(0), Scripted(1)])
    asking = sampler(replicas)
    await asking.sample(within_s=60)
    new = replicas.enlist()
    await asking.sample(within_s=60)
    replicas.renew(new, Scripted(2))
    replicas.set_state(new, ReplicaState.HEALTHY, "started")
    replicas.set_state(replicas.all[0], ReplicaState.RETIRED, "removed")
    replicas.dismiss(replicas.all[0])
    asking.clear()
    await asking.sample(within_s=60)

    assert [s.replica for s in asking.timeline()] == [1, 2]
    assert sorted(asking.latest()) == [1, 2]


async def test_the_time_line_keeps_the_newest_samples():
    engine = Scripted(0)
    asking = sampler(ReplicaSet([engine]), length=3)
    for tokens in range(5):
        engine.make(tokens)
        await asking.sample(within_s=60)

    assert [s.generated_tokens for s in asking.timeline()] == [2, 3, 4]
    asking.clear()
    assert asking.timeline() == []


async def test_samples_are_ordered_in_time():
    asking = sampler(ReplicaSet([Scripted(0)]))
    for _ in range(3):
        await asking.sample(within_s=60)
    times = [s.time_s for s in asking.timeline()]
    assert times == sorted(times)


async def test_loggers_get_every_sample_until_they_are_removed():
    seen: list[ReplicaSample] = []
    asking = sampler(ReplicaSet([Scripted(0)]))
    asking.add_logger(seen.append)
    await asking.sample(within_s=60)
    await until(lambda: len(seen) == 1)
    asking.remove_logger(seen.append)
    await asking.sample(within_s=60)
    await asyncio.sleep(0)

    assert seen == asking.timeline()[:1]
    with pytest.raises(ValueError, match="not in list"):
        asking.remove_logger(seen.append)


async def test_a_logger_that_raises_harms_neither_the_next_nor_the_sampler(reported):
    seen: list[ReplicaSample] = []
    asking = sampler(ReplicaSet([Scripted(0)]))
    asking.add_logger(lambda _sample: 1 // 0)
    asking.add_logger(seen.append)
    for _ in range(2):
        await asking.sample(within_s=60)
    await until(lambda: len(seen) == 2)

    assert [type(error) for error in reported] == [ZeroDivisionError] * 2


async def test_it_samples_until_it_is_closed_and_leaves_no_task():
    engine, silent = Scripted(0), Scripted(1)
    silent.hang()
    asking = sampler(ReplicaSet([engine, silent]), period_s=0.001)
    asking.start()
    asking.start()
    await until(lambda: engine.asked >= 3)
    await asking.close()
    await asking.close()

    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_without_a_period_nothing_is_asked_by_itself():
    engine = Scripted(0)
    asking = sampler(ReplicaSet([engine]))
    asking.start()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    await asking.close()
    assert engine.asked == 0


async def test_the_age_of_an_answer_grows():
    clock = Clock()
    asking = sampler(ReplicaSet([Scripted(0)]), clock=clock)
    await asking.sample(within_s=60)
    clock.now_s += 7
    assert asking.age_s(asking.latest()[0]) == 7.0

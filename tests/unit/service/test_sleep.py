"""Sleep: what it waits for, what it forbids, and how it ends."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest

from rl_vllm.config import HealthConfig
from rl_vllm.errors import (
    ConfigError,
    DeadlineError,
    NoReplicaServesError,
    ReplicaCallError,
    ReplicaIndexError,
    ServiceAsleepError,
    UnsupportedByEngineError,
)
from rl_vllm.service.fan_out import FanOut
from rl_vllm.service.replicas import ReplicaSet
from rl_vllm.service.sleep import SleepControl
from rl_vllm.testing import FakeEngine, Gate
from rl_vllm.types import InFlight, KVCache, ReplicaState

from .conftest import TWO_TOKENS, engines, prompts, running, update

QUICK_RESTARTS = HealthConfig(heartbeat_period_s=0.02, restart_pause_s=0.001)
EVENTUALLY_S = 60.0
ONE = prompts([5])


def until(condition) -> None:
    deadline = time.monotonic() + EVENTUALLY_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.005)


def commit(service, version: int) -> None:
    service.stage_weights(update(version), timeout_s=EVENTUALLY_S)
    service.commit_weights(update(version), in_flight=InFlight.KEEP, kv=KVCache.RECOMPUTE, timeout_s=EVENTUALLY_S)


class LoggingEngine(FakeEngine):
    """Notes what concerns sleep."""

    def __init__(self, replica: int = 0) -> None:
        super().__init__(replica)
        self.calls: list[object] = []

    async def sleep(self, level: int) -> None:
        self.calls.append(level)
        await super().sleep(level)

    async def wake_up(self, tags: tuple[str, ...] | None) -> None:
        self.calls.append(tags)
        await super().wake_up(tags)


class InsomniacEngine(FakeEngine):
    async def sleep(self, level: int) -> None:
        raise RuntimeError("no memory to move to")


def test_every_replica_sleeps_and_wakes():
    fakes = [LoggingEngine(0), LoggingEngine(1)]
    with running(*fakes) as service:
        assert not service.is_sleeping()
        service.sleep()
        assert service.is_sleeping()
        assert [fake.asleep for fake in fakes] == [1, 1]
        service.sleep(1)
        service.wake_up()
        assert not service.is_sleeping()
        service.wake_up()
        assert len(service.generate_batch(ONE, TWO_TOKENS)) == 1
    assert [fake.calls for fake in fakes] == [[1, None], [1, None]]


@pytest.mark.parametrize(
    "call",
    [
        lambda service: service.generate([5], TWO_TOKENS, use_tqdm=False),
        lambda service: service.generate_batch(ONE, TWO_TOKENS),
        lambda service: service.encode([5]),
        lambda service: next(service.stream_generate([5], TWO_TOKENS)),
    ],
    ids=["generate", "generate_batch", "encode", "stream_generate"],
)
def test_nothing_is_sent_to_engines_that_sleep(call):
    (one,) = engines(1)
    with running(one) as service:
        service.sleep()
        with pytest.raises(ServiceAsleepError, match=r"call wake_up\(\) \(kv_cache and weights sleep at level 1\)"):
            call(service)
        service.wake_up(["weights"])
        with pytest.raises(ServiceAsleepError, match=r"call wake_up\(\) \(kv_cache sleep"):
            call(service)
        assert one.batches == []


def test_after_a_level_2_sleep_weights_come_before_the_first_token():
    (one,) = engines(1)
    with running(one) as service:
        service.sleep(2)
        with pytest.raises(ServiceAsleepError, match="push weights, then wake_up"):
            service.generate_batch(ONE, TWO_TOKENS)
        service.wake_up()
        with pytest.raises(ServiceAsleepError, match="level 2 dropped the weights: push weights first"):
            service.generate_batch(ONE, TWO_TOKENS)
        commit(service, 1)
        assert service.generate_batch(ONE, TWO_TOKENS).versions_T.tolist() == [1, 1]


def test_the_ordered_way_back_from_level_2():
    fakes = [LoggingEngine(0), LoggingEngine(1)]
    with running(*fakes) as service:
        service.sleep(2)
        with pytest.raises(ServiceAsleepError, match=r"the weights sleep: call wake_up\(tags=\['weights'\]\) first"):
            service.stage_weights(update(1), timeout_s=1.0)
        service.wake_up(["weights"])
        commit(service, 1)
        with pytest.raises(ServiceAsleepError, match="kv_cache sleep"):
            service.generate_batch(ONE, TWO_TOKENS)
        service.wake_up(["kv_cache"])
        assert service.generate_batch(ONE, TWO_TOKENS).versions_T.tolist() == [1, 1]
    assert [fake.calls for fake in fakes] == [[2, ("weights",), ("kv_cache",)]] * 2


def test_sleep_waits_for_what_is_outstanding_and_refuses_what_is_new():
    gate = Gate()
    (one,) = engines(1, gate=lambda _: gate)
    with running(one) as service, ThreadPoolExecutor(2) as pool:
        work = pool.submit(service.generate_batch, ONE, TWO_TOKENS)
        gate.wait_until_held()
        sleeping = pool.submit(service.sleep)

        def refused() -> bool:
            try:
                service.generate_batch(ONE, TWO_TOKENS, timeout_s=0.05)
            except ServiceAsleepError as error:
                return "going to sleep" in str(error)
            except DeadlineError:
                # It came before the sleep did.
                return False
            raise AssertionError("it was answered")

        until(refused)
        assert one.asleep is None
        gate.open()
        assert len(work.result(EVENTUALLY_S)) == 1
        sleeping.result(EVENTUALLY_S)
        assert one.asleep == 1


def test_a_sleep_that_waits_too_long_leaves_the_service_awake():
    gate = Gate()
    (one,) = engines(1, gate=lambda _: gate)
    with running(one) as service, ThreadPoolExecutor(1) as pool:
        work = pool.submit(service.generate_batch, ONE, TWO_TOKENS)
        gate.wait_until_held()
        with pytest.raises(DeadlineError, match="1 calls with outstanding requests"):
            service.sleep(timeout_seconds=0.02)
        assert one.asleep is None
        gate.open()
        work.result(EVENTUALLY_S)
        assert len(service.generate_batch(ONE, TWO_TOKENS)) == 1


@pytest.mark.parametrize("level", [0, 3, -1, True, "1", 1.5])
def test_a_level_is_1_or_2(level):
    with running(*engines(1)) as service:
        with pytest.raises(ConfigError, match="level must be 1"):
            service.sleep(level)
        assert len(service.generate_batch(ONE, TWO_TOKENS)) == 1


@pytest.mark.parametrize("tags", [["cache"], "weights", []], ids=str)
def test_tags_are_known_ones(tags):
    with running(*engines(1)) as service:
        service.sleep()
        with pytest.raises(ConfigError, match="tags must be a list of weights or kv_cache"):
            service.wake_up(tags)


def test_levels_do_not_mix():
    with running(*engines(1)) as service:
        service.sleep(1)
        with pytest.raises(ConfigError, match=r"sleeps at level 1 already: call wake_up\(\) first"):
            service.sleep(2)


def test_a_sleep_that_fails_on_one_replica_names_it_and_can_be_ended():
    well = FakeEngine(0)
    with running(well, InsomniacEngine(1)) as service:
        with pytest.raises(ReplicaCallError, match=r"sleep.. failed on 1 replicas: replica 1: no memory to move to"):
            service.sleep()
        with pytest.raises(ServiceAsleepError):
            service.generate_batch(ONE, TWO_TOKENS)
        service.wake_up()
        assert well.asleep is None
        assert len(service.generate_batch(ONE, TWO_TOKENS)) == 1


def test_a_sleep_that_is_given_up_while_an_engine_hangs_counts_as_sleep():
    well, hung = engines(2)

    async def scenario() -> None:
        replicas = ReplicaSet([well, hung])
        control = SleepControl(replicas, FanOut(replicas, lambda _: nullcontext()))
        hung.hang()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await control.sleep(1, within_s=EVENTUALLY_S)
        assert (well.asleep, control.level) == (1, 1)
        with pytest.raises(ServiceAsleepError), control.awake("generate()"):
            pass
        hung.go_on()
        await control.wake_up(None)
        with control.awake("generate()"):
            assert (well.asleep, control.level) == (None, None)

    asyncio.run(scenario())


@pytest.mark.parametrize("level", [1, 2])
def test_a_service_whose_engines_cannot_sleep_stays_awake(level):
    class Sleepless(FakeEngine):
        async def sleep(self, level: int) -> None:
            raise UnsupportedByEngineError("this engine cannot sleep")

    with running(Sleepless(0), Sleepless(1)) as service:
        with pytest.raises(UnsupportedByEngineError):
            service.sleep(level)
        assert not service.is_sleeping()
        assert len(service.generate_batch(ONE, TWO_TOKENS)) == 1


def test_a_replica_that_is_started_again_sleeps_as_the_others_do():
    one, two = engines(2)
    with running(one, two, health=QUICK_RESTARTS) as service:
        service.sleep(2)
        service.wake_up(["weights"])
        commit(service, 1)
        two.kill("out of memory")
        until(lambda: service.replica(1).is_running and service.stats().counters.restarts == 1)
        again = service._executor.engines[1]
        assert again is not two
        assert again.asleep is not None
        assert not again.weights_dropped
        assert [each.version for each in again.committed] == [1]
        service.wake_up(["kv_cache"])
        assert again.asleep is None
        assert len(service.generate_batch(ONE, TWO_TOKENS, actor_index=1)) == 1


# One replica


def test_one_replica_may_sleep_while_the_others_answer():
    one, two = engines(2)
    with running(one, two) as service:
        service.sleep(actor_index=1)
        service.sleep(actor_index=1)
        assert (one.asleep, two.asleep) == (None, 1)
        assert (service.is_sleeping(0), service.is_sleeping(1)) == (False, True)
        assert service.replica(1).state is ReplicaState.DRAINING
        with pytest.raises(
            ServiceAsleepError, match=r"replica 1 sleeps: call wake_up\(actor_index=1\), or let another"
        ):
            service.generate_batch(ONE, TWO_TOKENS, actor_index=1)
        for _ in range(4):
            service.generate_batch(ONE, TWO_TOKENS)
        assert (len(one.batches), len(two.batches)) == (4, 0)
        with pytest.raises(ServiceAsleepError, match=r"replica 1 sleeps: call wake_up\(actor_index=1\) first"):
            service.stage_weights(update(1), timeout_s=1.0)
        with pytest.raises(ConfigError, match="replica 1 sleeps already"):
            service.sleep()
        service.wake_up(actor_index=1)
        assert two.asleep is None
        assert len(service.generate_batch(ONE, TWO_TOKENS, actor_index=1)) == 1
        commit(service, 1)


def test_one_replica_finishes_what_it_has_before_it_sleeps():
    gate = Gate()
    fakes = engines(2, gate=lambda _: gate)
    with running(*fakes) as service, ThreadPoolExecutor(2) as pool:
        work = pool.submit(service.generate_batch, ONE, TWO_TOKENS, actor_index=0)
        gate.wait_until_held()
        with pytest.raises(DeadlineError, match="1 requests of replica 0 to end before sleep"):
            service.sleep(actor_index=0, timeout_seconds=0.02)
        assert service.replica(0).is_running
        sleeping = pool.submit(service.sleep, actor_index=0)
        until(lambda: not service.replica(0).is_running)
        gate.open()
        assert len(work.result(EVENTUALLY_S)) == 1
        sleeping.result(EVENTUALLY_S)
        assert fakes[0].asleep == 1


def test_one_replica_sleeps_only_where_that_leaves_enough():
    with running(*engines(2)) as service:
        with pytest.raises(ConfigError, match="one replica sleeps at level 1, got 2"):
            service.sleep(2, actor_index=0)
        with pytest.raises(ReplicaIndexError):
            service.sleep(actor_index=2)
        service.sleep(actor_index=0)
        with pytest.raises(ConfigError, match="0 replicas would serve, fewer than min_serving=1"):
            service.sleep(actor_index=1)
        with pytest.raises(ConfigError, match="one replica wakes whole"):
            service.wake_up(["weights"], actor_index=0)
        service.wake_up(actor_index=0)
        service.sleep()
        with pytest.raises(ConfigError, match="the whole service sleeps"):
            service.wake_up(actor_index=0)


def test_a_replica_that_died_asleep_comes_back_awake():
    one, two = engines(2)
    with running(one, two, health=QUICK_RESTARTS) as service:
        service.sleep(actor_index=1)
        two.kill("out of memory")
        until(lambda: service.replica(1).is_running)
        assert not service.is_sleeping()
        commit(service, 1)
        service.sleep()
        assert service.is_sleeping(1)


def test_a_dead_service_says_so_and_not_that_it_sleeps():
    (one,) = engines(1)
    with running(one, health=HealthConfig(max_restarts=0)) as service:
        one.kill("out of memory")
        with pytest.raises((ReplicaCallError, NoReplicaServesError), match="out of memory"):
            service.sleep()
        with pytest.raises((NoReplicaServesError, ServiceAsleepError)):
            service.generate_batch(ONE, TWO_TOKENS)

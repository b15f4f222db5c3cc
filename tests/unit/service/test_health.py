"""Heartbeats: silence is noticed, a good answer is believed only where it may be, and long calls are left in peace."""

import asyncio
import logging

import pytest

from rl_vllm.config import HealthConfig
from rl_vllm.errors import RefitError
from rl_vllm.testing import FakeEngine, FakeEngineScript, FakeScript, Gate
from rl_vllm.types import ReplicaState

from .conftest import answering, engines, first_tokens, prompts
from .fleet import QUICK, Fleet, until

FOUR = prompts([5], [6], [7], [8])
ANSWERS = [8, 9, 10, 11]
# Two failures in a row never come about: a suspect replica stays one until it answers.
PATIENT = HealthConfig(heartbeat_period_s=0.002, heartbeat_timeout_s=0.02, max_failures=1_000_000)


async def held(gate: Gate, count: int = 1) -> None:
    await asyncio.to_thread(gate.wait_until_held, count, timeout_s=60.0)


class CountingChecks(FakeEngine):
    """Counts the health checks it answers well."""

    num_checks = 0

    async def check_health(self):
        await super().check_health()
        self.num_checks += 1


async def test_a_replica_that_hangs_is_dead_after_enough_silence_and_its_requests_move():
    gate = Gate()
    hanging, well = FakeEngine(0, script=FakeEngineScript(gate=lambda _: gate)), FakeEngine(1)
    async with Fleet(hanging, well) as fleet:
        work = asyncio.create_task(fleet.generate(FOUR))
        await held(gate, 2)
        hanging.hang()
        assert first_tokens((await work).sorted_rows()) == ANSWERS
        await until(lambda: fleet.counters.restarts == 1)
        assert fleet.states == [ReplicaState.HEALTHY] * 2
        assert fleet.outstanding == [(0, 0)] * 2


async def test_the_log_of_a_hang_says_how_often_and_for_how_long_nothing_came(caplog):
    with caplog.at_level(logging.INFO, logger="rl_vllm"):
        async with Fleet(*engines(2)) as fleet:
            fleet.engine(1).hang()
            await until(lambda: fleet.counters.restarts == 1)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith("replica 1: healthy -> suspect (health check 1 of 2 failed: gave up after 0.02 s")
    assert lines[1].startswith("replica 1: suspect -> dead (2 health checks in a row failed: gave up after 0.02 s")
    assert len(lines) == 4


async def test_a_suspect_replica_still_serves_and_is_healthy_when_it_answers_again():
    async with Fleet(*engines(1), health=PATIENT) as fleet:
        fleet.engine(0).hang()
        await fleet.until_state(0, ReplicaState.SUSPECT)
        work = asyncio.create_task(fleet.generate(FOUR))
        await asyncio.sleep(0)
        assert fleet.outstanding == [(4, 12)]
        fleet.engine(0).go_on()
        await fleet.until_state(0, ReplicaState.HEALTHY)
        assert first_tokens((await work).sorted_rows()) == ANSWERS


async def test_failures_count_in_a_row_only():
    class EveryOther(FakeEngine):
        num_checks = 0

        async def check_health(self):
            self.num_checks += 1
            if self.num_checks % 2:
                raise OSError("a hiccup")

    engine = EveryOther(0)
    async with Fleet(engine) as fleet:
        await until(lambda: engine.num_checks >= 9)
        assert fleet.counters.deaths == 0


async def test_an_engine_that_says_it_is_dead_is_dead_at_once(caplog):
    with caplog.at_level(logging.INFO, logger="rl_vllm"):
        async with Fleet(*engines(2), health=HealthConfig(heartbeat_period_s=0.002)) as fleet:
            # One failure in three would make it suspect; its own word counts for more.
            fleet.engine(1).kill("out of memory")
            await until(lambda: fleet.counters.restarts == 1)
    assert caplog.records[0].getMessage() == "replica 1: healthy -> dead (out of memory)"


async def test_whatever_a_check_runs_into_is_a_failed_check():
    class Broken(FakeEngine):
        async def check_health(self):
            raise KeyError("engine core")

    async with Fleet(FakeEngine(0), Broken(1)) as fleet:
        await until(lambda: fleet.counters.restarts == 1)
        assert fleet.states == [ReplicaState.HEALTHY] * 2


async def test_a_good_check_does_not_bring_back_what_left_the_serving_set():
    engine = CountingChecks(1, script=answering(commit_error=OSError("fire")))
    async with Fleet(FakeEngine(0), engine) as fleet:
        await fleet.stage(1)
        with pytest.raises(RefitError):
            await fleet.commit(1)
        seen = engine.num_checks
        await until(lambda: engine.num_checks >= seen + 5)
        assert fleet.states[1] is ReplicaState.STALE


async def test_a_stale_replica_that_hangs_is_found_dead_and_never_suspect(caplog):
    engine = FakeEngine(1, script=answering(commit_error=OSError("fire")))
    with caplog.at_level(logging.INFO, logger="rl_vllm"):
        async with Fleet(FakeEngine(0), engine) as fleet:
            await fleet.stage(1)
            with pytest.raises(RefitError):
                await fleet.commit(1)
            engine.hang()
            await until(lambda: fleet.counters.deaths == 1)
    assert not any("-> suspect" in record.getMessage() for record in caplog.records)


async def test_a_long_commit_is_no_hang():
    gate = Gate()

    class BusyInCommit(FakeEngine):
        """Answers no check while it commits."""

        async def commit_weights(self, update, *, in_flight, kv):
            self.hang()
            await gate.passed()
            self.go_on()
            return await super().commit_weights(update, in_flight=in_flight, kv=kv)

    async with Fleet(BusyInCommit(0), CountingChecks(1)) as fleet:
        await fleet.stage(1)
        committing = asyncio.create_task(fleet.commit(1))
        await held(gate)
        # As long as ten checks that fail would take.
        await asyncio.sleep(10 * (QUICK.heartbeat_period_s + QUICK.heartbeat_timeout_s))
        assert fleet.states == [ReplicaState.HEALTHY] * 2
        gate.open()
        await committing
        assert fleet.counters.deaths == 0


async def test_a_check_that_a_long_call_overlapped_proves_nothing():
    async with Fleet(*engines(1), health=PATIENT) as fleet:
        engine, replica = fleet.engine(0), fleet.replicas.by_index(0)
        asked = asyncio.Event()

        async def check_health():
            asked.set()
            await Gate().passed()

        engine.check_health = check_health
        await asked.wait()
        with fleet.lifecycle.quiet(replica):
            del engine.check_health
            # The check that was under way runs into its limit here.
            await asyncio.sleep(3 * PATIENT.heartbeat_timeout_s)
        await asyncio.sleep(0)
        assert replica.state is ReplicaState.HEALTHY


async def test_a_hang_after_a_commit_is_noticed():
    async with Fleet(*engines(2)) as fleet:
        await fleet.refit(1)
        fleet.engine(1).hang()
        await until(lambda: fleet.counters.restarts == 1)
        assert fleet.replicas.version == 1


async def test_quiet_calls_may_overlap():
    async with Fleet(*engines(1)) as fleet:
        replica = fleet.replicas.by_index(0)
        with fleet.lifecycle.quiet(replica):
            with fleet.lifecycle.quiet(replica):
                fleet.engine(0).hang()
            await asyncio.sleep(10 * (QUICK.heartbeat_period_s + QUICK.heartbeat_timeout_s))
            assert fleet.states == [ReplicaState.HEALTHY]
        await until(lambda: fleet.counters.deaths == 1)


async def test_a_stream_that_ends_in_an_infrastructure_error_needs_no_heartbeat_to_be_a_death():
    never_checked = HealthConfig(heartbeat_period_s=3600.0)
    dying = FakeEngine(0, script=FakeEngineScript(dies_after=1, answers=FakeScript()))
    async with Fleet(dying, FakeEngine(1), health=never_checked) as fleet:
        assert first_tokens((await fleet.generate(FOUR)).sorted_rows()) == ANSWERS
        await until(lambda: fleet.counters.restarts == 1)

"""Death, restart, arrival and departure of replicas, and that nothing is lost by any of them."""

import asyncio
import logging

import pytest

from rl_vllm.config import HealthConfig
from rl_vllm.errors import ConfigError, EngineStartError, NoReplicaServesError, ReplicaIndexError
from rl_vllm.testing import FakeEngine, FakeEngineScript, FakeExecutorScript, Gate
from rl_vllm.types import ReplicaState

from .conftest import answering, engines, first_tokens, prompts, update
from .fleet import QUICK, Fleet, until

FOUR = prompts([5], [6], [7], [8])
ANSWERS = [8, 9, 10, 11]
SERVING = [ReplicaState.HEALTHY, ReplicaState.HEALTHY]


async def held(gate: Gate, count: int = 1) -> None:
    await asyncio.to_thread(gate.wait_until_held, count, timeout_s=60.0)


def health(**settings: object) -> HealthConfig:
    values = {name: getattr(QUICK, name) for name in HealthConfig.__dataclass_fields__}
    return HealthConfig(**{**values, **settings})


async def test_a_dead_replica_is_started_again_under_its_own_index_and_serves():
    async with Fleet(*engines(2)) as fleet:
        first = fleet.engine(1)
        first.kill("out of memory")
        await until(lambda: fleet.counters.restarts == 1)
        assert fleet.states == SERVING
        assert fleet.executor.events == ["stop 1", "start 1"]
        assert fleet.engine(1) is not first
        assert first.num_shutdowns == 1
        assert (await fleet.generate(FOUR, only=1)).sorted_rows().tokens_T.tolist() == [8, 9, 9, 10, 10, 11, 11, 12]
        assert (fleet.counters.deaths, fleet.replicas.by_index(1).restarts) == (1, 1)


async def test_the_only_replicas_requests_wait_while_it_restarts():
    gate = Gate()
    dying = FakeEngine(0, script=FakeEngineScript(gate=lambda _: gate))
    async with Fleet(dying) as fleet:
        restart = Gate()
        fleet.executor.script = FakeExecutorScript(start_gate=restart)
        work = asyncio.create_task(fleet.generate(FOUR))
        await held(gate, 4)
        dying.kill("out of memory")
        await held(restart)
        assert fleet.states == [ReplicaState.RESTARTING]
        late = asyncio.create_task(fleet.generate(prompts([9])))
        restart.open()
        assert first_tokens((await work).sorted_rows()) == ANSWERS
        assert first_tokens(await late) == [12]
        assert fleet.outstanding == [(0, 0)]
        assert fleet.counters.rerouted == 4


async def test_a_caller_that_waits_for_a_restart_may_give_up():
    async with Fleet(*engines(1)) as fleet:
        fleet.executor.script = FakeExecutorScript(start_gate=Gate())
        fleet.engine(0).kill("out of memory")
        await fleet.until_state(0, ReplicaState.RESTARTING)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(fleet.generate(FOUR), 0.01)
        assert fleet.dispatcher.admission.outstanding == 0
        assert fleet.counters.cancelled == 4


async def test_a_restarted_replica_has_the_last_committed_weights_before_it_serves():
    async with Fleet(*engines(2)) as fleet:
        await fleet.refit(1)
        await fleet.refit(2)
        fleet.engine(1).kill("out of memory")
        await until(lambda: fleet.counters.restarts == 1)
        assert fleet.engine(1).committed == [update(2).addressed_to(1)]
        assert fleet.replicas.version == 2
        assert set((await fleet.generate(FOUR, only=1)).versions_T.tolist()) == {2}


async def test_a_refit_during_a_restart_reaches_the_others_and_then_the_newcomer():
    async with Fleet(*engines(2)) as fleet:
        await fleet.refit(1)
        gate = Gate()
        fleet.executor.script = FakeExecutorScript(start_gate=gate)
        fleet.engine(1).kill("out of memory")
        await held(gate)
        await fleet.refit(2)
        assert fleet.replicas.version == 2
        gate.open()
        await fleet.until_state(1, ReplicaState.HEALTHY)
        assert fleet.engine(1).committed == [update(2).addressed_to(1)]


async def test_a_version_committed_while_an_older_one_is_restored_is_restored_too():
    gate = Gate()
    slow = FakeEngineScript(commit_gate=gate)
    async with Fleet(*engines(2), make=lambda index: FakeEngine(index, script=slow)) as fleet:
        await fleet.refit(1)
        fleet.engine(1).kill("out of memory")
        await held(gate)
        await fleet.refit(2)
        assert fleet.states == [ReplicaState.HEALTHY, ReplicaState.RESTARTING]
        gate.open()
        replica = await fleet.until_state(1, ReplicaState.HEALTHY)
        assert fleet.engine(1).committed == [update(1).addressed_to(1), update(2).addressed_to(1)]
        assert replica.version == 2


async def test_a_replica_does_not_come_back_in_the_middle_of_a_commit():
    gate, restart = Gate(), Gate()
    async with Fleet(FakeEngine(0, script=FakeEngineScript(commit_gate=gate)), FakeEngine(1)) as fleet:
        fleet.executor.script = FakeExecutorScript(start_gate=restart)
        fleet.engine(1).kill("out of memory")
        await held(restart)
        await fleet.stage(1)
        committing = asyncio.create_task(fleet.commit(1))
        await held(gate)
        restart.open()
        await until(lambda: 1 in fleet.executor.engines and fleet.engine(1) is fleet.executor.engines[1])
        for _ in range(20):
            await asyncio.sleep(0)
        assert fleet.states[1] is ReplicaState.RESTARTING
        gate.open()
        await committing
        await fleet.until_state(1, ReplicaState.HEALTHY)
        assert [replica.version for replica in fleet.replicas.all] == [1, 1]


async def test_a_replica_that_came_back_between_stage_and_commit_takes_part_in_the_commit():
    async with Fleet(*engines(2)) as fleet:
        restart = Gate()
        fleet.executor.script = FakeExecutorScript(start_gate=restart)
        fleet.engine(1).kill("out of memory")
        await held(restart)
        await fleet.stage(1)
        restart.open()
        await fleet.until_state(1, ReplicaState.HEALTHY)
        await fleet.commit(1)
        assert [replica.version for replica in fleet.replicas.all] == [1, 1]
        assert fleet.states == SERVING


async def test_a_replica_that_cannot_have_the_committed_weights_is_stale_until_the_next_refit():
    async with Fleet(*engines(2), make=lambda index: FakeEngine(index, script=gone)) as fleet:
        gone = answering(stage_error=OSError("manifest.json is gone"))
        await fleet.refit(1)
        fleet.engine(1).kill("out of memory")
        replica = await fleet.until_state(1, ReplicaState.STALE)
        assert "manifest.json is gone" in replica.reason
        assert first_tokens((await fleet.generate(FOUR)).sorted_rows()) == ANSWERS
        assert fleet.engine(1).batches == []
        fleet.engine(1).script = FakeEngineScript()
        await fleet.refit(2)
        assert fleet.states == SERVING
        assert set((await fleet.generate(FOUR, only=1)).versions_T.tolist()) == {2}


async def test_without_any_other_replica_a_stale_one_ends_the_wait_and_says_what_to_do():
    async with Fleet(*engines(1), make=lambda index: FakeEngine(index, script=gone)) as fleet:
        gone = answering(stage_error=OSError("manifest.json is gone"))
        await fleet.refit(1)
        fleet.engine(0).kill("out of memory")
        with pytest.raises(NoReplicaServesError, match=r"manifest\.json is gone.*complete a refit"):
            await fleet.generate(FOUR)
        assert fleet.replicas.version == 1


async def test_a_start_that_fails_is_a_failed_restart_and_the_next_one_may_do():
    made = []

    def make(index):
        made.append(index)
        if len(made) < 3:
            raise EngineStartError(index, "no memory yet")
        return FakeEngine(index)

    async with Fleet(*engines(2), make=make) as fleet:
        fleet.engine(1).kill("out of memory")
        await until(lambda: fleet.counters.restarts == 1)
        assert fleet.replicas.by_index(1).restarts == 3
        assert (fleet.counters.deaths, fleet.states) == (1, SERVING)


async def test_a_replica_that_dies_while_it_is_restored_is_started_again():
    made = []

    def make(index):
        made.append(FakeEngine(index))
        if len(made) == 1:
            made[0].kill("again")
        return made[-1]

    async with Fleet(*engines(2), make=make) as fleet:
        await fleet.refit(1)
        fleet.engine(1).kill("out of memory")
        await until(lambda: fleet.counters.restarts == 1)
        assert fleet.engine(1) is made[1]
        assert made[1].committed == [update(1).addressed_to(1)]


async def test_beyond_its_budget_a_replica_is_retired_and_waiting_requests_learn_why():
    def make(index):
        raise EngineStartError(index, "the disk is full")

    async with Fleet(*engines(1), make=make, health=health(max_restarts=2)) as fleet:
        fleet.engine(0).kill("out of memory")
        with pytest.raises(
            NoReplicaServesError, match=r"replica 0 is retired \(2 restarts are used up; .*disk is full"
        ):
            await fleet.generate(FOUR)
        assert fleet.states == [ReplicaState.RETIRED]
        assert fleet.executor.events == ["stop 0", "start 0", "start 0"]
        assert fleet.outstanding == [(0, 0)]


async def test_without_restarts_a_dead_replica_retires_at_once():
    async with Fleet(*engines(2), health=health(max_restarts=0)) as fleet:
        fleet.engine(1).kill("out of memory")
        await fleet.until_state(1, ReplicaState.RETIRED)
        await until(lambda: fleet.executor.events == ["stop 1"])
        assert first_tokens((await fleet.generate(FOUR)).sorted_rows()) == ANSWERS


async def test_below_the_floor_calls_raise_although_one_replica_serves():
    async with Fleet(*engines(2), health=health(max_restarts=0, min_serving=2)) as fleet:
        assert len(await fleet.generate(FOUR)) == 4
        fleet.engine(1).kill("out of memory")
        await fleet.until_state(1, ReplicaState.RETIRED)
        with pytest.raises(NoReplicaServesError, match=r"replica 0 is healthy, replica 1 is retired"):
            await fleet.generate(FOUR)


async def test_the_epoch_counts_changes_of_the_serving_set_alone():
    async with Fleet(*engines(2)) as fleet:
        before = fleet.replicas.epoch
        fleet.replicas.set_state(fleet.replicas.all[0], ReplicaState.SUSPECT, "slow")
        assert fleet.replicas.epoch == before
        fleet.engine(1).kill("out of memory")
        await until(lambda: fleet.counters.restarts == 1)
        # Out with its death and in with its return; the states between changed nothing.
        assert fleet.replicas.epoch == before + 2


async def test_a_death_and_its_restart_are_three_log_lines(caplog):
    with caplog.at_level(logging.INFO, logger="rl_vllm"):
        async with Fleet(*engines(2)) as fleet:
            fleet.engine(1).kill("out of memory")
            await until(lambda: fleet.counters.restarts == 1)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(" (")[0] for line in lines] == [
        "replica 1: healthy -> dead",
        "replica 1: dead -> restarting",
        "replica 1: restarting -> healthy",
    ]
    assert "out of memory" in lines[0]


async def test_added_replicas_get_fresh_indices_and_the_committed_weights_before_they_serve():
    async with Fleet(*engines(1)) as fleet:
        await fleet.refit(3)
        assert await fleet.lifecycle.add(2) == [1, 2]
        assert fleet.states == [ReplicaState.HEALTHY] * 3
        assert fleet.engine(2).committed == [update(3).addressed_to(2)]
        await fleet.lifecycle.remove(2)
        assert await fleet.lifecycle.add(1) == [3]
        assert set((await fleet.generate(FOUR, only=3)).versions_T.tolist()) == {3}


async def test_an_added_replica_is_watched_like_the_others():
    async with Fleet(*engines(1)) as fleet:
        await fleet.lifecycle.add(1)
        fleet.engine(1).kill("out of memory")
        await until(lambda: fleet.counters.restarts == 1)
        assert fleet.states == SERVING


async def test_when_one_of_several_does_not_start_none_of_them_is_left():
    def make(index):
        if index == 2:
            raise EngineStartError(index, "no room")
        return FakeEngine(index)

    async with Fleet(*engines(1), make=make) as fleet:
        with pytest.raises(EngineStartError, match="no room"):
            await fleet.lifecycle.add(3)
        assert [replica.index for replica in fleet.replicas.all] == [0]
        assert list(fleet.executor.engines) == [0]


async def test_when_adding_is_given_up_during_the_restore_none_of_them_is_left():
    begun = asyncio.Event()

    async def restore(replica):
        if replica.index == 2:
            begun.set()
            await asyncio.Event().wait()

    async with Fleet(*engines(1), restore=restore) as fleet:
        adding = asyncio.create_task(fleet.lifecycle.add(2))
        await begun.wait()
        await fleet.until_state(1, ReplicaState.HEALTHY)
        adding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await adding
        assert [replica.index for replica in fleet.replicas.all] == [0]
        assert list(fleet.executor.engines) == [0]


@pytest.mark.parametrize("count", [0, -1, True, 1.5])
async def test_a_count_of_replicas_is_checked(count):
    async with Fleet(*engines(1)) as fleet:
        with pytest.raises(ConfigError, match="count must be an integer of at least 1"):
            await fleet.lifecycle.add(count)


async def test_requests_wait_for_an_added_replica_when_none_serves():
    async with Fleet(*engines(1), health=health(max_restarts=0)) as fleet:
        gate = Gate()
        fleet.executor.script = FakeExecutorScript(start_gate=gate)
        adding = asyncio.create_task(fleet.lifecycle.add(1))
        await held(gate)
        fleet.engine(0).kill("out of memory")
        await fleet.until_state(0, ReplicaState.RETIRED)
        work = asyncio.create_task(fleet.generate(FOUR))
        gate.open()
        assert first_tokens((await work).sorted_rows()) == ANSWERS
        await adding


async def test_a_removed_replica_finishes_what_it_has_and_gets_nothing_more():
    gate = Gate()
    one, two = FakeEngine(0), FakeEngine(1, script=FakeEngineScript(gate=lambda _: gate))
    async with Fleet(one, two) as fleet:
        work = asyncio.create_task(fleet.generate(FOUR))
        await held(gate, 2)
        replica = fleet.replicas.by_index(1)
        removing = asyncio.create_task(fleet.lifecycle.remove(1))
        await fleet.until_state(1, ReplicaState.DRAINING)
        assert first_tokens((await fleet.generate(FOUR)).sorted_rows()) == ANSWERS
        assert len(two.batches) == 1
        gate.open()
        await removing
        assert first_tokens((await work).sorted_rows()) == ANSWERS
        assert (replica.state, two.aborted, two.num_shutdowns) == (ReplicaState.RETIRED, [], 1)
        with pytest.raises(ReplicaIndexError, match=r"index 1: give one of \[0\]"):
            fleet.replicas.by_index(1)


async def test_what_a_removed_replica_does_not_finish_in_time_moves_to_the_others():
    one, two = FakeEngine(0), FakeEngine(1, script=FakeEngineScript(gate=lambda _: never))
    never = Gate()
    async with Fleet(one, two, rpc_timeout_s=0.05) as fleet:
        work = asyncio.create_task(fleet.generate(FOUR))
        await held(never, 2)
        await fleet.lifecycle.remove(1)
        assert first_tokens((await work).sorted_rows()) == ANSWERS
        assert two.aborted == [1, 3]


async def test_a_replica_that_dies_while_it_drains_is_not_started_again():
    gate = Gate()
    one, two = FakeEngine(0), FakeEngine(1, script=FakeEngineScript(gate=lambda _: gate))
    async with Fleet(one, two) as fleet:
        work = asyncio.create_task(fleet.generate(FOUR))
        await held(gate, 2)
        removing = asyncio.create_task(fleet.lifecycle.remove(1))
        replica = await fleet.until_state(1, ReplicaState.DRAINING)
        two.kill("out of memory")
        await removing
        assert first_tokens((await work).sorted_rows()) == ANSWERS
        assert (replica.restarts, "start 1" in fleet.executor.events) == (0, False)


async def test_a_refit_reaches_a_draining_replica_and_leaves_it_draining():
    gate = Gate()
    one, two = FakeEngine(0), FakeEngine(1, script=FakeEngineScript(gate=lambda _: gate))
    async with Fleet(one, two) as fleet:
        work = asyncio.create_task(fleet.generate(FOUR))
        await held(gate, 2)
        removing = asyncio.create_task(fleet.lifecycle.remove(1))
        await fleet.until_state(1, ReplicaState.DRAINING)
        await fleet.refit(1)
        assert fleet.states[1] is ReplicaState.DRAINING
        gate.open()
        await removing
        assert set((await work).versions_T.tolist()) <= {0, 1}


async def test_a_restarting_replica_can_be_removed():
    async with Fleet(*engines(2)) as fleet:
        gate = Gate()
        fleet.executor.script = FakeExecutorScript(start_gate=gate)
        fleet.engine(1).kill("out of memory")
        await held(gate)
        await fleet.lifecycle.remove(1)
        gate.open()
        assert [replica.index for replica in fleet.replicas.all] == [0]
        assert fleet.states == [ReplicaState.HEALTHY]


async def test_the_last_of_the_floor_cannot_be_removed_nor_one_twice_nor_one_that_is_not_there():
    gate = Gate()
    async with Fleet(FakeEngine(0), FakeEngine(1, script=FakeEngineScript(gate=lambda _: gate))) as fleet:
        with pytest.raises(ReplicaIndexError):
            await fleet.lifecycle.remove(7)
        work = asyncio.create_task(fleet.generate(FOUR))
        await held(gate, 2)
        removing = asyncio.create_task(fleet.lifecycle.remove(1))
        await fleet.until_state(1, ReplicaState.DRAINING)
        with pytest.raises(ConfigError, match="replica 1 is being removed already"):
            await fleet.lifecycle.remove(1)
        with pytest.raises(ConfigError, match="without replica 0, 0 replicas would serve, fewer than min_serving=1"):
            await fleet.lifecycle.remove(0)
        gate.open()
        await removing
        await work


async def test_a_removal_that_is_given_up_leaves_the_replica_serving():
    gate = Gate()
    async with Fleet(FakeEngine(0), FakeEngine(1, script=FakeEngineScript(gate=lambda _: gate))) as fleet:
        work = asyncio.create_task(fleet.generate(FOUR))
        await held(gate, 2)
        removing = asyncio.create_task(fleet.lifecycle.remove(1))
        await fleet.until_state(1, ReplicaState.DRAINING)
        removing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await removing
        assert fleet.states == SERVING
        gate.open()
        await work


async def test_a_replica_that_died_before_its_removal_was_given_up_is_started_again():
    gate = Gate()
    one, two = FakeEngine(0), FakeEngine(1, script=FakeEngineScript(gate=lambda _: gate))
    async with Fleet(one, two) as fleet:
        work = asyncio.create_task(fleet.generate(FOUR))
        await held(gate, 2)
        removing = asyncio.create_task(fleet.lifecycle.remove(1))
        replica = await fleet.until_state(1, ReplicaState.DRAINING)
        fleet.replicas.watch(lambda changed: changed.state is ReplicaState.DEAD and removing.cancel())
        two.kill("out of memory")
        with pytest.raises(asyncio.CancelledError):
            await removing
        assert replica in fleet.lifecycle._reviving
        await until(lambda: fleet.counters.restarts == 1)
        assert (fleet.states, fleet.counters.deaths) == (SERVING, 1)
        assert first_tokens((await work).sorted_rows()) == ANSWERS


async def test_a_replica_whose_removal_is_given_up_late_is_watched_again():
    async with Fleet(*engines(2)) as fleet:
        removing = asyncio.create_task(fleet.lifecycle.remove(1))
        # It is idle: the first step of its removal ends where the heartbeat is awaited.
        await asyncio.sleep(0)
        assert fleet.states[1] is ReplicaState.DRAINING
        removing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await removing
        assert fleet.states == SERVING
        assert "replica-1-heartbeat" in [task.get_name() for task in asyncio.all_tasks()]
        fleet.engine(1).kill("out of memory")
        await until(lambda: fleet.counters.restarts == 1)


async def test_a_restart_goes_on_when_the_removal_that_ended_it_is_given_up():
    async with Fleet(*engines(2)) as fleet:
        gate = Gate()
        fleet.executor.script = FakeExecutorScript(start_gate=gate)
        fleet.engine(1).kill("out of memory")
        await held(gate)
        replica = fleet.replicas.by_index(1)
        removing = asyncio.create_task(fleet.lifecycle.remove(1))
        await asyncio.sleep(0)
        removing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await removing
        assert replica in fleet.lifecycle._reviving
        gate.open()
        await until(lambda: fleet.counters.restarts == 1)
        assert fleet.states == SERVING


async def test_closing_ends_restarts_and_heartbeats_and_may_be_done_twice():
    async with Fleet(*engines(2)) as fleet:
        gate = Gate()
        fleet.executor.script = FakeExecutorScript(start_gate=gate)
        fleet.engine(1).kill("out of memory")
        await held(gate)
        await fleet.lifecycle.close()
        await fleet.lifecycle.close()
        names = [task.get_name() for task in asyncio.all_tasks()]
        assert not [name for name in names if name.startswith("replica-")]

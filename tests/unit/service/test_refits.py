"""What a refit, and a refit that fails, makes of the replicas and of the requests they hold."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from rl_vllm import AsyncVLLM
from rl_vllm.config import HealthConfig
from rl_vllm.errors import DeadlineError, EngineDiedError, NoReplicaServesError, RefitError
from rl_vllm.service.router import Router
from rl_vllm.testing import FakeEngine, FakeEngineScript, FakeScript, Gate
from rl_vllm.types import FinishReason, InFlight, KVCache, ReplicaState, TensorSpec, WeightReceiver

from .conftest import TWO_TOKENS, answering, engines, first_tokens, prompts, running, update
from .fleet import Fleet, until

# What is dead stays dead, so that what a refit makes of it can be seen.
FOR_GOOD = HealthConfig(max_restarts=0)
FOUR = prompts([5], [6], [7], [8])
ANSWERS = [8, 9, 10, 11]


def stage(service: AsyncVLLM, version: int, timeout_s: float = 10.0) -> None:
    service.stage_weights(update(version), timeout_s=timeout_s)


def commit(service: AsyncVLLM, version: int, *, in_flight=InFlight.KEEP, timeout_s: float = 10.0):
    return service.commit_weights(update(version), in_flight=in_flight, kv=KVCache.RECOMPUTE, timeout_s=timeout_s)


def refit(service: AsyncVLLM, version: int):
    stage(service, version)
    return commit(service, version)


def versions_by_replica(service: AsyncVLLM, *fakes: FakeEngine) -> list[set[int]]:
    """Versions of the tokens that each replica makes; the empty set for one that serves nothing."""
    before = [len(fake.batches) for fake in fakes]
    answer = service.generate_batch(FOUR, TWO_TOKENS)
    assert first_tokens(answer) == ANSWERS
    version_of = {row: set(answer.versions(row).tolist()) for row in range(4)}
    return [
        set().union(
            *(
                version_of[int(batch.prompts.row(row)[0]) - 5]
                for batch in fake.batches[seen:]
                for row in range(len(batch))
            )
        )
        for fake, seen in zip(fakes, before, strict=True)
    ]


@pytest.fixture
def pool():
    with ThreadPoolExecutor() as threads:
        yield threads


def test_a_refit_reaches_every_replica_and_labels_what_comes_after():
    one, two = engines(2)
    with running(one, two) as service:
        assert service.weight_version == 0
        assert versions_by_replica(service, one, two) == [{0}, {0}]
        reports = refit(service, 1)
        assert [report.version for report in reports] == [1, 1]
        assert service.weight_version == 1
        assert versions_by_replica(service, one, two) == [{1}, {1}]
    assert (one.staged, two.staged) == ([update(1).addressed_to(0)], [update(1).addressed_to(1)])


def test_the_specs_are_asked_for_once():
    spec = TensorSpec("w", "float32", (1,))
    one = FakeEngine(0, specs=(spec,))
    with running(one) as service:
        assert service.weight_specs() == (spec,)
        one.kill("gone")
        assert service.weight_specs() == (spec,)


def test_a_failure_in_stage_names_the_replica_and_leaves_all_on_the_old_weights():
    well = FakeEngine(0)
    failing = FakeEngine(1, script=answering(stage_error=RefitError(1, "stage", (), "wrong checksum in w")))
    with running(well, failing) as service:
        with pytest.raises(RefitError) as raised:
            stage(service, 1)
        error = raised.value
        assert (error.version, error.phase, error.replicas) == (1, "stage", (1,))
        assert error.reason == "replica 1: wrong checksum in w"
        assert service.weight_version == 0
        assert versions_by_replica(service, well, failing) == [{0}, {0}]
        failing.script = FakeEngineScript()
        refit(service, 2)
        assert versions_by_replica(service, well, failing) == [{2}, {2}]


def test_all_that_failed_are_named_with_the_first_ones_words():
    one, two = FakeEngine(0, script=answering(stage_error=OSError("disk full"))), FakeEngine(1)
    three = FakeEngine(2, script=answering(stage_error=ValueError("shape")))
    with running(one, two, three) as service, pytest.raises(RefitError, match="disk full") as raised:
        stage(service, 1)
    assert raised.value.replicas == (0, 2)


def test_a_replica_that_does_not_stage_in_time_is_named_and_nothing_changes():
    slow, well = FakeEngine(0, script=FakeEngineScript(stage_gate=Gate())), FakeEngine(1)
    with running(slow, well) as service:
        with pytest.raises(RefitError, match=r"gave up after 0\.05 s") as raised:
            stage(service, 1, timeout_s=0.05)
        assert raised.value.replicas == (0,)
        assert versions_by_replica(service, slow, well) == [{0}, {0}]


def test_generation_goes_on_while_weights_are_staged(pool):
    gate = Gate()
    one, two = engines(2, stage_gate=gate)
    with running(one, two) as service:
        staging = pool.submit(stage, service, 1)
        gate.wait_until_held(2)
        assert versions_by_replica(service, one, two) == [{0}, {0}]
        assert service.weight_version == 0
        gate.open()
        staging.result(10)


def test_a_replica_on_which_the_commit_failed_serves_nothing_and_the_others_go_on():
    well, failing = FakeEngine(0), FakeEngine(1, script=answering(commit_error=OSError("the disk caught fire")))
    with running(well, failing) as service:
        stage(service, 1)
        with pytest.raises(RefitError, match="replica 1: the disk caught fire") as raised:
            commit(service, 1)
        assert (raised.value.phase, raised.value.replicas) == ("commit", (1,))
        assert service.weight_version == 1
        assert versions_by_replica(service, well, failing) == [{1}, set()]


def test_a_stale_replica_that_takes_the_next_refit_serves_again():
    well, failing = FakeEngine(0), FakeEngine(1, script=answering(commit_error=OSError("fire")))
    with running(well, failing) as service:
        stage(service, 1)
        with pytest.raises(RefitError):
            commit(service, 1)
        failing.script = FakeEngineScript()
        assert len(refit(service, 2)) == 2
        assert service.weight_version == 2
        assert versions_by_replica(service, well, failing) == [{2}, {2}]


def test_unfinished_requests_of_a_replica_that_goes_stale_move_to_those_that_serve(pool):
    gate = Gate()
    well = FakeEngine(0)
    failing = FakeEngine(1, script=FakeEngineScript(gate=lambda _: gate, answers=FakeScript(commit_error=OSError())))
    with running(well, failing) as service:
        work = pool.submit(service.generate_batch, FOUR, TWO_TOKENS)
        gate.wait_until_held(2)
        stage(service, 1)
        with pytest.raises(RefitError):
            commit(service, 1)
        batch = work.result(10)
    assert first_tokens(batch) == ANSWERS
    # Rows 1 and 3 were held by replica 1 and made anew by replica 0, under the weights it had then.
    assert [set(batch.versions(row).tolist()) for row in (1, 3)] == [{1}, {1}]
    assert failing.aborted == [1, 3]


def test_a_replica_whose_commit_takes_too_long_is_stale_and_its_requests_move(pool):
    gate, never = Gate(), Gate()
    well, hanging = FakeEngine(0), FakeEngine(1, script=FakeEngineScript(gate=lambda _: gate, commit_gate=never))
    with running(well, hanging) as service:
        work = pool.submit(service.generate_batch, FOUR, TWO_TOKENS)
        gate.wait_until_held(2)
        stage(service, 1)
        with pytest.raises(RefitError, match=r"gave up after 0\.05 s waiting for replica 1") as raised:
            commit(service, 1, timeout_s=0.05)
        assert raised.value.replicas == (1,)
        assert first_tokens(work.result(10)) == ANSWERS
        hanging.script = FakeEngineScript()
        assert versions_by_replica(service, well, hanging) == [{1}, set()]


def test_requests_that_have_nowhere_to_go_fail_at_once_and_say_why(pool):
    gate = Gate()
    fakes = engines(2, gate=lambda _: gate, answers=FakeScript(commit_error=OSError("fire")))
    with running(*fakes) as service:
        work = pool.submit(service.generate_batch, FOUR, TWO_TOKENS)
        gate.wait_until_held(4)
        stage(service, 1)
        with pytest.raises(RefitError):
            commit(service, 1)
        with pytest.raises(
            NoReplicaServesError, match=r"replica 0 is stale \(commit of version 1 failed\), .*; complete"
        ):
            work.result(10)
        with pytest.raises(NoReplicaServesError):
            service.generate_batch(FOUR, TWO_TOKENS)


def test_a_version_is_known_when_no_replica_serves_and_service_resumes_with_the_next_refit():
    fakes = engines(2)
    with running(*fakes) as service:
        refit(service, 1)
        for fake in fakes:
            fake.script = answering(commit_error=OSError("fire"))
        stage(service, 2)
        with pytest.raises(RefitError) as raised:
            commit(service, 2)
        assert raised.value.replicas == (0, 1)
        assert service.weight_version == 1
        assert service.weight_specs() == ()
        for fake in fakes:
            fake.script = FakeEngineScript()
        refit(service, 3)
        assert service.weight_version == 3
        assert versions_by_replica(service, *fakes) == [{3}, {3}]


def test_the_version_can_be_read_at_any_moment_of_a_refit_and_only_grows(pool):
    gates = {"stage_gate": Gate(), "commit_gate": Gate()}
    fakes = engines(2, **gates)
    with running(*fakes) as service:
        staging = pool.submit(stage, service, 1)
        gates["stage_gate"].wait_until_held(2)
        seen = [service.weight_version]
        gates["stage_gate"].open()
        staging.result(10)
        committing = pool.submit(commit, service, 1)
        gates["commit_gate"].wait_until_held(2)
        seen.append(service.weight_version)
        gates["commit_gate"].open()
        committing.result(10)
        seen.append(service.weight_version)
    assert seen == [0, 0, 1]


def test_a_replica_still_committing_keeps_the_old_version_in_force(pool):
    gate = Gate()
    quick, slow = FakeEngine(0), FakeEngine(1, script=FakeEngineScript(commit_gate=gate))
    with running(quick, slow) as service:
        stage(service, 1)
        committing = pool.submit(commit, service, 1)
        gate.wait_until_held()
        assert service.weight_version == 0
        gate.open()
        committing.result(10)
        assert service.weight_version == 1


def test_a_dead_replica_is_left_out_of_refits():
    well, dying = FakeEngine(0), FakeEngine(1, script=FakeEngineScript(dies_after=0))
    with running(well, dying, health=FOR_GOOD) as service:
        service.generate_batch(FOUR, TWO_TOKENS)
        assert [report.version for report in refit(service, 1)] == [1]
        assert service.weight_version == 1
    assert dying.staged == []


def test_a_replica_found_dead_in_stage_fails_that_refit_and_not_the_next():
    well, dead = FakeEngine(0), FakeEngine(1)
    with running(well, dead, health=FOR_GOOD) as service:
        dead.kill("out of memory")
        with pytest.raises(RefitError, match="out of memory") as raised:
            stage(service, 1)
        assert raised.value.replicas == (1,)
        assert len(refit(service, 2)) == 1
        assert service.weight_version == 2


def test_a_stale_replica_that_dies_is_left_out_of_the_refit_after_the_one_that_finds_it():
    well, failing = FakeEngine(0), FakeEngine(1, script=answering(commit_error=OSError("fire")))
    with running(well, failing, health=FOR_GOOD) as service:
        stage(service, 1)
        with pytest.raises(RefitError):
            commit(service, 1)
        failing.kill("out of memory")
        with pytest.raises(RefitError, match="out of memory"):
            stage(service, 2)
        refit(service, 3)
        assert versions_by_replica(service, well, failing) == [{3}, set()]


def test_a_replica_that_dies_in_commit_is_dead_and_the_others_serve_the_update():
    well = FakeEngine(0)
    dying = FakeEngine(1, script=answering(commit_error=EngineDiedError(1, "worker lost")))
    with running(well, dying, health=FOR_GOOD) as service:
        stage(service, 1)
        with pytest.raises(RefitError, match="worker lost"):
            commit(service, 1)
        assert service.weight_version == 1
        assert service.metrics()[1] is None


def test_a_death_is_the_reason_when_others_fail_with_it():
    waiting = FakeEngine(0, script=answering(commit_error=OSError("the others went away")))
    dying = FakeEngine(1, script=answering(commit_error=EngineDiedError(1, "worker lost")))
    with running(waiting, dying, health=FOR_GOOD) as service:
        stage(service, 1)
        with pytest.raises(RefitError, match=r"replica 1: .*worker lost") as raised:
            commit(service, 1)
        assert raised.value.replicas == (0, 1)


def test_with_every_replica_dead_a_refit_says_so():
    fakes = engines(2, dies_after=0)
    with running(*fakes, health=FOR_GOOD) as service:
        with pytest.raises(NoReplicaServesError):
            service.generate_batch(FOUR, TWO_TOKENS)
        with pytest.raises(RefitError, match="no replica is alive") as raised:
            stage(service, 1)
        assert raised.value.replicas == (0, 1)
        assert service.weight_version == 0


def test_running_requests_are_kept_or_waited_for_or_aborted_as_asked(pool):
    gate = Gate()
    (one,) = engines(1, gate=lambda _: gate)
    with running(one) as service:
        stage(service, 1)
        work = pool.submit(service.generate_batch, FOUR, TWO_TOKENS)
        gate.wait_until_held(4)
        commit(service, 1, in_flight=InFlight.KEEP)
        gate.open()
        assert set(work.result(10).versions_T.tolist()) == {1}

        gate.close()
        stage(service, 2)
        work = pool.submit(service.generate_batch, FOUR, TWO_TOKENS)
        gate.wait_until_held(4)
        committing = pool.submit(commit, service, 2, in_flight=InFlight.WAIT)
        gate.open()
        committing.result(10)
        assert set(work.result(10).versions_T.tolist()) == {1}

        gate.close()
        stage(service, 3)
        work = pool.submit(service.generate_batch, FOUR, TWO_TOKENS)
        gate.wait_until_held(4)
        commit(service, 3, in_flight=InFlight.ABORT)
        aborted = work.result(10)
        assert aborted.lengths_N.tolist() == [0, 0, 0, 0]
        assert aborted.finish_N.tolist() == [FinishReason.ABORT] * 4


def test_the_services_own_deadline_covers_a_replica_that_ignores_its_own():
    class Deaf(FakeEngine):
        async def stage_weights(self, update, *, timeout_s):
            await Gate().passed()

    with running(Deaf(0)) as service, pytest.raises(RefitError) as raised:
        stage(service, 1, timeout_s=0.05)
    assert isinstance(raised.value.__cause__, DeadlineError)


# What the service remembers of a refit


class Remembering(Router):
    """Counts how often it was told that cached prefixes are gone."""

    num_forgotten = 0

    def forget_prefixes(self) -> None:
        self.num_forgotten += 1


async def test_the_router_forgets_prefixes_when_a_commit_reset_the_cache_and_only_then():
    async with Fleet(*engines(2)) as fleet:
        router = fleet.weights.router = Remembering(fleet.config.routing, block_size=16)
        await fleet.refit(1)
        assert router.num_forgotten == 1
        await fleet.stage(2)
        await fleet.weights.commit(update(2), in_flight=InFlight.KEEP, kv=KVCache.REUSE, timeout_s=60.0)
        assert router.num_forgotten == 1


async def test_refits_are_counted_by_how_they_ended():
    failing = FakeEngine(1, script=answering(commit_error=OSError("fire")))
    async with Fleet(FakeEngine(0), failing) as fleet:
        await fleet.stage(1)
        with pytest.raises(RefitError):
            await fleet.commit(1)
        failing.script = answering(stage_error=OSError("fire"))
        with pytest.raises(RefitError):
            await fleet.stage(2)
        failing.script = FakeEngineScript()
        await fleet.refit(3)
        assert (fleet.counters.refits, fleet.counters.refits_failed) == (1, 2)


async def test_what_is_remembered_is_what_serving_replicas_have():
    failing = FakeEngine(1)
    async with Fleet(FakeEngine(0), failing) as fleet:
        assert fleet.weights.committed is None
        await fleet.refit(1)
        await fleet.stage(2)
        # Staged is not committed.
        assert fleet.weights.committed == update(1)
        failing.script = answering(commit_error=OSError("fire"))
        with pytest.raises(RefitError):
            await fleet.commit(2)
        assert fleet.weights.committed == update(2)


async def test_a_commit_that_fails_everywhere_leaves_the_last_good_update_for_restarts():
    fakes = engines(2)
    async with Fleet(*fakes) as fleet:
        await fleet.refit(1)
        for fake in fakes:
            fake.script = answering(commit_error=OSError("fire"))
        await fleet.stage(2)
        with pytest.raises(RefitError):
            await fleet.commit(2)
        assert fleet.states == [ReplicaState.STALE] * 2
        fakes[1].kill("out of memory")
        await fleet.until_state(1, ReplicaState.HEALTHY)
        assert fleet.engine(1).committed == [update(1).addressed_to(1)]
        assert fleet.replicas.version == 1


async def test_a_replica_that_dies_and_returns_during_a_commit_is_judged_by_its_new_engine(caplog):
    gate = Gate()

    class DiesInCommit(FakeEngine):
        async def commit_weights(self, update, *, in_flight, kv):
            self.kill("out of memory")
            await gate.passed()
            await self.check_health()

    slow, answers = Gate(), Gate()
    well = FakeEngine(0, script=FakeEngineScript(commit_gate=slow))
    async with Fleet(well, DiesInCommit(1, script=FakeEngineScript(gate=lambda _: answers))) as fleet:
        work = asyncio.create_task(fleet.generate(FOUR))
        await asyncio.to_thread(answers.wait_until_held, 2, timeout_s=60.0)
        await fleet.stage(1)
        committing = asyncio.create_task(fleet.commit(1))
        await asyncio.to_thread(gate.wait_until_held, 1, timeout_s=60.0)
        # Its stream told of the death; it has started again, and waits for the commit to end.
        await until(lambda: not isinstance(fleet.replicas.by_index(1).engine, DiesInCommit))
        assert fleet.states[1] is ReplicaState.RESTARTING
        gate.open()
        slow.open()
        with pytest.raises(RefitError, match="out of memory"):
            await committing
        await fleet.until_state(1, ReplicaState.HEALTHY)
        assert fleet.counters.deaths == 1
        assert fleet.engine(1).committed == [update(1).addressed_to(1)]
        assert first_tokens((await work).sorted_rows()) == ANSWERS
    assert not [record for record in caplog.records if "-> stale" in record.getMessage()]


async def test_a_restored_engine_that_reports_another_version_does_not_serve():
    class Odd(FakeEngine):
        async def commit_weights(self, update, *, in_flight, kv):
            return replace(await super().commit_weights(update, in_flight=in_flight, kv=kv), version=99)

    async with Fleet(*engines(2), make=Odd) as fleet:
        await fleet.refit(1)
        fleet.engine(1).kill("out of memory")
        replica = await fleet.until_state(1, ReplicaState.STALE)
        assert "it reports version 99" in replica.reason


def test_receivers_are_the_replicas_that_are_up_with_their_workers_and_machines():
    first, second = engines(2)
    with running(first, second, health=FOR_GOOD) as service:
        assert service.weight_receivers() == (
            WeightReceiver(0, 1, ("localhost",)),
            WeightReceiver(1, 1, ("localhost",)),
        )
        first.kill("out of memory")
        with pytest.raises(RefitError):
            stage(service, 1)
        assert [receiver.replica for receiver in service.weight_receivers()] == [1]

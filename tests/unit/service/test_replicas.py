"""What the driver knows of its replicas without asking them."""

import logging

import pytest

from rl_vllm.errors import EngineDiedError, NoReplicaServesError, ReplicaIndexError
from rl_vllm.service.replicas import ReplicaSet
from rl_vllm.testing import FakeEngine
from rl_vllm.types import ReplicaState

from .conftest import engines


def replica_set(*states_and_versions: tuple[ReplicaState, int]) -> ReplicaSet:
    replicas = ReplicaSet(list(engines(len(states_and_versions))))
    for replica, (state, version) in zip(replicas.all, states_and_versions, strict=True):
        replica.version = version
        replicas.set_state(replica, state, "as the test says")
    return replicas


def test_the_version_is_the_newest_that_all_serving_replicas_have():
    assert replica_set((ReplicaState.HEALTHY, 2), (ReplicaState.HEALTHY, 1), (ReplicaState.STALE, 0)).version == 1
    assert replica_set((ReplicaState.DEAD, 1), (ReplicaState.HEALTHY, 3), (ReplicaState.HEALTHY, 4)).version == 3


def test_when_none_serves_the_version_is_the_newest_that_was_ever_committed():
    assert replica_set((ReplicaState.STALE, 3), (ReplicaState.DEAD, 4), (ReplicaState.STALE, 2)).version == 4


def test_only_serving_replicas_are_given_requests_and_stale_ones_still_live():
    replicas = replica_set((ReplicaState.STALE, 0), (ReplicaState.HEALTHY, 0), (ReplicaState.DEAD, 0))
    assert [replica.index for replica in replicas.serving()] == [1]
    assert [replica.index for replica in replicas.living()] == [0, 1]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            ReplicaState.STALE,
            r"no replica serves: replica 0 is dead \(as the test says\), replica 1 is stale \(.+\); complete a refit",
        ),
        (
            ReplicaState.DEAD,
            r"no replica serves: replica 0 is dead \(.+\), replica 1 is dead \(.+\); launch a new service",
        ),
    ],
)
def test_when_none_serves_the_error_says_what_to_do(other, message):
    with pytest.raises(NoReplicaServesError, match=message):
        replica_set((ReplicaState.DEAD, 0), (other, 0)).serving()


def test_watchers_are_told_of_changes_only_and_until_they_leave():
    replicas = replica_set((ReplicaState.HEALTHY, 0), (ReplicaState.HEALTHY, 0))
    seen = []

    def watcher(replica):
        seen.append((replica.index, replica.state))

    replicas.watch(watcher)
    replicas.set_state(replicas.all[1], ReplicaState.HEALTHY, "no change")
    replicas.set_state(replicas.all[1], ReplicaState.STALE, "a commit failed")
    replicas.unwatch(watcher)
    replicas.set_state(replicas.all[0], ReplicaState.DEAD, "killed")
    assert seen == [(1, ReplicaState.STALE)]


def test_counters_add_up_what_is_outstanding():
    replicas = replica_set((ReplicaState.HEALTHY, 0), (ReplicaState.HEALTHY, 0))
    one, two = replicas.all
    one.acquire(5)
    one.acquire(7)
    two.acquire(3)
    one.release(5)
    assert [replica.outstanding_tokens for replica in replicas.all] == [7, 3]
    assert (one.outstanding_requests, two.outstanding_requests) == (1, 1)


def test_a_loss_of_capacity_is_a_warning_and_other_changes_are_for_those_who_look(caplog):
    replicas = replica_set((ReplicaState.HEALTHY, 0), (ReplicaState.HEALTHY, 0))
    one, two = replicas.all
    with caplog.at_level(logging.INFO, logger="rl_vllm"):
        for state in (ReplicaState.SUSPECT, ReplicaState.DEAD, ReplicaState.RESTARTING, ReplicaState.STALE):
            replicas.set_state(one, state, "because")
        replicas.set_state(one, ReplicaState.DEAD, "because")
        replicas.set_state(one, ReplicaState.RETIRED, "because")
        replicas.set_state(two, ReplicaState.DRAINING, "because")
        replicas.set_state(two, ReplicaState.RETIRED, "because")
    assert [record.levelname for record in caplog.records] == [
        "INFO",
        "WARNING",
        "INFO",
        "WARNING",
        "WARNING",
        "WARNING",
        "INFO",
        "INFO",
    ]


def test_retired_is_final_and_who_has_no_engine_yet_says_so():
    replicas = replica_set((ReplicaState.HEALTHY, 0))
    replicas.set_state(replicas.all[0], ReplicaState.RETIRED, "it was removed")
    replicas.set_state(replicas.all[0], ReplicaState.HEALTHY, "a late answer")
    assert replicas.all[0].state is ReplicaState.RETIRED
    late = replicas.enlist()
    assert (late.index, late.state) == (1, ReplicaState.STARTING)
    with pytest.raises(EngineDiedError, match="it is starting and has no engine yet"):
        _ = late.engine


def test_only_the_engine_that_a_replica_has_now_can_be_its_death():
    replicas = replica_set((ReplicaState.HEALTHY, 3))
    replica, old = replicas.all[0], replicas.all[0].engine
    replicas.renew(replica, FakeEngine(0))
    replicas.died(replica, old, "a late word of the old one")
    assert replica.state is ReplicaState.HEALTHY
    assert replica.version == 0
    replicas.died(replica, replica.engine, "gone")
    assert replica.state is ReplicaState.DEAD
    # What was served once is not forgotten with the engine that served it.
    assert replicas.version == 3


@pytest.mark.parametrize("index", [True, 2, -1, "0", None])
def test_an_index_that_no_replica_has_is_refused(index):
    replicas = replica_set((ReplicaState.HEALTHY, 0), (ReplicaState.HEALTHY, 0))
    assert replicas.by_index(1) is replicas.all[1]
    with pytest.raises(ReplicaIndexError, match=r"give one of \[0, 1\]"):
        replicas.by_index(index)

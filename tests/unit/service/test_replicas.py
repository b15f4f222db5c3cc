"""What the driver knows of its replicas without asking them."""

import pytest

from rl_vllm.errors import NoReplicaServesError
from rl_vllm.service.replicas import ReplicaSet, loads
from rl_vllm.types import ReplicaState

from .conftest import engines


def replica_set(*states_and_versions: tuple[ReplicaState, int]) -> ReplicaSet:
    replicas = ReplicaSet(list(engines(len(states_and_versions))))
    for replica, (state, version) in zip(replicas.all, states_and_versions, strict=True):
        replica.version = version
        replicas.set_state(replica, state, "as the test says")
    return replicas


def test_the_version_is_the_newest_that_all_serving_replicas_have():
    assert replica_set((ReplicaState.SERVING, 2), (ReplicaState.SERVING, 1), (ReplicaState.STALE, 0)).version == 1
    assert replica_set((ReplicaState.DEAD, 1), (ReplicaState.SERVING, 3), (ReplicaState.SERVING, 4)).version == 3


def test_when_none_serves_the_version_is_the_newest_that_was_ever_committed():
    assert replica_set((ReplicaState.STALE, 3), (ReplicaState.DEAD, 4), (ReplicaState.STALE, 2)).version == 4


def test_only_serving_replicas_are_given_requests_and_stale_ones_still_live():
    replicas = replica_set((ReplicaState.STALE, 0), (ReplicaState.SERVING, 0), (ReplicaState.DEAD, 0))
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
    replicas = replica_set((ReplicaState.SERVING, 0), (ReplicaState.SERVING, 0))
    seen = []

    def watcher(replica):
        seen.append((replica.index, replica.state))

    replicas.watch(watcher)
    replicas.set_state(replicas.all[1], ReplicaState.SERVING, "no change")
    replicas.set_state(replicas.all[1], ReplicaState.STALE, "a commit failed")
    replicas.unwatch(watcher)
    replicas.set_state(replicas.all[0], ReplicaState.DEAD, "killed")
    assert seen == [(1, ReplicaState.STALE)]


def test_counters_add_up_what_is_outstanding():
    replicas = replica_set((ReplicaState.SERVING, 0), (ReplicaState.SERVING, 0))
    one, two = replicas.all
    one.acquire(5)
    one.acquire(7)
    two.acquire(3)
    one.release(5)
    assert loads(replicas.all).tolist() == [7, 3]
    assert (one.outstanding_requests, two.outstanding_requests) == (1, 1)

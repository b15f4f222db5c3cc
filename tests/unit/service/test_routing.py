"""Which replica a prompt goes to, worked out by hand."""

import numpy as np
import pytest

from rl_vllm.service.routing import assign_least_outstanding


def assign(costs, loads, first=0):
    return assign_least_outstanding(np.array(costs, np.int64), np.array(loads, np.int64), first=first).tolist()


def test_each_prompt_goes_to_the_replica_with_the_fewest_outstanding_tokens():
    # Loads 0 and 5: 3 makes replica 0's 3, 4 makes it 7; then replica 1 is lower with 5, and with 6 still is.
    assert assign([3, 4, 1, 6], [0, 5]) == [0, 0, 1, 1]


def test_a_loaded_replica_gets_nothing_until_the_others_have_caught_up():
    # Replica 0 holds 25: the others take three prompts of 10 each before it is the lowest.
    assert assign([10] * 7, [25, 0, 0]) == [1, 2, 1, 2, 1, 2, 0]


def test_equal_replicas_are_taken_in_turn_from_the_one_named_first():
    assert assign([1, 1, 1], [0, 0, 0], first=2) == [2, 0, 1]
    assert assign([1, 1, 1], [4, 4, 4], first=7) == [1, 2, 0]


def test_single_prompts_to_idle_replicas_are_spread_evenly():
    chosen = [assign([8], [0, 0, 0, 0], first=call)[0] for call in range(200)]
    assert [chosen.count(replica) for replica in range(4)] == [50, 50, 50, 50]


def test_a_batch_of_equal_prompts_is_split_evenly_in_one_pass():
    chosen = assign([17] * 256, [0, 0, 0, 0])
    assert [chosen.count(replica) for replica in range(4)] == [64, 64, 64, 64]


@pytest.mark.parametrize("num_replicas", [1, 2, 5])
def test_loads_end_within_one_prompt_of_each_other(num_replicas):
    costs = np.random.default_rng(num_replicas).integers(1, 100, size=64)
    chosen = np.array(assign(costs, [0] * num_replicas))
    ends = [int(costs[chosen == replica].sum()) for replica in range(num_replicas)]
    assert max(ends) - min(ends) <= costs.max()


def test_an_empty_batch_is_assigned_to_nobody():
    assert assign([], [3, 4]) == []

"""The table of prefixes against a dictionary that never forgets."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_vllm.service.prefix_table import HOLDERS, PrefixTable

HASHES = st.integers(1, 2**64 - 1)


def learn(table: PrefixTable, pairs: list[tuple[int, int]]) -> None:
    table.learn(np.array([pair[0] for pair in pairs], np.uint64), np.array([pair[1] for pair in pairs], np.int64))


def holders(table: PrefixTable, value: int) -> set[int]:
    place = table.find(np.array([value], np.uint64))
    return set() if place[0] < 0 else {int(code) - 1 for code in table.holders(place)[0] if code}


@settings(derandomize=True, deadline=None, max_examples=100)
@given(batches=st.lists(st.lists(st.tuples(HASHES, st.integers(0, 5)), min_size=1, max_size=12), max_size=5))
def test_what_is_known_was_learnt_and_the_table_stays_within_its_size(batches):
    table, truth = PrefixTable(16), {}
    for batch in batches:
        learn(table, batch)
        for value, index in batch:
            truth.setdefault(value, set()).add(index)
    assert len(table) <= table.capacity == 16
    for value, indices in truth.items():
        assert holders(table, value) <= indices


def test_with_room_for_all_nothing_is_lost():
    values = np.random.default_rng(0).integers(1, 2**63, 3000)
    table = PrefixTable(65_536)
    learn(table, [(int(value), at % 7) for at, value in enumerate(values)])
    assert len(table) == 3000
    assert all(holders(table, int(value)) == {at % 7} for at, value in enumerate(values))


def test_replicas_that_learn_one_prefix_in_one_batch_are_all_remembered():
    table = PrefixTable(64)
    learn(table, [(5, index) for index in (3, 1, 3, 0)])
    assert holders(table, 5) == {0, 1, 3}


def test_only_the_latest_holders_of_a_prefix_are_kept():
    table = PrefixTable(64)
    for index in range(HOLDERS + 2):
        learn(table, [(5, index)])
    assert holders(table, 5) == set(range(2, HOLDERS + 2))


def test_the_least_recently_used_prefix_makes_room():
    # Four places, one set: 10 was used again after 20, so that the fifth prefix takes the place of 20.
    table = PrefixTable(4)
    for value in (10, 20, 30, 40):
        learn(table, [(value, 1)])
    table.touch(table.find(np.array([10], np.uint64)))
    learn(table, [(50, 2)])
    assert [holders(table, value) for value in (10, 20, 30, 40, 50)] == [{1}, set(), {1}, {1}, {2}]


def test_a_new_prefix_takes_over_nothing_from_the_one_before_it():
    table = PrefixTable(4)
    for value in (10, 20, 30, 40):
        learn(table, [(value, 1)])
    table.count_branches(table.find(np.array([10], np.uint64)))
    learn(table, [(50, 2)])
    place = table.find(np.array([50], np.uint64))
    assert holders(table, 50) == {2}
    assert table.branches(place).tolist() == [0]


@pytest.mark.parametrize("index", [0, 3])
def test_a_forgotten_replica_leaves_no_trace(index):
    with_it, without_it = PrefixTable(256), PrefixTable(256)
    pairs = [(value, value % 4) for value in range(1, 100)]
    learn(with_it, pairs)
    learn(without_it, [pair for pair in pairs if pair[1] != index])
    with_it.forget(index)
    assert len(with_it) == len(without_it)
    assert all(holders(with_it, value) == holders(without_it, value) for value in range(1, 100))


def test_clear_leaves_an_empty_table():
    table = PrefixTable(256)
    learn(table, [(value, 1) for value in range(1, 50)])
    table.clear()
    assert len(table) == 0
    assert holders(table, 7) == set()

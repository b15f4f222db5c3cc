"""What routing compiles, against the same in plain Python: integers, dictionaries and ``min``."""

import runpy
import subprocess
import sys

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_vllm.config import RoutingConfig
from rl_vllm.service import prefix_hash, prefix_table, routing
from rl_vllm.service.compiled import _Compiled, compiled
from rl_vllm.service.prefix_hash import hash_blocks, steps
from rl_vllm.service.prefix_table import HOLDERS, PrefixTable
from rl_vllm.service.router import Router, Snapshot, warm_up
from rl_vllm.service.routing import assign_least_outstanding
from rl_vllm.types import PromptBatch

MODULO = 2**64
GOLDEN = 0x9E3779B97F4A7C15
IDS = st.integers(0, 2**31 - 1) | st.integers(0, 2)
ROWS = st.lists(st.lists(IDS, max_size=14), min_size=1, max_size=6)


# Hashes


def mixed(value: int) -> int:
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        value = (value ^ (value >> 32)) * factor % MODULO
    return value ^ (value >> 32)


def factor(number: int, seed: int) -> int:
    return mixed((number + 1 + (seed << 32)) * GOLDEN % MODULO) | 1


def hashes_of(row: list[int], *, block_size: int, max_blocks: int, seed: int) -> list[int]:
    """The hash at the end of each block of one prompt, with Python's integers."""
    if len(row) < block_size:
        return []
    found, total = [], seed
    for number, start in enumerate(range(0, len(row), block_size)[:max_blocks]):
        ids = row[start : start + block_size]
        ids += [2**32 - 1] * (block_size + block_size % 2 - len(ids))
        words = [low + (high << 32) for low, high in zip(ids[::2], ids[1::2], strict=True)]
        block = sum((word * factor(at, 1) for at, word in enumerate(words)), GOLDEN)
        total += mixed(block % MODULO) * factor(number, 2)
        found.append(max(1, mixed(total % MODULO)))
    return found


@pytest.mark.parametrize("block_size", [1, 3, 4])
@settings(derandomize=True, deadline=None, max_examples=60)
@given(rows=ROWS, max_blocks=st.integers(1, 5), seed=st.integers(0, MODULO - 1))
def test_hashes_are_those_of_whole_numbers_that_wrap_at_64_bits(block_size, rows, max_blocks, seed):
    prompts = PromptBatch.from_rows(rows)
    blocks = hash_blocks(
        prompts.tokens_T,
        prompts.offsets_B1[:-1],
        prompts.lengths_B,
        block_size=block_size,
        max_blocks=max_blocks,
        seeds_B=np.full(len(rows), seed, np.uint64),
    )
    expected = [hashes_of(row, block_size=block_size, max_blocks=max_blocks, seed=seed) for row in rows]
    assert blocks.hashes_N.tolist() == [value for row in expected for value in row]
    assert blocks.rows_N.tolist() == [at for at, row in enumerate(expected) for _ in row]
    assert blocks.depths_N.tolist() == [depth for row in expected for depth in range(1, len(row) + 1)]
    assert blocks.full_B.tolist() == [min(len(row) // block_size, max_blocks) for row in rows]


def test_steps_are_powers_of_two_and_thrice_them_from_a_quarter_on():
    lengths = list(range(70))
    prompts = PromptBatch.from_rows([[7] * length for length in lengths])
    blocks = hash_blocks(
        prompts.tokens_T, prompts.offsets_B1[:-1], prompts.lengths_B, block_size=1, max_blocks=64, seeds_B=None
    )
    kept = steps(blocks)
    series = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64}
    for row, length in enumerate(min(length, 64) for length in lengths):
        expected = {depth for depth in series if length <= 4 * depth <= 4 * length} | ({length} if length else set())
        assert set(blocks.depths_N[kept[blocks.rows_N[kept] == row]].tolist()) == expected


# The table

HASHES = st.integers(1, 12) | st.integers(MODULO - 6, MODULO - 1)
LEARNT = st.lists(st.tuples(HASHES, st.integers(0, 5)), max_size=10)


class TableModel:
    """A table of sets of four prefixes, each prefix with a list of its holders, the latest last."""

    def __init__(self, num_sets: int) -> None:
        self.sets: list[list[dict]] = [[{} for _ in range(4)] for _ in range(num_sets)]
        self.now = 0

    def place(self, value: int) -> dict | None:
        return next((place for place in self.sets[value % len(self.sets)] if place.get("hash") == value), None)

    def learn(self, pairs: list[tuple[int, int]]) -> None:
        self.now += 1
        for value, index in pairs:
            place = self.place(value)
            if place is None:
                place = min(self.sets[value % len(self.sets)], key=lambda place: place.get("used", 0))
                place.clear()
                place |= {"hash": value, "holders": []}
            place["used"] = self.now
            if index not in place["holders"]:
                place["holders"] = [*place["holders"], index][-HOLDERS:]

    def forget(self, index: int) -> None:
        for place in (place for one in self.sets for place in one if place):
            place["holders"] = [holder for holder in place["holders"] if holder != index]
            if not place["holders"]:
                place.clear()


@settings(derandomize=True, deadline=None, max_examples=150)
@given(batches=st.lists(st.tuples(LEARNT, st.none() | st.integers(0, 5)), max_size=8))
def test_a_table_remembers_what_a_dictionary_with_the_same_room_does(batches):
    table, model = PrefixTable(16), TableModel(4)
    for pairs, forgotten in batches:
        table.learn(np.array([value for value, _ in pairs], np.uint64), np.array([at for _, at in pairs], np.int64))
        model.learn(pairs)
        if forgotten is not None:
            table.forget(forgotten)
            model.forget(forgotten)
    values = [*range(1, 13), *range(MODULO - 6, MODULO)]
    places = table.find(np.array(values, np.uint64))
    for value, place in zip(values, places, strict=True):
        expected = model.place(value)
        assert (place >= 0) == (expected is not None)
        if expected is not None:
            padded = [0] * (HOLDERS - len(expected["holders"])) + [index + 1 for index in expected["holders"]]
            assert table.holders(np.array([place]))[0].tolist() == padded


def look_up(table: PrefixTable, row: list[int], position_of: list[int], min_share: float = 0.5):
    at, holders = table.look_up(
        np.array(row, np.uint64),
        np.array([len(row)]),
        np.array(position_of, np.int64),
        min_share=min_share,
        max_branches=2,
    )
    return int(at[0]), sorted(holders[0][holders[0] >= 0].tolist())


def test_the_deepest_known_prefix_counts_if_it_is_deep_enough():
    table = PrefixTable(64)
    table.learn(np.array([11, 12], np.uint64), np.array([0, 1]))
    everybody = [-1, 0, 1]
    assert look_up(table, [11, 12, 13, 14], everybody) == (1, [1])
    assert look_up(table, [11, 12, 13, 14, 15], everybody) == (-1, [])
    assert look_up(table, [11, 12, 13, 14, 15], everybody, min_share=0.2) == (1, [1])
    assert look_up(table, [11], everybody) == (0, [0])
    assert look_up(table, [], everybody) == (-1, [])


def test_replicas_that_may_not_be_chosen_hold_nothing():
    table = PrefixTable(64)
    table.learn(np.array([11, 11, 11], np.uint64), np.array([0, 2, 7]))
    assert look_up(table, [11], [-1, 5, -1, 6]) == (0, [5, 6])
    assert look_up(table, [11], [-1, -1, 3]) == (-1, [])


def test_a_prefix_that_goes_on_in_too_many_ways_is_nobodys():
    table = PrefixTable(64)
    table.learn(np.array([11], np.uint64), np.array([0]))
    # Two ways for the one holder; the third prompt finds them counted. The prefix by itself is still held.
    assert [look_up(table, [11, other], [-1, 0])[0] for other in (20, 21, 22)] == [0, 0, -1]
    assert look_up(table, [11], [-1, 0]) == (0, [0])


def test_use_is_counted_anew_when_its_number_is_used_up():
    table = PrefixTable(4)
    table._now = 2**31 - 2
    for value in (10, 20, 30, 40, 50):
        table.learn(np.array([value], np.uint64), np.array([0]))
    # 10 got the last number; all that was known then is equally old, and 20 to 40 are newer.
    assert (table.find(np.array([10, 20, 30, 40, 50], np.uint64)) >= 0).tolist() == [False, True, True, True, True]


# Placement


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    costs=st.lists(st.integers(0, 40), max_size=40),
    loads=st.lists(st.integers(0, 60), min_size=1, max_size=9),
    first=st.integers(0, 20),
)
def test_the_heap_gives_what_looking_at_every_replica_gives(costs, loads, first):
    chosen = assign_least_outstanding(np.array(costs, np.int64), np.array(loads, np.int64), first=first).tolist()
    turns = [(first + turn) % len(loads) for turn in range(len(loads))]
    for cost, replica in zip(costs, chosen, strict=True):
        assert replica == min(turns, key=loads.__getitem__)
        loads[replica] += cost


# Compiling


def compiled_variants() -> dict[str, int]:
    made = {
        f"{module.__name__}.{name}": value._made if isinstance(value, _Compiled) else value
        for module in (prefix_hash, prefix_table, routing)
        for name, value in vars(module).items()
    }
    return {name: len(value.signatures) for name, value in made.items() if numba.extending.is_jitted(value)}


def test_a_worker_that_imports_the_service_with_its_main_module_has_no_numba():
    # vLLM 0.32 looks at all that is imported when its CPU worker starts, and fails at an object of numba's.
    code = "import sys, rl_vllm.service.service as s; sys.exit('numba' in sys.modules or not s.warm_up)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


def test_after_warming_up_nothing_is_compiled_whatever_comes():
    warm_up()
    before = compiled_variants()
    assert len(before) > 10
    rows = [list(range(40)), list(range(20)), [], [1]]
    flat = PromptBatch.from_rows(rows)
    read_only = np.frombuffer(flat.tokens_T.tobytes(), np.int32)
    with_gaps = np.repeat(flat.tokens_T, 2)[::2]
    kv_R = np.array([0.5, 0.1])
    loads_R = np.array([3, 7], np.int64)
    for strategy in (("prefix-aware", "requests"), ("prefix-aware", "round-robin"), ("kv-cache",), ("requests",)):
        router = Router(RoutingConfig(strategy=strategy, overload_threshold=2), block_size=16, saved_weight=1)
        for tokens in (flat.tokens_T, read_only, with_gaps):
            batch = PromptBatch(
                tokens, flat.offsets_B1, session_ids=("a", None, "a", "b"), loras=("x", None, None, "y")
            )
            for chosen in (range(4), [2, 0], np.array([1, 3])):
                costs_B = np.full(len(chosen), 9)
                router.assign(batch, chosen, costs_B, Snapshot(np.array([1, 4]), loads_R, loads_R, kv_R))
        router.forget(4)
    assert compiled_variants() == before


def test_where_nothing_can_be_kept_on_disk_functions_are_compiled_all_the_same(tmp_path, monkeypatch):
    # Files where folders should be stop the superuser too: beside the module, and in the user's cache.
    (tmp_path / "__pycache__").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "__pycache__"))
    (tmp_path / "doubling.py").write_text("def doubled(value):\n    return 2 * value\n")
    doubled = runpy.run_path(str(tmp_path / "doubling.py"))["doubled"]
    with pytest.raises(RuntimeError, match="cannot cache function"):
        numba.njit(cache=True)(doubled)
    assert compiled(doubled)(21) == 42

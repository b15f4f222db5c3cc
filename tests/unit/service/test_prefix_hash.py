"""What a prefix's hash stands for, compared with plain lists of ids."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_vllm.service import prefix_hash
from rl_vllm.service.prefix_hash import Blocks, hash_blocks, shared_in_batch, stable_hash, steps
from rl_vllm.types import PromptBatch

IDS = st.integers(0, 3)
ROWS = st.lists(st.lists(IDS, max_size=13), min_size=1, max_size=8)


def hashed(rows: list[list[int]], *, block_size: int = 4, max_blocks: int = 8, seeds=None) -> Blocks:
    prompts = PromptBatch.from_rows(rows)
    return hash_blocks(
        prompts.tokens_T,
        prompts.offsets_B1[:-1],
        prompts.lengths_B,
        block_size=block_size,
        max_blocks=max_blocks,
        seeds_B=None if seeds is None else np.array(seeds, np.uint64),
    )


def of_row(blocks: Blocks, row: int) -> list[int]:
    return blocks.hashes_N[blocks.rows_N == row].tolist()


def prefixes(row: list[int], block_size: int, max_blocks: int) -> list[tuple[int, ...]]:
    """What each hash of a prompt stands for: all full blocks, then the whole prompt when it ends within a block."""
    if len(row) < block_size:
        return []
    ends = list(range(block_size, len(row) + 1, block_size))
    if ends[-1] < len(row):
        ends.append(len(row))
    return [tuple(row[:end]) for end in ends[:max_blocks]]


@pytest.mark.parametrize("block_size", [1, 3, 4])
@settings(derandomize=True, deadline=None, max_examples=60)
@given(rows=ROWS, max_blocks=st.integers(1, 4))
def test_two_hashes_are_equal_exactly_when_the_prefixes_are(block_size, rows, max_blocks):
    blocks = hashed(rows, block_size=block_size, max_blocks=max_blocks)
    expected = [prefix for row in rows for prefix in prefixes(row, block_size, max_blocks)]
    assert len(blocks.hashes_N) == len(expected)
    assert 0 not in blocks.hashes_N
    for first, one in zip(expected, blocks.hashes_N, strict=True):
        for second, other in zip(expected, blocks.hashes_N, strict=True):
            assert (first == second) == (one == other)


def test_a_prompt_that_ends_in_a_filler_of_zeros_is_not_the_shorter_one():
    blocks = hashed([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]])
    assert of_row(blocks, 0)[0] == of_row(blocks, 1)[0]
    assert of_row(blocks, 0)[1] != of_row(blocks, 1)[1]


def test_ids_that_differ_at_one_place_only_give_other_hashes_wherever_it_is():
    base = list(range(100, 116))
    rows = [base] + [[*base[:at], 7, *base[at + 1 :]] for at in range(16)]
    ends = [of_row(hashed(rows, block_size=16), row)[0] for row in range(17)]
    assert len(set(ends)) == 17


def test_a_prompt_shorter_than_a_block_has_no_hash_since_no_cache_shares_it():
    assert hashed([[1, 2, 3], []]).hashes_N.tolist() == []


def test_equal_ids_under_two_adapters_share_nothing():
    row = [1, 2, 3, 4, 5, 6, 7, 8]
    blocks = hashed([row, row, row], seeds=[0, stable_hash("a"), stable_hash("b")])
    assert len({*of_row(blocks, 0), *of_row(blocks, 1), *of_row(blocks, 2)}) == 6


def test_hashes_do_not_depend_on_what_else_is_in_the_batch():
    row = [9, 8, 7, 6, 5, 4, 3, 2]
    assert of_row(hashed([row]), 0) == of_row(hashed([[1] * 11, row, [2] * 5]), 1)


# Run from the file alone, because importing the package takes seconds.
IN_ANOTHER_PROCESS = """
import runpy, sys
import numpy as np

module = runpy.run_path(sys.argv[1])
blocks = module["hash_blocks"](
    np.array([1, 2, 3, 4, 5, 6], np.int32), np.array([0]), np.array([6]), block_size=4, max_blocks=8, seeds_B=None
)
print(blocks.hashes_N.tolist(), module["stable_hash"]("a"))
"""


@pytest.mark.parametrize("seed", ["1", "2"])
def test_hashes_are_the_same_in_every_process(seed):
    child = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS, prefix_hash.__file__],
        env=os.environ | {"PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert child.stdout == f"{of_row(hashed([[1, 2, 3, 4, 5, 6]]), 0)} {stable_hash('a')}\n"


def test_a_few_depths_of_each_prompt_are_remembered():
    # 9 full blocks and a rest: a quarter of 10 is 2.5; 3, 4, 6 and 8 are steps, 9 the last full block, 10 the end.
    blocks = hashed([list(range(38))], max_blocks=64)
    assert blocks.depths_N[steps(blocks)].tolist() == [3, 4, 6, 8, 9, 10]


@settings(derandomize=True, deadline=None, max_examples=50)
@given(rows=ROWS)
def test_the_deepest_block_shared_in_a_batch_is_the_longest_prefix_that_another_prompt_has_too(rows):
    blocks = hashed(rows)
    found = shared_in_batch(blocks, np.arange(len(blocks.hashes_N)))
    for row, tokens in enumerate(rows):
        others = {prefix for at, other in enumerate(rows) if at != row for prefix in prefixes(other, 4, 8)}
        shared = [prefix for prefix in prefixes(tokens, 4, 8) if prefix in others]
        assert blocks.depths_at(found)[row] == (-(-len(shared[-1]) // 4) if shared else 0)

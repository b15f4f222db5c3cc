"""Hashes of the prefixes that an engine's cache can share: pure functions over token ids.

Axes: B prompts of one batch, N blocks of all of them laid end to end, M some of those blocks.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rl_vllm.service.compiled import as_input, compiled

Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]
UInt64 = NDArray[np.uint64]

# numba makes a float of a signed and an unsigned integer: whatever meets a hash is an np.uint64.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT = np.uint64(32)
_ONE = np.uint64(1)
# Stands where a prompt has ended; no id is negative.
_NO_ID = np.int32(-1)


def stable_hash(text: str) -> int:
    """64 bits of a text, the same in every process; Python's own ``hash`` is salted."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Blocks(NamedTuple):
    """Hashes of every prefix of whole blocks of the prompts of a batch.

    Attributes:
        hashes_N: uint64 [N], never 0. A block's hash stands for all tokens from the prompt's start to the block's end.
        rows_N: int64 [N], the prompt of each block.
        depths_N: int64 [N], blocks from the prompt's start to the block's end: 1 for a prompt's first.
        counts_B: int64 [B], blocks of each prompt, a last one that is not full included.
        full_B: int64 [B], full blocks of each prompt: the last one tells prompts apart, but no cache shares it.
    """

    hashes_N: UInt64
    rows_N: Int64
    depths_N: Int64
    counts_B: Int64
    full_B: Int64

    def depths_at(self, positions_B: Int64) -> Int64:
        """Blocks up to each position, int64 [B]; 0 where the position is -1."""
        depths_B: Int64 = np.append(self.depths_N, 0)[positions_B]
        return depths_B


def hash_blocks(
    tokens_T: Int32, starts_B: Int64, lengths_B: Int64, *, block_size: int, max_blocks: int, seeds_B: UInt64 | None
) -> Blocks:
    """Hash the prefixes of prompts at the ends of blocks, as an engine's prefix cache does.

    Multilinear hashing of words (Lemire and Kaser, arXiv:1202.4961), once over the words of a block and once over the
    blocks of a prompt. Departure: two ids share a word and factors are odd, so that blocks which differ in every other
    id alone collide with probability 2^-32 instead of 2^-64. Equal in every process and for every order of the prompts.

    Args:
        tokens_T: int32 [T], ids of all prompts.
        starts_B: int64 [B], where each prompt starts in ``tokens_T``.
        lengths_B: int64 [B], tokens of each.
        block_size: Tokens per block; a prompt shorter than one has no blocks, because no cache shares it.
        max_blocks: Blocks looked at per prompt.
        seeds_B: uint64 [B], mixed into each prompt's hashes, or None: equal ids under two adapters share nothing.
    """
    if seeds_B is None:
        seeds_B = np.zeros(len(lengths_B), np.uint64)
    return _hash_blocks(
        as_input(tokens_T, np.int32),
        as_input(starts_B, np.int64),
        as_input(lengths_B, np.int64),
        as_input(seeds_B, np.uint64),
        block_size,
        max_blocks,
    )


@compiled
def _mixed(value: np.uint64) -> np.uint64:
    """Spread every bit over the whole word: the finaliser of SplitMix64, with shifts of 32."""
    value ^= value >> _SHIFT
    value *= _MIX_1
    value ^= value >> _SHIFT
    value *= _MIX_2
    return value ^ (value >> _SHIFT)


@compiled
def _factors(count: int, seed: int) -> UInt64:
    """Odd constants, the same in every process."""
    factors = np.empty(count, np.uint64)
    for at in range(count):
        factors[at] = _mixed(np.uint64(at + 1 + (seed << 32)) * _GOLDEN) | _ONE
    return factors


@compiled
def _word(low: np.int32, high: np.int32) -> np.uint64:
    return np.uint64(np.uint32(low)) | (np.uint64(np.uint32(high)) << _SHIFT)


@compiled
def _hash_block(block: Int32, factors: UInt64) -> np.uint64:
    """Hash the ids of a block, two for each factor; what is missing of it is filled up with what is no id."""
    # Without the constant a block of zeros would add nothing, and would not tell its prefix from the one before it.
    total = _GOLDEN
    whole = len(block) // 2
    for at in range(whole):
        total += _word(block[2 * at], block[2 * at + 1]) * factors[at]
    for at in range(whole, len(factors)):
        total += _word(block[2 * at] if 2 * at < len(block) else _NO_ID, _NO_ID) * factors[at]
    return _mixed(total)


@compiled
def _hash_blocks(
    tokens_T: Int32, starts_B: Int64, lengths_B: Int64, seeds_B: UInt64, block_size: int, max_blocks: int
) -> Blocks:
    counts_B, full_B = np.empty(len(lengths_B), np.int64), np.empty(len(lengths_B), np.int64)
    num_blocks = 0
    for row, length in enumerate(lengths_B):
        full = full_B[row] = min(length // block_size, max_blocks)
        counts_B[row] = full + (0 < full < max_blocks and length % block_size > 0)
        num_blocks += counts_B[row]
    hashes_N, rows_N = np.empty(num_blocks, np.uint64), np.empty(num_blocks, np.int64)
    depths_N = np.empty(num_blocks, np.int64)
    of_words, of_blocks = _factors((block_size + 1) // 2, 1), _factors(max_blocks, 2)
    at = 0
    for row in range(len(lengths_B)):
        total, start, stop = seeds_B[row], starts_B[row], starts_B[row] + lengths_B[row]
        for before in range(counts_B[row]):
            total += _hash_block(tokens_T[start : min(start + block_size, stop)], of_words) * of_blocks[before]
            start += block_size
            # 0 marks an empty place in a table.
            hashes_N[at] = max(_mixed(total), _ONE)
            rows_N[at] = row
            depths_N[at] = before + 1
            at += 1
    return Blocks(hashes_N, rows_N, depths_N, counts_B, full_B)


def steps(blocks: Blocks) -> Int64:
    """Which blocks of a batch are worth remembering, as positions int64 [M] in ascending order.

    The last full block of each prompt, its end, and the depths 1, 2, 3, 4, 6, 8, 12, 16, 24, ... from a quarter of it
    on: two thirds at least of what two prompts share are then known, with a handful of entries for each.
    """
    return _steps(blocks)


@compiled
def _steps(blocks: Blocks) -> Int64:
    kept_M = np.empty(len(blocks.hashes_N), np.int64)
    num_kept = 0
    for at in range(len(kept_M)):
        row, depth = blocks.rows_N[at], blocks.depths_N[at]
        is_step = depth <= 3 * (depth & -depth) and 4 * depth >= blocks.counts_B[row]
        # A full block in the end, for what the prompt may grow into; the end itself, for the prompt as a whole.
        if is_step or depth >= blocks.full_B[row]:
            kept_M[num_kept] = at
            num_kept += 1
    return kept_M[:num_kept]


@compiled
def at_blocks(blocks: Blocks, positions_M: Int64, values_B: Int64) -> tuple[UInt64, Int64]:
    """The hash of each of some blocks, uint64 [M], and of ``values_B`` the one of its prompt, int64 [M]."""
    hashes_M, values_M = np.empty(len(positions_M), np.uint64), np.empty(len(positions_M), np.int64)
    for column, at in enumerate(positions_M):
        hashes_M[column], values_M[column] = blocks.hashes_N[at], values_B[blocks.rows_N[at]]
    return hashes_M, values_M


def shared_in_batch(blocks: Blocks, positions_M: Int64, *, min_share: float = 0.0) -> Int64:
    """The deepest block that each prompt shares with another one of the batch: int64 [B], positions, -1 for none.

    Args:
        blocks: The batch.
        positions_M: int64 [M], the blocks that are compared, in ascending order.
        min_share: The least depth that counts, as a share of the prompt's blocks.
    """
    return _shared_in_batch(blocks, positions_M, min_share)


@compiled
def _shared_in_batch(blocks: Blocks, positions_M: Int64, min_share: float) -> Int64:
    hashes_N, rows_N = blocks.hashes_N, blocks.rows_N
    deepest_B = np.full(len(blocks.counts_B), -1)
    # A hash table with room for twice as many: where each hash was seen first, -1 where there is none.
    num_slots = 2
    while num_slots < 2 * len(positions_M):
        num_slots *= 2
    first_at = np.full(num_slots, -1)
    for at in positions_M:
        if blocks.depths_N[at] < min_share * blocks.counts_B[rows_N[at]]:
            continue
        slot = np.int64(hashes_N[at] & np.uint64(num_slots - 1))
        while first_at[slot] >= 0 and hashes_N[first_at[slot]] != hashes_N[at]:
            slot = (slot + 1) % num_slots
        first = first_at[slot]
        if first < 0:
            first_at[slot] = at
        else:
            # Who has it first learns only now that it is shared, and may share a deeper one already.
            deepest_B[rows_N[at]] = at
            deepest_B[rows_N[first]] = max(first, deepest_B[rows_N[first]])
    return deepest_B

"""Hashes of the prefixes that an engine's cache can share: pure functions over token ids.

Axes: B prompts of one batch, N blocks of all of them laid end to end, M some of those blocks.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]
UInt64 = NDArray[np.uint64]
Bool = NDArray[np.bool_]
Number = TypeVar("Number", np.int64, np.uint64)

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT = np.uint64(32)


def _mixed(values: UInt64) -> UInt64:
    """Spread every bit over the whole word: the finaliser of SplitMix64, with shifts of 32."""
    values = values ^ (values >> _SHIFT)
    values *= _MIX_1
    values ^= values >> _SHIFT
    values *= _MIX_2
    values ^= values >> _SHIFT
    return values


@functools.lru_cache(maxsize=64)
def _factors(count: int, seed: int) -> UInt64:
    """Odd constants, the same in every process."""
    counters = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed << 32)
    return _mixed(counters * np.uint64(_GOLDEN)) | np.uint64(1)


def stable_hash(text: str) -> int:
    """64 bits of a text, the same in every process; Python's own ``hash`` is salted."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class Blocks:
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
        return _at(self.depths_N, positions_B)

    def hashes_at(self, positions_B: Int64) -> UInt64:
        """The hash at each position, uint64 [B]; 0 where the position is -1."""
        return _at(self.hashes_N, positions_B)


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
    full_B = np.minimum(lengths_B // block_size, max_blocks)
    has_rest_B = (full_B > 0) & (full_B < max_blocks) & (lengths_B % block_size > 0)
    counts_B = full_B + has_rest_B
    ends_B = np.cumsum(counts_B)
    num_blocks = int(ends_B[-1]) if len(ends_B) else 0
    if num_blocks == 0:
        return Blocks(np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros(0, np.int64), counts_B, full_B)
    rows_N = np.repeat(np.arange(len(counts_B)), counts_B)
    first_B = ends_B - counts_B
    within_N = np.arange(num_blocks) - np.repeat(first_B, counts_B)
    tokens_T = np.ascontiguousarray(tokens_T, np.int32)
    ids = _blocks_at(tokens_T, np.repeat(starts_B, counts_B) + within_N * block_size, block_size)
    rests = np.flatnonzero(has_rest_B)
    if len(rests):
        first_of_rest = starts_B[rests] + full_B[rests] * block_size
        ids[ends_B[rests] - 1] = _filled_up(tokens_T, first_of_rest, lengths_B[rests] % block_size, block_size)
    words = ids.astype(np.uint64) if block_size % 2 else ids.view(np.uint64)
    # Without the constant a block of zeros would add nothing, and would not tell its prefix from the one before it.
    terms_N = _mixed(words @ _factors(words.shape[1], seed=1) + np.uint64(_GOLDEN))
    terms_N *= np.take(_factors(max_blocks, seed=2), within_N)
    # One running sum over the whole batch, from which each prompt takes what stood before it: no loop over depths.
    sums_N1 = np.zeros(num_blocks + 1, np.uint64)
    np.cumsum(terms_N, out=sums_N1[1:])
    before_B = np.take(sums_N1, first_B)
    if seeds_B is not None:
        before_B -= seeds_B
    hashes_N = _mixed(sums_N1[1:] - np.repeat(before_B, counts_B))
    # 0 marks an empty place in a table.
    np.maximum(hashes_N, np.uint64(1), out=hashes_N)
    return Blocks(hashes_N, rows_N, within_N + 1, counts_B, full_B)


def _blocks_at(tokens_T: Int32, starts_N: Int64, block_size: int) -> Int32:
    """The ids from each start on, int32 [N, block size]; something else for a block that would reach beyond the end."""
    # A block is one item here, at every position of the array: taking items is several times faster than taking rows.
    items = tokens_T[:block_size].view(np.dtype((np.void, 4 * block_size)))
    last = len(tokens_T) - block_size
    windows = np.lib.stride_tricks.as_strided(items, (last + 1,), (4,), writeable=False)
    taken: Int32 = windows[np.minimum(starts_N, last)].view(np.int32).reshape(len(starts_N), block_size)
    return taken


def _filled_up(tokens_T: Int32, starts_M: Int64, lengths_M: Int64, block_size: int) -> Int32:
    """Rests of prompts as blocks, int32 [M, block size], filled up with -1, which is no id."""
    columns = np.arange(block_size)
    at = np.minimum(starts_M[:, None] + columns, len(tokens_T) - 1)
    return np.where(columns < lengths_M[:, None], np.take(tokens_T, at), np.int32(-1))


def steps(blocks: Blocks) -> Int64:
    """Which blocks of a batch are worth remembering, as positions int64 [M] in ascending order.

    The last full block of each prompt, its end, and the depths 1, 2, 3, 4, 6, 8, 12, 16, 24, ... from a quarter of it
    on: two thirds at least of what two prompts share are then known, with a handful of entries for each.
    """
    if len(blocks.hashes_N) == 0:
        return np.zeros(0, np.int64)
    counts_N = np.take(blocks.counts_B, blocks.rows_N)
    is_step_N = np.take(_step_table(int(blocks.counts_B.max())), blocks.depths_N)
    is_step_N &= blocks.depths_N * 4 >= counts_N
    # A full block in the end, for what the prompt may grow into; the end itself, for the prompt as a whole.
    is_step_N |= blocks.depths_N >= np.take(blocks.full_B, blocks.rows_N)
    return np.flatnonzero(is_step_N)


@functools.lru_cache(maxsize=64)
def _step_table(highest: int) -> Bool:
    table = np.zeros(highest + 1, bool)
    for power in range(highest.bit_length()):
        for depth in (1 << power, 3 << power):
            table[depth : depth + 1] = True
    return table


def _at(values_N: NDArray[Number], positions_B: Int64) -> NDArray[Number]:
    """The value at each position, 0 where it is -1."""
    if len(values_N) == 0:
        return np.zeros(len(positions_B), values_N.dtype)
    taken = np.take(values_N, positions_B)
    taken[positions_B < 0] = 0
    return taken


def deepest(blocks: Blocks, positions_M: Int64) -> Int64:
    """The deepest of some blocks for each prompt: int64 [B], positions in ``hashes_N``, -1 where there is none.

    Args:
        blocks: The batch.
        positions_M: int64 [M], in ascending order.
    """
    found_B = np.full(len(blocks.counts_B), -1, np.int64)
    # Of several values for one place the last is kept, and depths grow with positions.
    found_B[np.take(blocks.rows_N, positions_M)] = positions_M
    return found_B


def shared_in_batch(blocks: Blocks, positions_M: Int64) -> Int64:
    """The deepest block that each prompt shares with another one of the batch: int64 [B], or -1.

    Args:
        blocks: The batch.
        positions_M: int64 [M], the blocks that are compared, in ascending order.
    """
    hashes_M = blocks.hashes_N[positions_M]
    ordered = np.sort(hashes_M)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(twice) == 0:
        return np.full(len(blocks.counts_B), -1, np.int64)
    nearest_M = np.take(twice, np.searchsorted(twice, hashes_M), mode="clip")
    return deepest(blocks, positions_M[nearest_M == hashes_M])

"""Which replicas have computed which prefixes, as far as the driver has sent them there."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rl_vllm.service.compiled import compiled

Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]
UInt64 = NDArray[np.uint64]
UInt8 = NDArray[np.uint8]
Sets = NDArray[np.void]

# Replicas remembered per prefix: the latest ones. A prefix that more have needs no memory, it is nearly everywhere.
HOLDERS = 4
_WAYS = 4
# What is looked at for every hash lies in one cache line of 64 bytes, and the holders in the next: a table of many
# megabytes is as fast as the memory it waits for.
_SET = np.dtype(
    [
        ("hashes", np.uint64, _WAYS),
        # The number of the batch that used it last.
        ("used", np.int32, _WAYS),
        # Prompts that went on from it in a way that was not known.
        ("branches", np.int32, _WAYS),
        # Index + 1 of each replica, the latest last; 0 in front where there are fewer.
        ("holders", np.int32, (_WAYS, HOLDERS)),
    ]
)
_HIGHEST = 2**31 - 1
_TAG_SHIFT = np.uint64(56)


class PrefixTable:
    """A bounded table from a prefix's hash to the replicas that hold it, read and written for a whole batch at once.

    Hashes fall into sets of four places, and a new one takes the least recently used place of its set. What was taken
    to be known and is not costs one more prefill, nothing else.

    Args:
        capacity: Prefixes it holds, rounded up to a power of two; 33 bytes each.
    """

    def __init__(self, capacity: int) -> None:
        num_sets = 1 << max(0, (capacity - 1).bit_length() - (_WAYS.bit_length() - 1))
        # Zero is "nothing" everywhere, so that unused pages cost no memory.
        self._sets: Sets = np.zeros(num_sets, _SET)
        # A byte of each hash: small enough for a near cache, it tells nearly all that is unknown without the sets.
        self._tags_SW = np.zeros((num_sets, _WAYS), np.uint8)
        self._now = 0

    def __len__(self) -> int:
        return int(np.count_nonzero(self._sets["hashes"]))

    @property
    def capacity(self) -> int:
        return len(self._sets) * _WAYS

    def find(self, hashes_M: UInt64) -> Int64:
        """The place of each hash, int64 [M]; -1 when it is unknown."""
        return _find(self._sets, self._tags_SW, hashes_M)

    def look_up(
        self, hashes_N: UInt64, counts_B: Int64, position_of: Int64, *, min_share: float, max_branches: int
    ) -> tuple[Int64, Int64]:
        """The deepest known prefix of each prompt and who holds it; counts as a use of it.

        Args:
            hashes_N: uint64 [N], prefixes of all prompts, those of one prompt from the shortest to the longest.
            counts_B: int64 [B], how many of them each prompt has.
            position_of: int64, what stands for a replica in the result, by its index + 1; -1 for those that may not be
                chosen, 0 and what lies beyond included.
            min_share: The shortest prefix that counts, as a share of the longest.
            max_branches: Prompts that may go on from a prefix in different ways for each of its holders; with more, it
                is nobody's.

        Returns:
            Positions in ``hashes_N``, int64 [B], and of the holders, int64 [B, ``HOLDERS``]; -1 for none.
        """
        held_at_B, holders_BH, used_M, branched_M = _look_up(
            self._sets, self._tags_SW, hashes_N, counts_B, position_of, min_share, max_branches
        )
        # Only now: what a batch finds does not depend on the order of its prompts.
        self.count_branches(branched_M)
        self.touch(used_M)
        return held_at_B, holders_BH

    def holders(self, places_M: Int64) -> Int32:
        """Replicas that hold the prefix at each place, int32 [M, ``HOLDERS``], as index + 1; 0 stands for none."""
        holders_MH: Int32 = self._sets["holders"][np.divmod(places_M, _WAYS)]
        return holders_MH

    def branches(self, places_M: Int64) -> Int32:
        """Prompts that went on from each place in a way that was not known, int32 [M]."""
        branches_M: Int32 = self._sets["branches"][np.divmod(places_M, _WAYS)]
        return branches_M

    def count_branches(self, places_M: Int64) -> None:
        _count_branches(self._sets, places_M)

    def touch(self, places_M: Int64) -> None:
        """Mark as used just now."""
        _touch(self._sets, self._next_batch(), places_M)

    def learn(self, hashes_M: UInt64, indices_M: Int64) -> None:
        """Remember that each replica of ``indices_M`` holds the prefix beside it in ``hashes_M``."""
        _learn(self._sets, self._tags_SW, self._next_batch(), hashes_M, indices_M)

    def forget(self, index: int) -> None:
        """Remove a replica, and the prefixes that only it had."""
        _forget(self._sets, self._tags_SW, index + 1)

    def clear(self) -> None:
        self._sets.fill(0)
        self._tags_SW.fill(0)

    def _next_batch(self) -> int:
        if self._now == _HIGHEST:
            self._now = 0
            self._sets["used"] = 0
        self._now += 1
        return self._now


@compiled
def _set_of(sets_S: Sets, value: np.uint64) -> np.int64:
    return np.int64(value & np.uint64(len(sets_S) - 1))


@compiled
def _tag_of(value: np.uint64) -> np.int64:
    """The highest byte; sets are told by the lowest bits. A free place has 0, and so may a hash."""
    return np.int64(value >> _TAG_SHIFT)


@compiled
def _way_of(sets_S: Sets, tags_SW: UInt8, at: np.int64, value: np.uint64) -> int:
    """Where a hash is in its set ``at``, or -1."""
    tag = _tag_of(value)
    for way in range(_WAYS):
        if tags_SW[at, way] == tag and sets_S[at]["hashes"][way] == value:
            return way
    return -1


@compiled
def _place_of(sets_S: Sets, tags_SW: UInt8, value: np.uint64) -> np.int64:
    at = _set_of(sets_S, value)
    way = _way_of(sets_S, tags_SW, at, value)
    return at * _WAYS + way if way >= 0 else np.int64(-1)


@compiled
def _find(sets_S: Sets, tags_SW: UInt8, hashes_M: UInt64) -> Int64:
    places_M = np.empty(len(hashes_M), np.int64)
    for at, value in enumerate(hashes_M):
        places_M[at] = _place_of(sets_S, tags_SW, value)
    return places_M


@compiled
def _look_up(
    sets_S: Sets,
    tags_SW: UInt8,
    hashes_N: UInt64,
    counts_B: Int64,
    position_of: Int64,
    min_share: float,
    max_branches: int,
) -> tuple[Int64, Int64, Int64, Int64]:
    """The results of ``look_up``, the places that were used, and those of them that a prompt goes on from."""
    held_at_B, holders_BH = np.full(len(counts_B), -1), np.full((len(counts_B), HOLDERS), -1)
    used_M, branched_M = np.empty(len(counts_B), np.int64), np.empty(len(counts_B), np.int64)
    num_used = num_branched = stop = 0
    for row, count in enumerate(counts_B):
        start, stop = stop, stop + count
        at, place = stop, np.int64(-1)
        # Depths are counted from 1.
        while place < 0 and at > start and at - start >= min_share * count:
            at -= 1
            place = _place_of(sets_S, tags_SW, hashes_N[at])
        if place < 0:
            continue
        used_M[num_used] = place
        num_used += 1
        one, way = sets_S[place // _WAYS], place % _WAYS
        num_holders = 0
        for column in range(HOLDERS):
            code = one["holders"][way, column]
            if code < len(position_of) and position_of[code] >= 0:
                holders_BH[row, column] = position_of[code]
                num_holders += 1
        is_branch = at < stop - 1
        if is_branch:
            branched_M[num_branched] = place
            num_branched += 1
        if is_branch and one["branches"][way] >= max_branches * num_holders:
            holders_BH[row] = -1
        elif num_holders > 0:
            held_at_B[row] = at
    return held_at_B, holders_BH, used_M[:num_used], branched_M[:num_branched]


@compiled
def _count_branches(sets_S: Sets, places_M: Int64) -> None:
    for place in places_M:
        branches_W = sets_S[place // _WAYS]["branches"]
        branches_W[place % _WAYS] = min(branches_W[place % _WAYS] + 1, _HIGHEST)


@compiled
def _touch(sets_S: Sets, now: int, places_M: Int64) -> None:
    for place in places_M:
        sets_S[place // _WAYS]["used"][place % _WAYS] = now


@compiled
def _learn(sets_S: Sets, tags_SW: UInt8, now: int, hashes_M: UInt64, indices_M: Int64) -> None:
    for value, index in zip(hashes_M, indices_M):  # noqa: B905 (numba knows no strict zip)
        at = _set_of(sets_S, value)
        one, way = sets_S[at], _way_of(sets_S, tags_SW, at, value)
        if way < 0:
            way = _least_recently_used(one["used"])
            tags_SW[at, way] = _tag_of(value)
            one["hashes"][way] = value
            one["branches"][way] = 0
            one["holders"][way] = 0
        one["used"][way] = now
        _add_holder(one["holders"][way], index + 1)


@compiled
def _least_recently_used(used_W: Int32) -> int:
    oldest, lowest = 0, used_W[0]
    for way in range(1, _WAYS):
        # A choice of two values, not a jump: a wrong guess here would wait for memory.
        is_older = used_W[way] < lowest
        oldest, lowest = (way if is_older else oldest), min(used_W[way], lowest)
    return oldest


@compiled
def _add_holder(holders_H: Int32, code: int) -> None:
    for holder in holders_H:
        if holder == code:
            return
    for column in range(HOLDERS - 1):
        holders_H[column] = holders_H[column + 1]
    holders_H[HOLDERS - 1] = code


@compiled
def _forget(sets_S: Sets, tags_SW: UInt8, code: int) -> None:
    for at in range(len(sets_S)):
        for way in range(_WAYS):
            holders_H = sets_S[at]["holders"][way]
            for column in range(HOLDERS):
                if holders_H[column] == code:
                    for right in range(column, 0, -1):
                        holders_H[right] = holders_H[right - 1]
                    holders_H[0] = 0
            if holders_H[HOLDERS - 1] == 0:
                tags_SW[at, way] = 0
                sets_S[at]["hashes"][way] = 0
                sets_S[at]["used"][way] = 0
                sets_S[at]["branches"][way] = 0

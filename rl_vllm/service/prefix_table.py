"""Which replicas have computed which prefixes, as far as the driver has sent them there."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
UInt64 = NDArray[np.uint64]

# Replicas remembered per prefix: the latest ones. A prefix that more have needs no memory, it is nearly everywhere.
HOLDERS = 4
_WAYS = 4


class PrefixTable:
    """A bounded table from a prefix's hash to the replicas that hold it, read and written for a whole batch at once.

    Hashes fall into sets of four places, and a new one takes the least recently used place of its set. What was taken
    to be known and is not costs one more prefill, nothing else.

    Args:
        capacity: Prefixes it holds, rounded up to a power of two; 48 bytes each.
    """

    def __init__(self, capacity: int) -> None:
        num_sets = 1 << max(0, (capacity - 1).bit_length() - (_WAYS.bit_length() - 1))
        self._mask = np.uint64(num_sets - 1)
        # Zero is "nothing" everywhere (holders are stored as index + 1), so that unused pages cost no memory.
        self._hashes = np.zeros((num_sets, _WAYS), np.uint64)
        self._used = np.zeros((num_sets, _WAYS), np.int64)
        self._holders = np.zeros((num_sets * _WAYS, HOLDERS), np.int32)
        # The four holders of a place as one item: clearing items is several times faster than clearing rows.
        self._all_holders = self._holders.view(np.complex128).reshape(-1)
        self._turns = np.zeros(num_sets * _WAYS, np.int8)
        self._branches = np.zeros(num_sets * _WAYS, np.int32)
        self._now = 0

    def __len__(self) -> int:
        return int(np.count_nonzero(self._hashes))

    @property
    def capacity(self) -> int:
        return self._hashes.size

    def find(self, hashes_M: UInt64) -> Int64:
        """The place of each hash, int64 [M]; -1 when it is unknown."""
        return self._find(hashes_M, self._sets(hashes_M))

    def holders(self, places_M: Int64) -> NDArray[np.int32]:
        """Replicas that hold the prefix at each place, int32 [M, ``HOLDERS``], as index + 1; 0 stands for none."""
        return np.take(self._holders, places_M, axis=0)

    def branches(self, places_M: Int64) -> NDArray[np.int32]:
        """Prompts that went on from each place in a way that was not known, int32 [M]."""
        return np.take(self._branches, places_M)

    def count_branches(self, places_M: Int64) -> None:
        np.add.at(self._branches, places_M, 1)

    def touch(self, places_M: Int64) -> None:
        """Mark as used just now."""
        self._now += 1
        self._used.reshape(-1)[places_M] = self._now

    def learn(self, hashes_M: UInt64, indices_M: Int64) -> None:
        """Remember that each replica of ``indices_M`` holds the prefix beside it in ``hashes_M``."""
        places = self._places(hashes_M)
        # What found no place in a full set, or lost it to another of the same batch, is not remembered.
        is_kept = (places >= 0) & (np.take(self._hashes.reshape(-1), places) == hashes_M)
        places, codes = places[is_kept], (indices_M[is_kept] + 1).astype(np.int32)
        for _ in range(HOLDERS):
            is_held = _any_of_four(np.take(self._holders, places, axis=0) == codes[:, None])
            if is_held.all():
                return
            places, codes = places[~is_held], codes[~is_held]
            turns = self._turns[places]
            # Where several replicas want one place, one of them is written in each round.
            flat = places * HOLDERS + turns
            self._holders.reshape(-1)[flat] = codes
            self._turns[places] = (turns + 1) % HOLDERS
            is_lost = np.take(self._holders.reshape(-1), flat) != codes
            if not is_lost.any():
                return
            places, codes = places[is_lost], codes[is_lost]

    def forget(self, index: int) -> None:
        """Remove a replica, and the prefixes that only it had."""
        self._holders[self._holders == index + 1] = 0
        gone = ~self._holders.any(axis=1)
        self._hashes.reshape(-1)[gone] = 0
        self._used.reshape(-1)[gone] = 0
        self._turns[gone] = 0
        self._branches[gone] = 0

    def clear(self) -> None:
        for column in (self._hashes, self._used, self._holders, self._turns, self._branches):
            column.fill(0)

    def _sets(self, hashes_M: UInt64) -> Int64:
        return (hashes_M & self._mask).astype(np.int64)

    def _find(self, hashes_M: UInt64, sets_M: Int64) -> Int64:
        is_same = np.take(self._hashes, sets_M, axis=0) == hashes_M[:, None]
        hits = np.flatnonzero(_any_of_four(is_same))
        places_M = np.full(len(hashes_M), -1, np.int64)
        places_M[hits] = sets_M[hits] * _WAYS + is_same[hits].argmax(axis=1)
        return places_M

    def _places(self, hashes_M: UInt64) -> Int64:
        """A place for each hash: the one it has, or the least recently used one of its set; -1 when there is none."""
        sets_M = self._sets(hashes_M)
        places_M = self._find(hashes_M, sets_M)
        self.touch(places_M[places_M >= 0])
        flat_hashes, flat_used = self._hashes.reshape(-1), self._used.reshape(-1)
        for _ in range(_WAYS):
            missing = np.flatnonzero(places_M < 0)
            if len(missing) == 0:
                break
            sets = sets_M[missing]
            places = sets * _WAYS + _lowest_of_four(np.take(self._used, sets, axis=0))
            hashes = hashes_M[missing]
            # Two new hashes may want one place: the last one written has it, the others try again.
            flat_hashes[places] = hashes
            flat_used[places] = self._now
            self._all_holders[places] = 0
            self._turns[places] = 0
            self._branches[places] = 0
            places_M[missing] = np.where(flat_hashes[places] == hashes, places, -1)
        return places_M


def _any_of_four(flags_M4: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether any of each row's four flags is set, bool [M]; many times faster than ``any`` over so short an axis."""
    any_M: NDArray[np.bool_] = flags_M4.view(np.uint32).reshape(-1) != 0
    return any_M


def _lowest_of_four(values_M4: Int64) -> Int64:
    """Column of each row's lowest value, int64 [M], the first of equals; faster than ``argmin`` likewise."""
    first, second, third, fourth = values_M4.T
    right_of_first = second < first
    right_of_third = fourth < third
    is_last_pair = np.where(right_of_third, fourth, third) < np.where(right_of_first, second, first)
    return np.where(is_last_pair, 2 + right_of_third, right_of_first.astype(np.int64))

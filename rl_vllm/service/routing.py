"""Which replica answers which prompt: pure functions over counters kept by the driver.

Nothing here asks a replica anything or remembers anything. Axes: B prompts of one batch, R replicas that may be chosen,
H replicas known to hold a prefix.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

# Requests that a replica may have above its share before an affinity gives way: a batch so small costs nothing extra.
ALLOWED_REQUESTS = 2


class Cause(enum.IntEnum):
    """Why a prompt went where it went.

    ``PREFIX``: its prefix is there, or another prompt of the batch that shares it went there. ``SESSION``: its session
    is there. ``LOAD``: it had no affinity. ``MOVED``: it had one, to replicas too loaded for it to pay.
    """

    LOAD = 0
    PREFIX = 1
    SESSION = 2
    MOVED = 3


@dataclass(frozen=True, slots=True)
class Affinities:
    """What a batch has in common with earlier ones and within itself; row ``b`` of every column belongs together.

    Attributes:
        keys_B: uint64 [B], equal for prompts that belong together; 0 for a prompt that belongs to none.
        follows_B: bool [B], whether prompts of one key share more with each other than replicas hold of it.
        holders_BH: int64 [B, H], positions of the replicas that hold the prompt's prefix, -1 for none.
        held_B: float64 [B], tokens that need not be computed on those.
        shared_B: float64 [B], tokens that need not be computed where another prompt of the key went.
        sessions_B: int64 [B], position of the session's replica, -1 for none.
        session_saved_B: float64 [B], tokens that need not be computed there.
    """

    keys_B: NDArray[np.uint64]
    follows_B: NDArray[np.bool_]
    holders_BH: Int64
    held_B: Float64
    shared_B: Float64
    sessions_B: Int64
    session_saved_B: Float64


@dataclass(frozen=True, slots=True)
class Limits:
    """How loaded a replica may be, with the new prompt, for an affinity to it to hold.

    Attributes:
        share: The mean load of the replicas once the batch is assigned, in tokens.
        hard: The load beyond which no affinity holds: ``overload_threshold`` shares, and the allowance.
        allowance: Tokens above its share that are too few to give up anything for.
    """

    share: float
    hard: float
    allowance: float

    @classmethod
    def of(cls, loads_R: Int64, costs_B: Int64, *, overload_threshold: float) -> Limits:
        share = (float(loads_R.sum()) + float(costs_B.sum())) / len(loads_R)
        allowance = ALLOWED_REQUESTS * float(costs_B.mean()) if len(costs_B) else 0.0
        return cls(share=share, hard=overload_threshold * share + allowance, allowance=allowance)

    def worth(self, saved_B: Float64) -> Float64:
        """Highest load worth staying for, float64 [B], when staying saves computing ``saved_B`` tokens.

        A prompt moves when its replica is ahead of its share by more work than the move would cost.
        """
        return np.minimum(self.share + self.allowance + saved_B, self.hard)


class Chooser(Protocol):
    """Gives a replica to a prompt that has no affinity."""

    def take(self, cost: int) -> int:
        """The next replica, its load grown by ``cost``."""
        ...

    def take_each(self, costs: list[int]) -> list[int]:
        """As :meth:`take`, for one cost after the other."""
        ...


class LeastLoaded:
    """Gives the replica with the lowest load, again and again, while loads grow.

    Args:
        loads: Load of each of R replicas; may grow by other hands too.
        first: Replica to take first among equals; they are taken in turn from there.
    """

    def __init__(self, loads: list[int], *, first: int) -> None:
        self._loads = loads
        first %= len(loads)
        self._replicas: list[int] = [*range(first, len(loads)), *range(first)]
        self._heap: list[int] = []

    def _fresh_heap(self) -> list[int]:
        # One integer per replica, load above order: comparing it is faster than comparing a pair.
        loads, count = self._loads, len(self._loads)
        heap = [loads[replica] * count + order for order, replica in enumerate(self._replicas)]
        heapq.heapify(heap)
        return heap

    def take(self, cost: int) -> int:
        """The least loaded replica, its load grown by ``cost``; O(log R)."""
        loads, count = self._loads, len(self._loads)
        if not self._heap:
            self._heap = self._fresh_heap()
        heap = self._heap
        while True:
            entry = heap[0]
            order = entry % count
            replica = self._replicas[order]
            load = loads[replica]
            if load * count + order == entry:
                loads[replica] = load + cost
                heapq.heapreplace(heap, entry + cost * count)
                return replica
            # It has grown by another hand since it was put here.
            heapq.heapreplace(heap, load * count + order)

    def take_each(self, costs: list[int]) -> list[int]:
        """As :meth:`take`, for one cost after the other; a whole batch pays for one call."""
        count, loads, replicas, replace = len(self._loads), self._loads, self._replicas, heapq.heapreplace
        # Nobody else grows a load meanwhile: entries are put right once, and none is looked at twice.
        heap = self._heap = self._fresh_heap()
        orders = []
        for cost in costs:
            entry = heap[0]
            replace(heap, entry + cost * count)
            orders.append(entry % count)
        for order, cost in zip(orders, costs, strict=True):
            loads[replicas[order]] += cost
        return [replicas[order] for order in orders]


class Turns:
    """Gives the replicas in turn, whatever their load."""

    def __init__(self, loads: list[int], *, first: int) -> None:
        self._loads = loads
        self.next = first

    def take(self, cost: int) -> int:
        replica = self.next % len(self._loads)
        self.next += 1
        self._loads[replica] += cost
        return replica

    def take_each(self, costs: list[int]) -> list[int]:
        """As :meth:`take`, for one cost after the other."""
        return [self.take(cost) for cost in costs]


def place(
    found: Affinities, costs_B: Int64, loads: list[int], limits: Limits, chooser: Chooser, *, saved_weight: float
) -> tuple[Int64, Int64]:
    """Choose a replica for each prompt of a batch: its session's, one with its prefix, or the chooser's.

    Prompts of one key are placed one after the other, so that a group fills one replica before it takes the next; those
    that are bound come first, and those that are free even out what they leave.

    Args:
        found: What binds the prompts.
        costs_B: int64 [B], tokens each may cost.
        loads: Load of each replica, grown in place.
        limits: How loaded a replica may be for an affinity to hold.
        chooser: Places what has no affinity, over the same ``loads``.
        saved_weight: What a token saved is worth in units of load.

    Returns:
        Positions of the replicas, int64 [B], and :class:`Cause` numbers, int64 [B].
    """
    chosen_B = np.empty(len(costs_B), np.int64)
    causes_B = np.zeros(len(costs_B), np.int64)
    is_known_B = (found.sessions_B >= 0) | (found.holders_BH >= 0).any(axis=1)
    is_bound_B = is_known_B | (found.keys_B != 0)
    bound = np.flatnonzero(is_bound_B)
    if len(bound):
        order = bound[np.lexsort((found.keys_B[bound], ~is_known_B[bound]))]
        chosen_B[order], causes_B[order] = _place_bound(found, order, costs_B, loads, limits, chooser, saved_weight)
    free = np.flatnonzero(~is_bound_B)
    chosen_B[free] = chooser.take_each(costs_B[free].tolist())
    return chosen_B, causes_B


def _place_bound(
    found: Affinities,
    order: Int64,
    costs_B: Int64,
    loads: list[int],
    limits: Limits,
    chooser: Chooser,
    saved_weight: float,
) -> tuple[Int64, Int64]:
    """Place the rows of ``order`` one after the other; replicas and causes are in that order."""
    rooms = [
        (limits.worth(saved_B[order] * saved_weight) - costs_B[order]).tolist()
        for saved_B in (found.session_saved_B, found.shared_B, found.held_B)
    ]
    columns = (
        found.keys_B[order].tolist(),
        found.follows_B[order].tolist(),
        _only_holders(found.holders_BH[order]),
        found.sessions_B[order].tolist(),
        costs_B[order].tolist(),
        *rooms,
    )
    # Replica and cause in one number: a list grows by one entry for each prompt, not two.
    codes: list[int] = []
    # Plain numbers: members of an enumeration are several times slower in a loop and in numpy.
    for_load, for_prefix, for_session, for_moved = map(int, Cause)
    num_causes = len(Cause)
    last_key = 0
    target = -1
    for key, follows, holders, session, cost, session_room, shared_room, held_room in zip(*columns, strict=True):
        if key != last_key or key == 0:
            last_key, target = key, -1
        if session >= 0 and loads[session] <= session_room:
            target, cause = session, for_session
            loads[target] += cost
        elif follows and target >= 0 and loads[target] <= shared_room:
            cause = for_prefix
            loads[target] += cost
        else:
            for holder in holders:
                # Of equals the last: it learned the prefix last.
                if target < 0 or loads[holder] <= loads[target]:
                    target = holder
            if target >= 0 and loads[target] <= held_room:
                cause = for_prefix
                loads[target] += cost
            else:
                cause = for_load if target < 0 and session < 0 else for_moved
                target = chooser.take(cost)
        codes.append(target * num_causes + cause)
    chosen_M, causes_M = np.divmod(np.array(codes, np.int64), num_causes)
    return chosen_M, causes_M


def _only_holders(holders_MH: Int64) -> list[Sequence[int]]:
    """The holders in each row without the places that have none; most rows have one or none."""
    is_there_MH = holders_MH >= 0
    last_M = holders_MH.max(axis=1, initial=-1)
    ready: list[Sequence[int]] = [(), *((position,) for position in range(int(last_M.max(initial=-1)) + 1))]
    holders_M = [ready[last + 1] for last in last_M.tolist()]
    for row in np.flatnonzero(np.count_nonzero(is_there_MH, axis=1) > 1).tolist():
        holders_M[row] = holders_MH[row][is_there_MH[row]].tolist()
    return holders_M


def assign_least_outstanding(cost_B: Int64, load_R: Int64, *, first: int) -> Int64:
    """Give each prompt, in order, to the replica with the fewest outstanding tokens.

    Args:
        cost_B: int64 [B], tokens each prompt may still cost: its own and the longest response, for all samples.
        load_R: int64 [R], tokens outstanding on each serving replica; at least one replica.
        first: Replica to try first among equals; a caller that counts it up spreads ties over all of them.

    Returns:
        int64 [B], positions in ``load_R``. Cost O(B log R).
    """
    return np.array(LeastLoaded(load_R.tolist(), first=first).take_each(cost_B.tolist()), np.int64)


def kv_loads(kv_usage_R: Float64, tokens_R: Int64, sampled_tokens_R: Int64) -> Int64 | None:
    """KV use of each replica in tokens, with what was sent since it was sampled: int64 [R]; None when one is unknown.

    Args:
        kv_usage_R: float64 [R], sampled use in [0, 1], NaN when unknown.
        tokens_R: int64 [R], tokens outstanding now.
        sampled_tokens_R: int64 [R], tokens outstanding when the sample was taken.
    """
    if np.isnan(kv_usage_R).any():
        return None
    # How many outstanding tokens make a full cache is not known, but all replicas have the same one.
    used = float(kv_usage_R.sum())
    capacity = float(sampled_tokens_R.sum()) / used if used > 0 and sampled_tokens_R.any() else 1e6
    loads = kv_usage_R * capacity + (tokens_R - sampled_tokens_R)
    whole_R: Int64 = np.maximum(np.rint(loads), 0).astype(np.int64)
    return whole_R

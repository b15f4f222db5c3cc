"""Which replica answers which prompt: pure functions over counters kept by the driver.

Nothing here asks a replica anything or remembers anything. Axes: B prompts of one batch, R replicas that may be chosen,
H replicas known to hold a prefix.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rl_vllm.service.compiled import as_input, compiled
from rl_vllm.service.prefix_hash import Blocks

Int64 = NDArray[np.int64]
UInt64 = NDArray[np.uint64]
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


# Plain numbers for the loop: a member of an enumeration is not a number to the compiler.
_LOAD, _PREFIX, _SESSION, _MOVED = map(int, Cause)
_NUM_CAUSES = len(Cause)


class Affinities(NamedTuple):
    """What a batch has in common with earlier ones and within itself; row ``b`` of every column belongs together.

    Attributes:
        ranks_B: int64 [B], what is placed first: 0 for a prompt whose prefix or session is somewhere, 1 for one that
            has something in common with others of the batch, 2 for one that is free.
        keys_B: uint64 [B], equal for prompts that belong together; 0 for a prompt that belongs to none.
        follows_B: bool [B], whether prompts of one key share more with each other than replicas hold of it.
        holders_BH: int64 [B, H], positions of the replicas that hold the prompt's prefix, -1 for none.
        held_B: float64 [B], tokens that need not be computed on those; 0 where there are none.
        shared_B: float64 [B], tokens that need not be computed where another prompt of the key went.
        sessions_B: int64 [B], position of the session's replica, -1 for none.
        session_saved_B: float64 [B], tokens that need not be computed there if it is one of the holders.
    """

    ranks_B: Int64
    keys_B: UInt64
    follows_B: NDArray[np.bool_]
    holders_BH: Int64
    held_B: Float64
    shared_B: Float64
    sessions_B: Int64
    session_saved_B: Float64


@compiled
def affinities(
    blocks: Blocks,
    held_at_B: Int64,
    holders_BH: Int64,
    shared_at_B: Int64,
    sessions_B: Int64,
    session_keys_B: UInt64,
    lengths_B: Int64,
    block_size: int,
) -> Affinities:
    """Put together what is known of a batch.

    Args:
        blocks: The prefixes of the prompts.
        held_at_B: int64 [B], position in ``blocks`` of the deepest prefix that replicas hold, -1 for none.
        holders_BH: int64 [B, H], positions of those replicas, -1 for none.
        shared_at_B: int64 [B], position of the deepest prefix that another prompt of the batch has, -1 for none.
        sessions_B: int64 [B], position of the session's replica, -1 for none.
        session_keys_B: uint64 [B], what stands for a session that begins with several prompts at once; 0 for none.
        lengths_B: int64 [B], tokens of each prompt.
        block_size: Tokens per block.
    """
    keys_B, follows_B = session_keys_B.copy(), session_keys_B != 0
    held_B, shared_B = np.zeros(len(lengths_B)), np.zeros(len(lengths_B))
    session_saved_B = np.zeros(len(lengths_B))
    ranks_B = np.empty(len(lengths_B), np.int64)
    for row, full in enumerate(blocks.full_B):
        held_at, shared_at = held_at_B[row], shared_at_B[row]
        # Both are prefixes of one prompt: the later one is the deeper one. The last block of a prompt is not always
        # full, and what is not is not shared.
        if held_at >= 0:
            depth = blocks.depths_N[held_at]
            held_B[row] = min(depth, full) * block_size
            # What lies beyond the part that is looked at is taken to be there too: it is the session's own history.
            session_saved_B[row] = depth / blocks.counts_B[row] * lengths_B[row]
        if shared_at >= 0:
            shared_B[row] = min(blocks.depths_N[shared_at], full) * block_size
        if keys_B[row] == 0 and max(held_at, shared_at) >= 0:
            keys_B[row] = blocks.hashes_N[max(held_at, shared_at)]
            follows_B[row] = shared_at > held_at
        ranks_B[row] = 0 if held_at >= 0 or sessions_B[row] >= 0 else 1 if keys_B[row] != 0 else 2
    return Affinities(ranks_B, keys_B, follows_B, holders_BH, held_B, shared_B, sessions_B, session_saved_B)


class Limits(NamedTuple):
    """How loaded a replica may be, with the new prompt, for an affinity to it to hold.

    Attributes:
        overload_threshold: Shares beyond which, with the allowance, no affinity holds; a share is the mean load of the
            replicas once the batch is assigned.
        saved_weight: What a token that need not be computed is worth in units of load.
    """

    overload_threshold: float
    saved_weight: float


def place(
    found: Affinities, costs_B: Int64, loads_R: Int64, limits: Limits, *, first: int, in_turn: bool
) -> tuple[Int64, Int64]:
    """Choose a replica for each prompt of a batch: its session's, one with its prefix, or one chosen by load.

    Prompts of one key are placed one after the other, so that a group fills one replica before it takes the next; those
    that are bound come first, and those that are free even out what they leave.

    Args:
        found: What binds the prompts.
        costs_B: int64 [B], tokens each may cost.
        loads_R: int64 [R], load of each replica.
        limits: How loaded a replica may be for an affinity to hold.
        first: Replica to take first among equals, or in turn.
        in_turn: What has no affinity goes to the replicas in turn, not to the least loaded.

    Returns:
        Positions of the replicas, int64 [B], and how many prompts went there for each :class:`Cause`, int64 [4].
    """
    order_B = np.lexsort((found.keys_B, found.ranks_B))
    heap_R = _heap(loads_R, first)
    return _place(found, order_B, as_input(costs_B, np.int64), loads_R.copy(), heap_R, limits, first, int(in_turn))


@compiled
def _place(
    found: Affinities,
    order_B: Int64,
    costs_B: Int64,
    loads_R: Int64,
    heap_R: Int64,
    limits: Limits,
    first: int,
    in_turn: int,
) -> tuple[Int64, Int64]:
    """Place the prompts in order; ``loads_R`` and ``heap_R`` change."""
    chosen_B, counts_C = np.empty(len(order_B), np.int64), np.zeros(_NUM_CAUSES, np.int64)
    share = (loads_R.sum() + costs_B.sum()) / len(loads_R)
    allowance = ALLOWED_REQUESTS * costs_B.sum() / len(costs_B)
    hard = limits.overload_threshold * share + allowance
    num_taken = 0
    last_key = np.uint64(0)
    target = -1
    for row in order_B:
        key, session, cost = found.keys_B[row], found.sessions_B[row], costs_B[row]
        if key != last_key or key == 0:
            last_key, target = key, -1
        at_home = 0.0
        for holder in found.holders_BH[row]:
            if holder == session:
                at_home = found.session_saved_B[row]
        # A prompt moves when its replica is ahead of its share by more work than the move would cost.
        of_session = min(share + allowance + limits.saved_weight * at_home, hard) - cost
        of_shared = min(share + allowance + limits.saved_weight * found.shared_B[row], hard) - cost
        of_held = min(share + allowance + limits.saved_weight * found.held_B[row], hard) - cost
        if session >= 0 and loads_R[session] <= of_session:
            target, cause = session, _SESSION
        elif found.follows_B[row] and target >= 0 and loads_R[target] <= of_shared:
            cause = _PREFIX
        else:
            for holder in found.holders_BH[row]:
                # Of equals the last: it learned the prefix last.
                if holder >= 0 and (target < 0 or loads_R[holder] <= loads_R[target]):
                    target = holder
            if target >= 0 and loads_R[target] <= of_held:
                cause = _PREFIX
            else:
                cause = _LOAD if target < 0 and session < 0 else _MOVED
                target = (first + num_taken) % len(loads_R) if in_turn else _least_loaded(heap_R, loads_R, first)
                num_taken += 1
        loads_R[target] += cost
        chosen_B[row] = target
        counts_C[cause] += 1
    return chosen_B, counts_C


def _heap(loads_R: Int64, first: int) -> Int64:
    """One number per replica, its load above its place in the order of taking equals: sorted, hence a heap."""
    count = len(loads_R)
    heap_R: Int64 = np.sort(np.roll(loads_R, -first % count) * count + np.arange(count))
    return heap_R


@compiled
def _least_loaded(heap_R: Int64, loads_R: Int64, first: int) -> int:
    """The replica with the lowest load, of equals the next after ``first``; loads may have grown. O(log R)."""
    count = len(loads_R)
    while True:
        order = heap_R[0] % count
        replica: int = (first + order) % count
        entry = loads_R[replica] * count + order
        if entry == heap_R[0]:
            return replica
        # It has grown since it was put here.
        _replace_lowest(heap_R, entry)


@compiled
def _replace_lowest(heap_R: Int64, entry: int) -> None:
    at = 0
    while True:
        child = 2 * at + 1
        if child + 1 < len(heap_R) and heap_R[child + 1] < heap_R[child]:
            child += 1
        if child >= len(heap_R) or heap_R[child] >= entry:
            break
        heap_R[at] = heap_R[child]
        at = child
    heap_R[at] = entry


def assign_least_outstanding(cost_B: Int64, load_R: Int64, *, first: int) -> Int64:
    """Give each prompt, in order, to the replica with the fewest outstanding tokens.

    Args:
        cost_B: int64 [B], tokens each prompt may still cost: its own and the longest response, for all samples.
        load_R: int64 [R], tokens outstanding on each serving replica; at least one replica.
        first: Replica to try first among equals; a caller that counts it up spreads ties over all of them.

    Returns:
        int64 [B], positions in ``load_R``. Cost O(B log R).
    """
    return _assign_least_outstanding(as_input(cost_B, np.int64), load_R.copy(), _heap(load_R, first), first)


@compiled
def _assign_least_outstanding(costs_B: Int64, loads_R: Int64, heap_R: Int64, first: int) -> Int64:
    chosen_B = np.empty(len(costs_B), np.int64)
    for row, cost in enumerate(costs_B):
        replica = _least_loaded(heap_R, loads_R, first)
        loads_R[replica] += cost
        chosen_B[row] = replica
    return chosen_B


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

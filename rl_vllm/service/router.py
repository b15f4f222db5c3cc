"""Which replica answers which prompt: what is remembered from one batch to the next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl_vllm.config import RoutingConfig
from rl_vllm.service.prefix_hash import Blocks, deepest, hash_blocks, shared_in_batch, stable_hash, steps
from rl_vllm.service.prefix_table import PrefixTable
from rl_vllm.service.routing import (
    Affinities,
    Cause,
    LeastLoaded,
    Limits,
    Turns,
    assign_least_outstanding,
    kv_loads,
    place,
)
from rl_vllm.types import PromptBatch

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

# A prefix is followed when it is at least this part of what is looked at of a prompt. A chat template in front of a
# long question is not: each replica computes it once, while following it would bring every question to one cache.
MIN_SHARE = 0.5
# After so many different continuations a prefix is worth computing on one more replica, whatever the load: it is a
# system prompt, and one cache would have to keep all that follows it. A chat goes on in one or two ways only.
BRANCHES_PER_HOLDER = 8


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Columns over the R replicas that may be chosen, R >= 1, as the driver knows them.

    Attributes:
        indices_R: int64 [R], stable replica indices.
        requests_R: int64 [R], outstanding requests.
        tokens_R: int64 [R], outstanding tokens.
        kv_usage_R: float64 [R], sampled KV use in [0, 1]; NaN when unknown.
    """

    indices_R: Int64
    requests_R: Int64
    tokens_R: Int64
    kv_usage_R: Float64

    def __len__(self) -> int:
        return len(self.indices_R)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingStats:
    """What a router has decided since it was built, and what it remembers now.

    Attributes:
        prefix: Prompts that went where their prefix is, or where another of the batch with their prefix went.
        session: Prompts that went where their session is.
        load: Prompts without an affinity, that went where the load is lowest.
        moved: Prompts that had an affinity, to replicas too loaded for it to pay.
        turn: Prompts that were given out in turn.
        prefixes: Prefixes remembered now.
        sessions: Sessions remembered now.
        per_replica: ``(index, prompts it was given)`` in order of the index, for replicas that were not forgotten.
    """

    prefix: int = 0
    session: int = 0
    load: int = 0
    moved: int = 0
    turn: int = 0
    prefixes: int = 0
    sessions: int = 0
    per_replica: tuple[tuple[int, int], ...] = ()

    @property
    def decisions(self) -> int:
        """All prompts assigned."""
        return self.prefix + self.session + self.load + self.moved + self.turn


class Router:
    """Assigns whole batches to replicas; asks nobody, and is used by one thread at a time.

    Args:
        config: Strategies and bounds.
        block_size: Tokens per block of the engines' KV cache.
        saved_weight: What a token that need not be computed again is worth, in units of load; 0 when loads are not
            counted in tokens.
    """

    def __init__(self, config: RoutingConfig, *, block_size: int, saved_weight: float = 1.0) -> None:
        self._config = config
        self._block_size = block_size
        self._max_blocks = max(1, config.prefix_length // block_size)
        self._saved_weight = saved_weight
        self._table = PrefixTable(config.max_prefixes)
        # In order of use, the latest last.
        self._sessions: dict[str, int] = {}
        self._seeds: dict[str | None, int] = {None: 0}
        self._samples: dict[int, tuple[float, int]] = {}
        self._turn = 0
        self._causes = [0] * len(Cause)
        self._num_in_turn = 0
        self._per_replica: dict[int, int] = {}

    def assign(self, prompts: PromptBatch, rows: Sequence[int], costs_B: Int64, snapshot: Snapshot) -> Int64:
        """Choose a replica for each of some prompts, the whole batch in one pass.

        Args:
            prompts: The batch.
            rows: B rows of it.
            costs_B: int64 [B], tokens each may cost: its own, and the longest response of all its samples.
            snapshot: The replicas there are to choose from.

        Returns:
            int64 [B], positions in the snapshot.
        """
        if len(rows) == 0:
            return np.zeros(0, np.int64)
        is_affine, loads_R = self._rule(snapshot)
        if is_affine:
            chosen_B = self._by_affinity(prompts, np.asarray(rows, np.int64), costs_B, snapshot, loads_R)
        elif loads_R is None:
            chosen_B = (self._turn + np.arange(len(rows))) % len(snapshot)
            self._count(np.full(len(rows), Cause.LOAD), is_turn=True)
        else:
            chosen_B = assign_least_outstanding(costs_B, loads_R, first=self._turn)
            self._count(np.full(len(rows), Cause.LOAD), is_turn=False)
        counted_R = np.bincount(chosen_B, minlength=len(snapshot))
        given = np.flatnonzero(counted_R)
        for index, count in zip(snapshot.indices_R[given].tolist(), counted_R[given].tolist(), strict=True):
            self._per_replica[index] = self._per_replica.get(index, 0) + count
        return chosen_B

    def forget(self, index: int) -> None:
        """Drop all that is remembered of a replica, because it has left or lost its cache."""
        self._table.forget(index)
        self._sessions = {session: at for session, at in self._sessions.items() if at != index}
        self._samples.pop(index, None)
        self._per_replica.pop(index, None)

    def forget_prefixes(self) -> None:
        """Drop all prefixes, because every cache was reset. A session stays where it is while that costs nothing."""
        self._table.clear()

    @property
    def turn(self) -> int:
        """Prompts placed by load or in turn so far: whose turn it is, modulo the number of replicas."""
        return self._turn

    def stats(self) -> RoutingStats:
        return RoutingStats(
            prefix=self._causes[Cause.PREFIX],
            session=self._causes[Cause.SESSION],
            load=self._causes[Cause.LOAD],
            moved=self._causes[Cause.MOVED],
            turn=self._num_in_turn,
            prefixes=len(self._table),
            sessions=len(self._sessions),
            per_replica=tuple(sorted(self._per_replica.items())),
        )

    def _rule(self, snapshot: Snapshot) -> tuple[bool, Int64 | None]:
        """Whether affinities come first, and the loads that decide the rest; None when the turn decides it."""
        is_affine = False
        for name in self._config.strategy:
            if name == "prefix-aware":
                is_affine = True
            elif name == "requests":
                return is_affine, snapshot.tokens_R
            elif name == "round-robin":
                return is_affine, None
            else:
                loads_R = self._kv_loads(snapshot)
                if loads_R is not None:
                    return is_affine, loads_R
        return is_affine, snapshot.tokens_R

    def _kv_loads(self, snapshot: Snapshot) -> Int64 | None:
        """KV use in tokens, with what was sent since it was sampled; None when it is not known of every replica."""
        sampled = []
        columns = (snapshot.indices_R.tolist(), snapshot.kv_usage_R.tolist(), snapshot.tokens_R.tolist())
        for index, usage, tokens in zip(*columns, strict=True):
            if index not in self._samples or self._samples[index][0] != usage:
                self._samples[index] = (usage, tokens)
            sampled.append(self._samples[index][1])
        return kv_loads(snapshot.kv_usage_R, snapshot.tokens_R, np.array(sampled, np.int64))

    def _by_affinity(
        self, prompts: PromptBatch, rows_B: Int64, costs_B: Int64, snapshot: Snapshot, loads_R: Int64 | None
    ) -> Int64:
        # Indexed by replica index + 1, as the table holds them: 0 is nobody, as are replicas that may not be chosen.
        position_of = np.full(int(snapshot.indices_R.max()) + 2, -1, np.int64)
        position_of[snapshot.indices_R + 1] = np.arange(len(snapshot))
        blocks = self._blocks(prompts, rows_B)
        learned_M = steps(blocks)
        sessions = _sessions_of(prompts, rows_B)
        lengths_B = prompts.lengths_B[rows_B]
        found = self._affinities(blocks, learned_M, lengths_B, sessions, position_of)
        balanced_R = snapshot.tokens_R if loads_R is None else loads_R
        loads = balanced_R.tolist()
        chooser = Turns(loads, first=self._turn) if loads_R is None else LeastLoaded(loads, first=self._turn)
        limits = Limits.of(balanced_R, costs_B, overload_threshold=self._config.overload_threshold)
        chosen_B, causes_B = place(found, costs_B, loads, limits, chooser, saved_weight=self._saved_weight)
        self._count(causes_B, is_turn=loads_R is None)
        indices_B = snapshot.indices_R[chosen_B]
        hashes_M, rows_M = np.take(blocks.hashes_N, learned_M), np.take(blocks.rows_N, learned_M)
        self._table.learn(hashes_M, indices_B[rows_M])
        if sessions is not None:
            self._learn_sessions(sessions, indices_B.tolist())
        return chosen_B

    def _blocks(self, prompts: PromptBatch, rows_B: Int64) -> Blocks:
        seeds_B = None
        if prompts.loras is not None:
            names = [prompts.loras[row] for row in rows_B.tolist()]
            for name in set(names).difference(self._seeds):
                self._seeds[name] = stable_hash(name or "")
            seeds_B = np.array([self._seeds[name] for name in names], np.uint64)
        return hash_blocks(
            prompts.tokens_T,
            prompts.offsets_B1[rows_B],
            prompts.lengths_B[rows_B],
            block_size=self._block_size,
            max_blocks=self._max_blocks,
            seeds_B=seeds_B,
        )

    def _affinities(
        self,
        blocks: Blocks,
        learned_M: Int64,
        lengths_B: Int64,
        sessions: list[str | None] | None,
        position_of: Int64,
    ) -> Affinities:
        """What is known of a batch: from the table, from its own prompts, and from their sessions."""
        is_enough_N = blocks.depths_N >= np.take(np.ceil(MIN_SHARE * blocks.counts_B), blocks.rows_N)
        held_at_B, holders_BH = self._held(blocks, np.flatnonzero(is_enough_N), position_of)
        shared_at_B = shared_in_batch(blocks, learned_M[is_enough_N[learned_M]])
        held_B, shared_B = blocks.depths_at(held_at_B), blocks.depths_at(shared_at_B)
        follows_B = shared_B > held_B
        sessions_B = self._session_positions(sessions, position_of, len(lengths_B))
        keys_B = blocks.hashes_at(np.where(follows_B, shared_at_B, held_at_B))
        for row, key in _repeated_new(sessions, sessions_B).items():
            keys_B[row], follows_B[row] = key, True
        # What lies beyond the part that is looked at is taken to be there too: it is the session's own history.
        is_there_B = (holders_BH == sessions_B[:, None]).any(axis=1) & (sessions_B >= 0)
        return Affinities(
            keys_B=keys_B,
            follows_B=follows_B,
            holders_BH=holders_BH,
            held_B=np.minimum(held_B, blocks.full_B) * float(self._block_size),
            shared_B=np.minimum(shared_B, blocks.full_B) * float(self._block_size),
            sessions_B=sessions_B,
            session_saved_B=np.where(is_there_B, held_B / np.maximum(blocks.counts_B, 1) * lengths_B, 0.0),
        )

    def _held(self, blocks: Blocks, asked_M: Int64, position_of: Int64) -> tuple[Int64, Int64]:
        """The deepest known block of each prompt and its holders' positions, int64 [B] and [B, H]; -1 for none."""
        found_M = self._table.find(np.take(blocks.hashes_N, asked_M))
        hits = np.flatnonzero(found_M >= 0)
        held_at_B = deepest(blocks, asked_M[hits])
        places_B = np.full(len(held_at_B), -1, np.int64)
        is_known_B = held_at_B >= 0
        places_B[is_known_B] = found_M[np.searchsorted(asked_M, held_at_B[is_known_B])]
        # Replicas that may not be chosen are nobody here, those above the highest index included.
        codes_BH = self._table.holders(places_B)
        codes_BH[(places_B < 0)[:, None] | (codes_BH >= len(position_of))] = 0
        holders_BH = position_of[codes_BH]
        is_branch_B = is_known_B & (blocks.depths_at(held_at_B) < blocks.counts_B)
        is_common_B = is_branch_B & (
            self._table.branches(places_B) >= BRANCHES_PER_HOLDER * np.count_nonzero(codes_BH, axis=1)
        )
        self._table.count_branches(places_B[is_branch_B])
        self._table.touch(places_B[is_known_B])
        is_free_B = is_common_B | (holders_BH < 0).all(axis=1)
        held_at_B[is_free_B] = -1
        holders_BH[is_free_B] = -1
        return held_at_B, holders_BH

    def _session_positions(self, sessions: list[str | None] | None, position_of: Int64, count: int) -> Int64:
        if sessions is None:
            return np.full(count, -1, np.int64)
        known = self._sessions
        codes_B = np.array([-1 if session is None else known.get(session, -1) for session in sessions], np.int64) + 1
        codes_B[codes_B >= len(position_of)] = 0
        return position_of[codes_B]

    def _learn_sessions(self, sessions: list[str | None], indices: list[int]) -> None:
        known = self._sessions
        for session, index in zip(sessions, indices, strict=True):
            if session is not None:
                known.pop(session, None)
                known[session] = index
        for session in list(known)[: max(0, len(known) - self._config.max_sessions)]:
            del known[session]

    def _count(self, causes_B: Int64, *, is_turn: bool) -> None:
        counted = np.bincount(causes_B, minlength=len(Cause)).tolist()
        # Ties are broken by whose turn it is; only prompts placed by the chooser take one.
        self._turn += counted[Cause.LOAD] + counted[Cause.MOVED]
        if is_turn:
            self._num_in_turn += counted[Cause.LOAD]
            counted[Cause.LOAD] = 0
        for cause, count in enumerate(counted):
            self._causes[cause] += count


def _sessions_of(prompts: PromptBatch, rows_B: Int64) -> list[str | None] | None:
    if prompts.session_ids is None:
        return None
    return [prompts.session_ids[row] for row in rows_B.tolist()]


def _repeated_new(sessions: list[str | None] | None, sessions_B: Int64) -> dict[int, int]:
    """Rows of new sessions that have several prompts in the batch, each with a key that stands for its session."""
    if sessions is None:
        return {}
    new = [row for row in np.flatnonzero(sessions_B < 0).tolist() if sessions[row] is not None]
    counts = Counter(sessions[row] for row in new)
    if len(counts) == len(new):
        return {}
    return {row: stable_hash(f"session {sessions[row]}") for row in new if counts[sessions[row]] > 1}

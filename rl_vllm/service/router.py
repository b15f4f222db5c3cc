"""Which replica answers which prompt: what is remembered from one batch to the next."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl_vllm.config import RoutingConfig
from rl_vllm.service.prefix_hash import Blocks, at_blocks, hash_blocks, shared_in_batch, stable_hash, steps
from rl_vllm.service.prefix_table import PrefixTable
from rl_vllm.service.routing import (
    Affinities,
    Cause,
    Limits,
    affinities,
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


@dataclass(frozen=True, slots=True)
class _Named:
    """The S prompts of a batch that belong to sessions: their rows, ascending, and the session of each."""

    rows_S: Int64
    sessions: list[str]

    @classmethod
    def of(cls, prompts: PromptBatch, rows_B: Int64) -> _Named:
        if prompts.session_ids is None:
            return cls(np.zeros(0, np.int64), [])
        given = [prompts.session_ids[row] for row in rows_B.tolist()]
        return cls(
            rows_S=np.array([row for row, session in enumerate(given) if session is not None], np.int64),
            sessions=[session for session in given if session is not None],
        )

    def repeated(self, some: Int64) -> list[tuple[int, str]]:
        """Of the prompts at ``some``, those that share a session with another one of them: row and session."""
        sessions = [self.sessions[at] for at in some.tolist()]
        counts = Counter(sessions)
        rows = self.rows_S[some].tolist()
        return [(row, session) for row, session in zip(rows, sessions, strict=True) if counts[session] > 1]


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
        self._limits = Limits(float(config.overload_threshold), float(saved_weight))
        self._table = PrefixTable(config.max_prefixes)
        # In order of use, the latest last.
        self._sessions: dict[str, int] = {}
        self._seeds: dict[str | None, int] = {None: 0}
        self._samples: dict[int, tuple[float, int]] = {}
        self._turn = 0
        self._causes = [0] * len(Cause)
        self._num_in_turn = 0
        # By replica index, how many prompts each was given.
        self._given = np.zeros(0, np.int64)

    def assign(self, prompts: PromptBatch, rows: Sequence[int] | Int64, costs_B: Int64, snapshot: Snapshot) -> Int64:
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
            self._count([len(rows), 0, 0, 0], is_turn=True)
        else:
            chosen_B = assign_least_outstanding(costs_B, loads_R, first=self._turn)
            self._count([len(rows), 0, 0, 0], is_turn=False)
        missing = int(snapshot.indices_R.max()) + 1 - len(self._given)
        if missing > 0:
            self._given = np.append(self._given, np.zeros(missing, np.int64))
        self._given[snapshot.indices_R] += np.bincount(chosen_B, minlength=len(snapshot))
        return chosen_B

    def forget(self, index: int) -> None:
        """Drop all that is remembered of a replica, because it has left or lost its cache."""
        self._table.forget(index)
        self._sessions = {session: at for session, at in self._sessions.items() if at != index}
        self._samples.pop(index, None)
        self._given[index : index + 1] = 0

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
            per_replica=tuple((index, int(self._given[index])) for index in np.flatnonzero(self._given).tolist()),
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
        named = _Named.of(prompts, rows_B)
        found = self._affinities(blocks, learned_M, prompts.lengths_B[rows_B], named, position_of)
        balanced_R = snapshot.tokens_R if loads_R is None else loads_R
        chosen_B, counts_C = place(found, costs_B, balanced_R, self._limits, first=self._turn, in_turn=loads_R is None)
        self._count(counts_C.tolist(), is_turn=loads_R is None)
        indices_B = snapshot.indices_R[chosen_B]
        self._table.learn(*at_blocks(blocks, learned_M, indices_B))
        self._learn_sessions(named.sessions, indices_B[named.rows_S].tolist())
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
        self, blocks: Blocks, learned_M: Int64, lengths_B: Int64, named: _Named, position_of: Int64
    ) -> Affinities:
        """What is known of a batch: from the table, from its own prompts, and from their sessions."""
        held_at_B, holders_BH = self._table.look_up(
            blocks.hashes_N, blocks.counts_B, position_of, min_share=MIN_SHARE, max_branches=BRANCHES_PER_HOLDER
        )
        shared_at_B = shared_in_batch(blocks, learned_M, min_share=MIN_SHARE)
        sessions_B, session_keys_B = np.full(len(lengths_B), -1), np.zeros(len(lengths_B), np.uint64)
        if named.sessions:
            codes_S = np.array([self._sessions.get(session, -1) for session in named.sessions], np.int64) + 1
            codes_S[codes_S >= len(position_of)] = 0
            homes_S = position_of[codes_S]
            sessions_B[named.rows_S] = homes_S
            for row, session in named.repeated(np.flatnonzero(homes_S < 0)):
                session_keys_B[row] = stable_hash(f"session {session}")
        return affinities(
            blocks, held_at_B, holders_BH, shared_at_B, sessions_B, session_keys_B, lengths_B, self._block_size
        )

    def _learn_sessions(self, sessions: list[str], indices: list[int]) -> None:
        known = self._sessions
        for session, index in zip(sessions, indices, strict=True):
            known.pop(session, None)
            known[session] = index
        for session in list(itertools.islice(known, max(0, len(known) - self._config.max_sessions))):
            del known[session]

    def _count(self, counted: list[int], *, is_turn: bool) -> None:
        """Count the prompts of a batch, given for each cause."""
        # Ties are broken by whose turn it is; only prompts placed by the chooser take one.
        self._turn += counted[Cause.LOAD] + counted[Cause.MOVED]
        if is_turn:
            self._num_in_turn += counted[Cause.LOAD]
            counted[Cause.LOAD] = 0
        for cause, count in enumerate(counted):
            self._causes[cause] += count


@functools.cache
def warm_up() -> None:
    """Compile what routing runs, or load it from disk, so that no request waits for it; once in a process.

    May be called from any thread, beside routers at work: whoever comes second waits for what the first one compiles.
    """
    prompts = PromptBatch.from_rows([[1, 2], [1, 2]])
    none_R = np.zeros(1, np.int64)
    snapshot = Snapshot(none_R, none_R, none_R, np.zeros(1))
    for strategy in (("prefix-aware", "requests"), ("requests",)):
        router = Router(RoutingConfig(strategy=strategy, max_prefixes=4), block_size=2)
        router.assign(prompts, (0, 1), prompts.lengths_B, snapshot)
        router.forget(0)

"""The request table: what stands in it until its answer is accepted, exactly once.

Axes: S prompts of one call, U units of work (a prompt, or one sample of it), B units that were sent to one replica
together, N entries of a chunk that came back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from rl_vllm.protocols import Engine
from rl_vllm.service.prompts import row_seed
from rl_vllm.service.replicas import Replica
from rl_vllm.types import (
    CompletionBatch,
    EmbeddingBatch,
    EmbeddingRequest,
    FinishReason,
    PoolingConfig,
    PromptBatch,
    RequestBatch,
    RequestFailure,
    SamplingConfig,
    pack_rows,
)

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]
Chunk = TypeVar("Chunk", CompletionBatch, EmbeddingBatch)

_NONE: Int64 = np.zeros(0, np.int64)


@dataclass(slots=True, eq=False)
class Shipment:
    """Units that were sent to one engine together.

    Attributes:
        replica: Where they are.
        engine: The engine it had when they were sent.
        numbers_B: int64 [B], the numbers they were sent under, ascending. A unit that is sent again gets another:
            what its first engine may still say of it is then no answer any more.
        units_B: int64 [B], which units they are.
        pending_B: bool [B], not answered yet.
        costs_B: int64 [B], what each may cost, in tokens.
        task: Reads the answers.
    """

    replica: Replica
    engine: Engine
    numbers_B: Int64
    units_B: Int64
    pending_B: Bool
    costs_B: Int64
    task: asyncio.Task[None] | None = None

    def find(self, numbers: Int64) -> Int64:
        """Position of each number among those still waited for, or -1."""
        at = np.minimum(np.searchsorted(self.numbers_B, numbers), len(self.numbers_B) - 1)
        wanted = (self.numbers_B[at] == numbers) & self.pending_B[at]
        return np.where(wanted, at, -1)

    def acquire(self) -> None:
        """Count all of it as outstanding."""
        self.replica.acquire(int(self.costs_B.sum()), requests=len(self.units_B))

    def settle(self, at: Int64) -> Int64:
        """Wait no longer for what is at these positions, each named once; the units they are."""
        self.pending_B[at] = False
        self.replica.release(int(self.costs_B[at].sum()), requests=len(at))
        return self.units_B[at]

    @property
    def left(self) -> Int64:
        """Positions still waited for."""
        return np.flatnonzero(self.pending_B)


@dataclass(frozen=True, slots=True)
class Accepted(Generic[Chunk]):
    """What of a chunk was still waited for.

    Attributes:
        chunk: For the caller: rows in place of numbers.
        ended: int64, positions in the shipment that are answered now, each once.
        failed: int64, those of them that ended in a failure.
    """

    chunk: Chunk
    ended: Int64
    failed: Int64


class Work(Generic[Chunk]):
    """One kind of call: how it is split, sent, and read.

    Args:
        prompts: The batch.
        rows: Rows to answer.
        units_S: How many units each row is split into.
        costs_U: Tokens that each unit may cost.
    """

    def __init__(self, prompts: PromptBatch, rows: Sequence[int], units_S: Int64, costs_U: Int64) -> None:
        self.prompts = prompts
        self.slot_U = np.repeat(np.arange(len(rows)), units_S)
        self.rows_U = np.asarray(rows, np.int64)[self.slot_U]
        self.costs_U = costs_U
        self.first_unit_S1 = np.concatenate([[0], np.cumsum(units_S)])
        self._open_S = units_S.copy()
        # Every prompt is one unit, whose end is the prompt's.
        self._is_whole = len(self.slot_U) == len(rows)
        self._failed_S = np.zeros(len(rows), bool)

    @property
    def num_slots(self) -> int:
        """Prompts of the call."""
        return len(self._open_S)

    def open(self, engine: Engine, numbers: Int64, units: Int64) -> AsyncGenerator[Chunk, None]:
        """Send units to an engine."""
        raise NotImplementedError

    def accept(self, shipment: Shipment, chunk: Chunk) -> Accepted[Chunk]:
        """Keep what is still waited for, and turn numbers into rows."""
        raise NotImplementedError

    def fail(self, units: Int64, reason: str) -> Chunk:
        """A chunk that says these units failed."""
        raise NotImplementedError

    def end(self, units: Int64, finish: FinishReason) -> Chunk:
        """A chunk that ends these units without a further token."""
        raise NotImplementedError

    def complete(self, _units: Int64) -> Bool:
        """Which units have been delivered to the end already, though nobody said so; before they are sent again."""
        return np.zeros(len(_units), bool)

    def close(self, units: Int64, failed: Int64) -> tuple[int, int]:
        """Mark units as ended; how many prompts that completes, and how many of them have failed."""
        if self._is_whole:
            return len(units) - len(failed), len(failed)
        slots = self.slot_U[units]
        np.subtract.at(self._open_S, slots, 1)
        self._failed_S[self.slot_U[failed]] = True
        done = np.unique(slots[self._open_S[slots] == 0])
        num_failed = int(self._failed_S[done].sum())
        return len(done) - num_failed, num_failed

    def _failures(self, units: Int64, reasons: Sequence[str]) -> tuple[RequestFailure, ...]:
        """One failure per prompt, that has none yet."""
        failures: dict[int, str] = {}
        for unit, reason in zip(units.tolist(), reasons, strict=True):
            if not self._failed_S[self.slot_U[unit]]:
                failures.setdefault(int(self.rows_U[unit]), reason)
        return tuple(RequestFailure(row, reason) for row, reason in failures.items())

    def _read_failures(
        self, shipment: Shipment, failures: tuple[RequestFailure, ...]
    ) -> tuple[Int64, tuple[RequestFailure, ...]]:
        """Positions in the shipment that failed, and their failures by row."""
        if not failures:
            return _NONE, ()
        at = shipment.find(np.array([failure.number for failure in failures], np.int64))
        reasons = {int(p): f.reason for p, f in zip(at, failures, strict=True) if p >= 0}
        failed = np.array(list(reasons), np.int64)
        return failed, self._failures(shipment.units_B[failed], list(reasons.values()))


class Generate(Work[CompletionBatch]):
    """Whole completions: a unit is a prompt with all its samples."""

    def __init__(self, prompts: PromptBatch, rows: Sequence[int], sampling: Sequence[SamplingConfig]) -> None:
        responses = [setting.n * (setting.max_tokens or 0) for setting in sampling]
        costs = prompts.lengths_B[np.asarray(rows, np.int64)] + np.array(responses, np.int64)
        super().__init__(prompts, rows, np.ones(len(rows), np.int64), costs)
        self._sampling_U = sampling

    def open(self, engine: Engine, numbers: Int64, units: Int64) -> AsyncGenerator[CompletionBatch, None]:
        return engine.stream(
            RequestBatch(
                numbers_B=numbers,
                prompts=self.prompts.take(self.rows_U[units].tolist()),
                sampling_B=tuple(self._sampling_U[unit] for unit in units.tolist()),
            )
        )

    def accept(self, shipment: Shipment, chunk: CompletionBatch) -> Accepted[CompletionBatch]:
        at, chunk = _wanted(shipment, chunk)
        failed, failures = self._read_failures(shipment, chunk.failures)
        rows = self.rows_U[shipment.units_B[at]]
        return Accepted(replace(chunk, numbers_N=rows, failures=failures), _once(at, failed), failed)

    def fail(self, units: Int64, reason: str) -> CompletionBatch:
        return CompletionBatch.empty().with_failures(self._failures(units, [reason] * len(units)))

    def end(self, units: Int64, finish: FinishReason) -> CompletionBatch:
        counts = np.array([self._sampling_U[unit].n for unit in units.tolist()], np.int64)
        samples = [np.arange(count, dtype=np.int32) for count in counts]
        return _without_tokens(np.repeat(self.rows_U[units], counts), np.concatenate(samples), finish)


class Pieces(Work[CompletionBatch]):
    """New tokens as they are made: a unit is one sample, so that it can be continued alone.

    A unit whose replica leaves goes on from what was delivered: that follows its prompt, and is taken off its limits.
    Penalties and stop strings then see the delivered part as prompt.
    """

    def __init__(self, prompts: PromptBatch, rows: Sequence[int], sampling: Sequence[SamplingConfig]) -> None:
        counts = np.array([setting.n for setting in sampling], np.int64)
        lengths = np.repeat(prompts.lengths_B[np.asarray(rows, np.int64)], counts)
        limits = np.repeat(np.array([setting.max_tokens or 0 for setting in sampling], np.int64), counts)
        super().__init__(prompts, rows, counts, lengths + limits)
        self._sampling_S = sampling
        self._delivered: dict[int, list[Int32]] = {}

    def open(self, engine: Engine, numbers: Int64, units: Int64) -> AsyncGenerator[CompletionBatch, None]:
        return engine.stream_pieces(
            RequestBatch(
                numbers_B=numbers,
                prompts=self._prompts_of(units),
                sampling_B=tuple(self._setting_of(unit) for unit in units.tolist()),
            )
        )

    def accept(self, shipment: Shipment, chunk: CompletionBatch) -> Accepted[CompletionBatch]:
        at, chunk = _wanted(shipment, chunk)
        failed, failures = self._read_failures(shipment, chunk.failures)
        units = shipment.units_B[at]
        finished = chunk.finish_N != FinishReason.UNFINISHED
        for index, unit in enumerate(units.tolist()):
            if finished[index]:
                self._delivered.pop(unit, None)
            else:
                self._delivered.setdefault(unit, []).append(chunk.tokens(index))
        lengths = self.prompts.lengths_B[self.rows_U[units]].tolist()
        renamed = replace(
            chunk,
            numbers_N=self.rows_U[units],
            samples_N=self._samples_of(units),
            failures=failures,
            # A unit that was continued has part of its response in front of it.
            prompt_logprobs=None
            if chunk.prompt_logprobs is None
            else tuple(row[:length] for row, length in zip(chunk.prompt_logprobs, lengths, strict=True)),
        )
        return Accepted(renamed, _once(at[finished], failed), failed)

    def fail(self, units: Int64, reason: str) -> CompletionBatch:
        return CompletionBatch.empty().with_failures(self._failures(units, [reason] * len(units)))

    def end(self, units: Int64, finish: FinishReason) -> CompletionBatch:
        return _without_tokens(self.rows_U[units], self._samples_of(units), finish)

    def complete(self, units: Int64) -> Bool:
        limits = [self._sampling_S[slot].max_tokens for slot in self.slot_U[units].tolist()]
        made = [self._num_delivered(unit) for unit in units.tolist()]
        return np.array([limit is not None and num >= limit for num, limit in zip(made, limits, strict=True)], bool)

    def _samples_of(self, units: Int64) -> Int32:
        samples: Int32 = (units - self.first_unit_S1[self.slot_U[units]]).astype(np.int32)
        return samples

    def _num_delivered(self, unit: int) -> int:
        return sum(len(piece) for piece in self._delivered.get(unit, ()))

    def _prompts_of(self, units: Int64) -> PromptBatch:
        fresh = self.prompts.take(self.rows_U[units].tolist())
        if not self._delivered:
            return fresh
        rows = [
            np.concatenate([fresh.row(index), *self._delivered.get(unit, ())])
            for index, unit in enumerate(units.tolist())
        ]
        return PromptBatch(*pack_rows(rows), session_ids=fresh.session_ids, loras=fresh.loras)

    def _setting_of(self, unit: int) -> SamplingConfig:
        slot = int(self.slot_U[unit])
        sampling, sample = self._sampling_S[slot], unit - int(self.first_unit_S1[slot])
        made = self._num_delivered(unit)
        if sampling.n == 1 and not made:
            return sampling
        seed = sampling.seed
        if seed is not None:
            # As the engine does for n > 1; and the rest must not be drawn with the numbers that drew the beginning.
            seed = row_seed(seed + sample, made) if made else seed + sample
        limit = None if sampling.max_tokens is None else sampling.max_tokens - made
        return replace(sampling, n=1, seed=seed, max_tokens=limit, min_tokens=max(0, sampling.min_tokens - made))


class Embed(Work[EmbeddingBatch]):
    """Pooled vectors: a unit is a prompt."""

    def __init__(self, prompts: PromptBatch, rows: Sequence[int], pooling: PoolingConfig) -> None:
        super().__init__(prompts, rows, np.ones(len(rows), np.int64), prompts.lengths_B[np.asarray(rows, np.int64)])
        self._pooling = pooling

    def open(self, engine: Engine, numbers: Int64, units: Int64) -> AsyncGenerator[EmbeddingBatch, None]:
        return engine.embed(EmbeddingRequest(numbers, self.prompts.take(self.rows_U[units].tolist()), self._pooling))

    def accept(self, shipment: Shipment, chunk: EmbeddingBatch) -> Accepted[EmbeddingBatch]:
        at = shipment.find(chunk.numbers_N)
        kept = at >= 0
        at = at[kept]
        failed, failures = self._read_failures(shipment, chunk.failures)
        renamed = EmbeddingBatch(self.rows_U[shipment.units_B[at]], chunk.values_ND[kept], failures)
        return Accepted(renamed, _once(at, failed), failed)

    def fail(self, units: Int64, reason: str) -> EmbeddingBatch:
        nothing = np.zeros(0, np.int64), np.zeros((0, 0), np.float32)
        return EmbeddingBatch(*nothing, self._failures(units, [reason] * len(units)))

    def end(self, units: Int64, finish: FinishReason) -> EmbeddingBatch:
        """There is no half of a vector: the prompts fail."""
        return self.fail(units, f"it ended by {finish.label}")


def _once(at: Int64, failed: Int64) -> Int64:
    """Positions that were answered or failed, each once: the samples of a prompt share theirs."""
    if len(at) == 1 and not len(failed):
        return at
    return np.unique(np.concatenate([at, failed]))


def _wanted(shipment: Shipment, chunk: CompletionBatch) -> tuple[Int64, CompletionBatch]:
    """Positions in the shipment of a chunk's samples, and the chunk without those that nobody waits for."""
    at = shipment.find(chunk.numbers_N)
    wanted = at >= 0
    return (at, chunk) if wanted.all() else (at[wanted], chunk.take(np.flatnonzero(wanted)))


def _without_tokens(rows: Int64, samples: Int32, finish: FinishReason) -> CompletionBatch:
    count = len(rows)
    return replace(
        CompletionBatch.empty(),
        numbers_N=rows,
        samples_N=samples,
        offsets_N1=np.zeros(count + 1, np.int64),
        finish_N=np.full(count, finish, np.int8),
        stops_N=(None,) * count,
        cached_N=np.zeros(count, np.int32),
    )

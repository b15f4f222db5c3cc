"""Columns that cross the process boundary: prompts in, completions out.

Axes: B prompts of a batch, N completions (a prompt has ``n`` of them), T tokens of all rows laid end to end.

A batch of two prompts, ``[5, 6, 7]`` and ``[8]``, is ``tokens_T=[5, 6, 7, 8]``, ``offsets_B1=[0, 3, 4]``.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rl_vllm.types.sampling import SamplingConfig

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Item = TypeVar("Item")


class FinishReason(enum.IntEnum):
    """Why a response ended; the number is what travels in the columns.

    ``UNFINISHED`` stands in the pieces of a streamed response only, before its last one.
    """

    UNFINISHED = -1
    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    @property
    def label(self) -> str:
        """The word vLLM uses: ``stop``, ``length``, ``abort``, ``error``, ``repetition``."""
        return self.name.lower()

    @classmethod
    def from_label(cls, label: str) -> FinishReason:
        return cls[label.upper()]


def pack_rows(rows: Sequence[Sequence[int] | Int32 | Int64]) -> tuple[Int32, Int64]:
    """Lay ragged rows of token ids end to end.

    Returns:
        ``tokens_T`` int32 and ``offsets_B1`` int64, row ``b`` being ``tokens_T[offsets_B1[b]:offsets_B1[b + 1]]``.
    """
    lengths = [len(row) for row in rows]
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    tokens = np.empty(int(offsets[-1]), dtype=np.int32)
    for start, row in zip(offsets, rows, strict=False):
        tokens[start : start + len(row)] = row
    return tokens, offsets


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Ragged prompts of one batch, as token ids.

    Attributes:
        tokens_T: int32 [T].
        offsets_B1: int64 [B + 1].
        session_ids: One session id per prompt, or None; a router keeps a session on one replica.
        loras: Name of the adapter that answers each prompt, or None when there is none at all. A None within is the
            base model to an engine; to a service it is the adapter that requests without a name get, if there is one,
            and :data:`BASE_MODEL` names the base model.
    """

    tokens_T: Int32
    offsets_B1: Int64
    session_ids: tuple[str | None, ...] | None = None
    loras: tuple[str | None, ...] | None = None

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int] | Int32 | Int64]) -> PromptBatch:
        return cls(*pack_rows(rows))

    def __len__(self) -> int:
        return len(self.offsets_B1) - 1

    def row(self, index: int) -> Int32:
        """Token ids of one prompt, int32 [prompt length], a view."""
        return self.tokens_T[self.offsets_B1[index] : self.offsets_B1[index + 1]]

    @property
    def lengths_B(self) -> Int64:
        return np.diff(self.offsets_B1)

    def take(self, rows: Sequence[int]) -> PromptBatch:
        """The prompts at ``rows``, in that order, with their sessions and adapters."""
        return PromptBatch(
            *pack_rows([self.row(row) for row in rows]),
            session_ids=None if self.session_ids is None else tuple(self.session_ids[row] for row in rows),
            loras=None if self.loras is None else tuple(self.loras[row] for row in rows),
        )


@dataclass(frozen=True, slots=True)
class RequestBatch:
    """What one engine is asked to do: numbered prompts, each with its sampling settings.

    Attributes:
        numbers_B: int64 [B], unique in the life of the service; results and aborts name requests by them.
        prompts: The prompts, in the same order.
        sampling_B: One setting per prompt; rows may share one object.
    """

    numbers_B: Int64
    prompts: PromptBatch
    sampling_B: tuple[SamplingConfig, ...]

    def __len__(self) -> int:
        return len(self.numbers_B)


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """A request that got no completion, although its engine is well.

    Attributes:
        number: The request's number in the engine's results; the prompt's row in the service's results.
        reason: The engine's own words.
    """

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class WeightVersionSpan:
    """Response tokens ``[start, end)`` were sampled by weights labelled ``version``."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class CompletionBatch:
    """Finished samples as columns; row ``i`` of every column belongs together.

    Attributes:
        numbers_N: int64 [N], the request each sample answers (the prompt's row in the service's results).
        samples_N: int32 [N], 0 .. n - 1 within its request.
        offsets_N1: int64 [N + 1] into the token columns.
        tokens_T: int32 [T], response token ids.
        logprobs_T: float32 [T], nats, of the sampled tokens, in the service's ``logprobs_mode``.
        versions_T: int32 [T], the weight version that sampled each token.
        finish_N: int8 [N], :class:`FinishReason` numbers.
        stops_N: The stop string or id that ended the sample, None for EOS and for length.
        cached_N: int32 [N], prompt tokens whose KV came from the prefix cache.
        failures: Requests without an answer.
        top_logprobs: Per sample the engine's alternatives ``({id: logprob}, ...)``, only when asked for.
        prompt_logprobs: Per sample its prompt tokens' logprobs, float32 [prompt length], NaN where unknown
            (the first token always), only when asked for.
        seconds_N: float32 [N], from the call to the sample's arrival at the driver; None where nobody measured it.
    """

    numbers_N: Int64
    samples_N: Int32
    offsets_N1: Int64
    tokens_T: Int32
    logprobs_T: Float32
    versions_T: Int32
    finish_N: NDArray[np.int8]
    stops_N: tuple[str | int | None, ...]
    cached_N: Int32
    failures: tuple[RequestFailure, ...] = ()
    top_logprobs: tuple[tuple[dict[int, float], ...], ...] | None = None
    prompt_logprobs: tuple[Float32, ...] | None = None
    seconds_N: Float32 | None = None

    def __len__(self) -> int:
        return len(self.numbers_N)

    @property
    def lengths_N(self) -> Int64:
        return np.diff(self.offsets_N1)

    def tokens(self, index: int) -> Int32:
        return self.tokens_T[self.offsets_N1[index] : self.offsets_N1[index + 1]]

    def logprobs(self, index: int) -> Float32:
        return self.logprobs_T[self.offsets_N1[index] : self.offsets_N1[index + 1]]

    def versions(self, index: int) -> Int32:
        return self.versions_T[self.offsets_N1[index] : self.offsets_N1[index + 1]]

    def spans(self, index: int) -> tuple[WeightVersionSpan, ...]:
        """Runs of equal version over one response, in order."""
        versions = self.versions(index)
        if len(versions) == 0:
            return ()
        starts = np.concatenate([[0], np.flatnonzero(np.diff(versions)) + 1])
        ends = np.append(starts[1:], len(versions))
        return tuple(
            WeightVersionSpan(int(versions[start]), int(start), int(end))
            for start, end in zip(starts, ends, strict=True)
        )

    def with_failures(self, failures: Iterable[RequestFailure]) -> CompletionBatch:
        """The same samples with other failures."""
        return replace(self, failures=tuple(failures))

    def arrived(self, seconds: float) -> CompletionBatch:
        """The same samples, all of which came ``seconds`` after the call."""
        return replace(self, seconds_N=np.full(len(self), seconds, np.float32))

    def filled(self, *, top_logprobs: bool, prompt_lengths_B: Int64 | None) -> CompletionBatch:
        """The same samples with optional columns that others of their batch asked for.

        Args:
            top_logprobs: Give samples that have none ``()``.
            prompt_lengths_B: int64 [B], lengths of the prompts that ``numbers_N`` names: samples that have none get
                NaN, float32 [prompt length]. None adds no column.
        """
        top, prompt = self.top_logprobs, self.prompt_logprobs
        if top is None and top_logprobs:
            top = ((),) * len(self)
        if prompt is None and prompt_lengths_B is not None:
            lengths = prompt_lengths_B[self.numbers_N].tolist()
            prompt = tuple(np.full(length, np.nan, np.float32) for length in lengths)
        return replace(self, top_logprobs=top, prompt_logprobs=prompt)

    @classmethod
    def empty(cls) -> CompletionBatch:
        return cls(
            numbers_N=np.zeros(0, np.int64),
            samples_N=np.zeros(0, np.int32),
            offsets_N1=np.zeros(1, np.int64),
            tokens_T=np.zeros(0, np.int32),
            logprobs_T=np.zeros(0, np.float32),
            versions_T=np.zeros(0, np.int32),
            finish_N=np.zeros(0, np.int8),
            stops_N=(),
            cached_N=np.zeros(0, np.int32),
        )

    @classmethod
    def concatenate(cls, chunks: Iterable[CompletionBatch]) -> CompletionBatch:
        """Join chunks row after row, in the order given."""
        parts = list(chunks)
        if not parts:
            return cls.empty()
        lengths = np.concatenate([part.lengths_N for part in parts])
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        filled = [part for part in parts if len(part)]
        return cls(
            numbers_N=np.concatenate([part.numbers_N for part in parts]),
            samples_N=np.concatenate([part.samples_N for part in parts]),
            offsets_N1=offsets,
            tokens_T=np.concatenate([part.tokens_T for part in parts]),
            logprobs_T=np.concatenate([part.logprobs_T for part in parts]),
            versions_T=np.concatenate([part.versions_T for part in parts]),
            finish_N=np.concatenate([part.finish_N for part in parts]),
            stops_N=tuple(stop for part in parts for stop in part.stops_N),
            cached_N=np.concatenate([part.cached_N for part in parts]),
            failures=tuple(failure for part in parts for failure in part.failures),
            top_logprobs=_join_optional([part.top_logprobs for part in filled]),
            prompt_logprobs=_join_optional([part.prompt_logprobs for part in filled]),
            seconds_N=_join_seconds([part.seconds_N for part in filled]),
        )

    def sorted_rows(self) -> CompletionBatch:
        """The same samples ordered by request, then by sample index."""
        return self.take(np.lexsort((self.samples_N, self.numbers_N)))

    def take(self, order_M: NDArray[np.intp]) -> CompletionBatch:
        """The samples at ``order_M``, in that order; failures are kept."""
        lengths = self.lengths_N[order_M]
        offsets = np.zeros(len(order_M) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        # Position of every kept token in the old columns: its row's old start plus its place in the row.
        source = np.repeat(self.offsets_N1[order_M] - offsets[:-1], lengths) + np.arange(offsets[-1])
        return CompletionBatch(
            numbers_N=self.numbers_N[order_M],
            samples_N=self.samples_N[order_M],
            offsets_N1=offsets,
            tokens_T=self.tokens_T[source],
            logprobs_T=self.logprobs_T[source],
            versions_T=self.versions_T[source],
            finish_N=self.finish_N[order_M],
            stops_N=tuple(self.stops_N[i] for i in order_M),
            cached_N=self.cached_N[order_M],
            failures=self.failures,
            top_logprobs=None if self.top_logprobs is None else tuple(self.top_logprobs[i] for i in order_M),
            prompt_logprobs=None if self.prompt_logprobs is None else tuple(self.prompt_logprobs[i] for i in order_M),
            seconds_N=None if self.seconds_N is None else self.seconds_N[order_M],
        )


def _join_optional(columns: list[tuple[Item, ...] | None]) -> tuple[Item, ...] | None:
    """Join optional columns; None when no part has them. Parts of one batch either all have a column or none does."""
    present = [column for column in columns if column is not None]
    if not present:
        return None
    return tuple(item for column in present for item in column)


def _join_seconds(columns: list[Float32 | None]) -> Float32 | None:
    """Join arrival times; None when a part has none."""
    present = [column for column in columns if column is not None]
    return np.concatenate(present) if present and len(present) == len(columns) else None

"""What the fakes answer, and how they take new weights: one set of stated rules for the engine and the service."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from rl_vllm.errors import RefitError
from rl_vllm.types import (
    CommitReport,
    CompletionBatch,
    FinishReason,
    KVCache,
    ModelInfo,
    RequestFailure,
    SamplingConfig,
    WeightUpdate,
    pack_rows,
)

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]

FAKE_MODEL = ModelInfo(
    model="fake",
    tokenizer=None,
    vocab_size=64,
    max_model_len=64,
    eos_token_ids=(2,),
    pad_token_id=0,
    dtype="float32",
    logprobs_mode="processed_logprobs",
)
FIRST_PLAIN_ID = 3
SLOWEST_STOP = 8


@dataclass(frozen=True, slots=True)
class FakeRequest:
    """One sample to answer: what a response function sees.

    Attributes:
        row: Position of the prompt in its batch.
        sample: 0 .. n - 1.
        prompt_T: int32 [T], the prompt's ids.
        limit: Longest response the context and ``max_tokens`` leave.
        sampling: The call's settings, with its seed.
        info: The model.
        lora: Name of the adapter, or None.
    """

    row: int
    sample: int
    prompt_T: Int32
    limit: int
    sampling: SamplingConfig
    info: ModelInfo
    lora: str | None = None


def stated_response(request: FakeRequest) -> Sequence[int]:
    """Plain ids that count up from a start, closed by EOS.

    With ``key = sum(prompt) + 5 * sample + 11 * seed + 17 * len(adapter's name)`` (seed 0 when None), token ``t`` is
    ``3 + (key + t) % (vocab_size - 3)``. The response has ``1 + key % 8`` tokens, at least ``min_tokens``, the last
    one EOS; a longer one than the limit, or any with ``ignore_eos``, is filled up to the limit without EOS.
    """
    key = int(request.prompt_T.sum()) + 5 * request.sample + 11 * (request.sampling.seed or 0)
    key += 17 * len(request.lora or "")
    span = request.info.vocab_size - FIRST_PLAIN_ID
    length = max(1 + key % SLOWEST_STOP, request.sampling.min_tokens)
    stops = length <= request.limit and not request.sampling.ignore_eos
    if not stops:
        length = request.limit
    ids = [FIRST_PLAIN_ID + (key + position) % span for position in range(length)]
    if stops:
        ids[-1] = request.info.eos_token_ids[0]
    return ids


def stated_logprobs(_prompt_T: Int32, response_T: Int32) -> Float32:
    """``-(1 + id % 7) / 8`` for each response id, whatever the prompt: exact in float32, never 0."""
    return (-(1 + response_T % 7) / 8).astype(np.float32)


def stated_prompt_logprobs(prompt_T: Int32, _version: int, _replica: int) -> Float32:
    """As :func:`stated_logprobs`, whatever the version and the replica."""
    return stated_logprobs(prompt_T[:0], prompt_T)


def stated_seconds(rows_N: NDArray[np.int64]) -> Float32:
    """``(1 + row) / 8`` for each sample: exact in float32."""
    return ((1 + rows_N) / 8).astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeScript:
    """What the fake does beyond the default; every field changes one thing.

    Attributes:
        respond: Ids of one response; cut at the limit.
        score: Logprobs of a response after its prompt, float32 [response length].
        score_prompt: Logprobs of a prompt's ids, float32 [prompt length], from the ids, the version being served and
            the replica (0 when the caller names none); the first one is replaced by NaN.
        finish: Forced finish reason per row.
        stops: Stop string or id per row; such a row ends with ``STOP``.
        failures: Reason per row that gets no completion.
        order: Rows in the order in which ``stream_batch`` yields them; those it does not name follow in theirs.
        before: Awaited by ``stream_batch`` before it yields anything of a row.
        next_version: ``(token, version)``: response tokens from this position on carry this version.
        stage_error: Raised by ``stage_weights``.
        commit_error: Raised by ``commit_weights``.
        columns: Returned by every ``generate_batch`` as is, for measurements.
    """

    respond: Callable[[FakeRequest], Sequence[int]] = stated_response
    score: Callable[[Int32, Int32], Float32] = stated_logprobs
    score_prompt: Callable[[Int32, int, int], Float32] = stated_prompt_logprobs
    finish: Mapping[int, FinishReason] = field(default_factory=dict)
    stops: Mapping[int, str | int] = field(default_factory=dict)
    failures: Mapping[int, str] = field(default_factory=dict)
    order: Sequence[int] = ()
    before: Callable[[int], Awaitable[None]] | None = None
    next_version: tuple[int, int] | None = None
    stage_error: Exception | None = None
    commit_error: Exception | None = None
    columns: CompletionBatch | None = None


def requests_of(
    row: int, prompt_T: Int32, sampling: SamplingConfig, info: ModelInfo, *, lora: str | None = None
) -> list[FakeRequest]:
    """The ``n`` samples of one prompt, each with the longest response that context and ``max_tokens`` leave."""
    room = info.max_model_len - len(prompt_T)
    limit = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    return [FakeRequest(row, sample, prompt_T, limit, sampling, info, lora) for sample in range(sampling.n)]


def answer(
    requests: Sequence[FakeRequest],
    script: FakeScript,
    version: int,
    failures: Mapping[int, str],
    *,
    replica: int = 0,
) -> CompletionBatch:
    """Columns of all requests, in their order; half of each prompt's tokens count as cached.

    Args:
        requests: What to answer.
        script: How.
        version: The label of tokens that the script gives no other.
        failures: Reason per row without an answer.
        replica: Who answers.
    """
    responses = [np.asarray(script.respond(request), dtype=np.int32)[: request.limit] for request in requests]
    tokens, offsets = pack_rows(responses)
    scores = [script.score(request.prompt_T, ids) for request, ids in zip(requests, responses, strict=True)]
    ends = [_end(request, ids, script) for request, ids in zip(requests, responses, strict=True)]
    return CompletionBatch(
        numbers_N=np.array([request.row for request in requests], dtype=np.int64),
        samples_N=np.array([request.sample for request in requests], dtype=np.int32),
        offsets_N1=offsets,
        tokens_T=tokens,
        logprobs_T=np.concatenate([*scores, np.zeros(0)]).astype(np.float32),
        versions_T=_versions(offsets, version, script),
        finish_N=np.array([finish for finish, _ in ends], dtype=np.int8),
        stops_N=tuple(stop for _, stop in ends),
        cached_N=np.array([len(request.prompt_T) // 2 for request in requests], dtype=np.int32),
        failures=tuple(RequestFailure(row, reason) for row, reason in sorted(failures.items())),
        top_logprobs=_top_logprobs(requests, responses, scores),
        prompt_logprobs=_prompt_logprobs(requests, script, version, replica),
    )


def pieces(whole: CompletionBatch) -> Iterator[CompletionBatch]:
    """A finished batch as it would have streamed: one token of every sample at a time, the last with its finish."""
    longest = int(whole.lengths_N.max(initial=0))
    for position in range(max(longest, 1)):
        lengths = whole.lengths_N
        kept = np.flatnonzero((lengths > position) | ((lengths == 0) & (position == 0)))
        part = whole.take(kept)
        starts = part.offsets_N1[:-1] + position
        full = part.lengths_N > 0
        ends = np.where(part.lengths_N > position + 1, FinishReason.UNFINISHED, part.finish_N).astype(np.int8)
        yield replace(
            part,
            offsets_N1=np.concatenate([[0], np.cumsum(full)]).astype(np.int64),
            tokens_T=part.tokens_T[starts[full]],
            logprobs_T=part.logprobs_T[starts[full]],
            versions_T=part.versions_T[starts[full]],
            finish_N=ends,
            stops_N=tuple(s if e != FinishReason.UNFINISHED else None for s, e in zip(part.stops_N, ends, strict=True)),
            top_logprobs=None
            if part.top_logprobs is None
            else tuple(t[position : position + 1] for t in part.top_logprobs),
            prompt_logprobs=part.prompt_logprobs if position == 0 else None,
        )


class FakeWeights:
    """The version being served and the updates on their way: what a fake does in place of loading."""

    def __init__(self) -> None:
        self.version = 0
        self._staged: list[WeightUpdate] = []

    def stage(self, update: WeightUpdate) -> None:
        """Remember an update.

        Raises:
            RefitError: Its version is not above the one being served.
        """
        if update.version <= self.version:
            raise RefitError(update.version, "stage", (), f"version {self.version} is being served already")
        self._staged.append(update)

    def require_staged(self, update: WeightUpdate) -> None:
        """Raise :class:`RefitError` unless this very update was staged."""
        if update not in self._staged:
            raise RefitError(update.version, "commit", (), "this update was not staged")

    def commit(self, update: WeightUpdate, kv: KVCache) -> CommitReport:
        """Serve a staged update; the checksum reported is the update's own when it has one."""
        self.require_staged(update)
        self.version = update.version
        return CommitReport(
            version=update.version,
            stall_s=0.0,
            checksum=update.checksum or f"fake-{update.version}",
            prefix_cache_reset=kv is KVCache.RECOMPUTE,
        )


def _end(request: FakeRequest, ids: Int32, script: FakeScript) -> tuple[FinishReason, str | int | None]:
    stop = script.stops.get(request.row)
    ended = stop is not None or (len(ids) > 0 and int(ids[-1]) in request.info.eos_token_ids)
    finish = FinishReason.STOP if ended else FinishReason.LENGTH
    return script.finish.get(request.row, finish), stop


def _versions(offsets_N1: NDArray[np.int64], version: int, script: FakeScript) -> Int32:
    versions = np.full(int(offsets_N1[-1]), version, dtype=np.int32)
    if script.next_version is not None:
        token, later = script.next_version
        positions = np.arange(len(versions)) - np.repeat(offsets_N1[:-1], np.diff(offsets_N1))
        versions[positions >= token] = later
    return versions


def _prompt_logprobs(
    requests: Sequence[FakeRequest], script: FakeScript, version: int, replica: int
) -> tuple[Float32, ...] | None:
    """The stated logprob of every prompt id but the first, which is NaN; None when nobody asked."""
    if all(request.sampling.prompt_logprobs is None for request in requests):
        return None
    rows = []
    for request in requests:
        values = script.score_prompt(request.prompt_T, version, replica).astype(np.float32)
        values[: None if request.sampling.prompt_logprobs is None else 1] = np.nan
        rows.append(values)
    return tuple(rows)


def _top_logprobs(
    requests: Sequence[FakeRequest], responses: Sequence[Int32], scores: Sequence[Float32]
) -> tuple[tuple[dict[int, float], ...], ...] | None:
    """The sampled token alone, for samples that asked; None when nobody did."""
    if not any(request.sampling.logprobs for request in requests):
        return None
    return tuple(
        tuple({int(token): float(score)} for token, score in zip(ids, row, strict=True))
        if request.sampling.logprobs
        else ()
        for request, ids, row in zip(requests, responses, scores, strict=True)
    )

"""A generation service without an engine: every answer is a stated function of the prompt, the sample and the seed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rl_vllm.errors import BadPromptError, GenerationError, RefitError
from rl_vllm.types import (
    BadPrompt,
    CommitReport,
    CompletionBatch,
    FinishReason,
    InFlight,
    KVCache,
    ModelInfo,
    PromptBatch,
    RequestFailure,
    SamplingConfig,
    TensorSpec,
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
    """

    row: int
    sample: int
    prompt_T: Int32
    limit: int
    sampling: SamplingConfig
    info: ModelInfo


def stated_response(request: FakeRequest) -> Sequence[int]:
    """Plain ids that count up from a start, closed by EOS.

    With ``key = sum(prompt) + 5 * sample + 11 * seed`` (seed 0 when None), token ``t`` is
    ``3 + (key + t) % (vocab_size - 3)``. The response has ``1 + key % 8`` tokens, at least ``min_tokens``, the last
    one EOS; a longer one than the limit, or any with ``ignore_eos``, is filled up to the limit without EOS.
    """
    key = int(request.prompt_T.sum()) + 5 * request.sample + 11 * (request.sampling.seed or 0)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeScript:
    """What the fake does beyond the default; every field changes one thing.

    Attributes:
        respond: Ids of one response; cut at the limit.
        score: Logprobs of a response after its prompt, float32 [response length].
        finish: Forced finish reason per row.
        stops: Stop string or id per row; such a row ends with ``STOP``.
        failures: Reason per row that gets no completion.
        next_version: ``(token, version)``: response tokens from this position on carry this version.
        stage_error: Raised by ``stage_weights``.
        commit_error: Raised by ``commit_weights``.
        columns: Returned by every ``generate_batch`` as is, for measurements.
    """

    respond: Callable[[FakeRequest], Sequence[int]] = stated_response
    score: Callable[[Int32, Int32], Float32] = stated_logprobs
    finish: Mapping[int, FinishReason] = field(default_factory=dict)
    stops: Mapping[int, str | int] = field(default_factory=dict)
    failures: Mapping[int, str] = field(default_factory=dict)
    next_version: tuple[int, int] | None = None
    stage_error: Exception | None = None
    commit_error: Exception | None = None
    columns: CompletionBatch | None = None


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """What ``generate_batch`` was asked."""

    prompts: PromptBatch
    sampling: SamplingConfig
    timeout_s: float | None
    on_bad_prompt: BadPrompt


@dataclass(frozen=True, slots=True)
class StageCall:
    """What ``stage_weights`` was asked."""

    update: WeightUpdate
    timeout_s: float


@dataclass(frozen=True, slots=True)
class CommitCall:
    """What ``commit_weights`` was asked."""

    update: WeightUpdate
    in_flight: InFlight
    kv: KVCache
    timeout_s: float


class FakeService:
    """Implements :class:`rl_vllm.protocols.GenerationService` in this process; safe to call from any thread.

    Args:
        info: The model it pretends to serve.
        script: Departures from the default behaviour; may be replaced between calls.
        specs: What ``weight_specs`` returns.
        num_replicas: Reports that a commit returns.

    Attributes:
        generate_calls: Every ``generate_batch``, in order.
        stage_calls: Every ``stage_weights`` that took, in order.
        commit_calls: Every ``commit_weights`` that took, in order.
    """

    def __init__(
        self,
        *,
        info: ModelInfo = FAKE_MODEL,
        script: FakeScript | None = None,
        specs: tuple[TensorSpec, ...] = (),
        num_replicas: int = 1,
    ) -> None:
        self.script = script if script is not None else FakeScript()
        self.generate_calls: list[GenerateCall] = []
        self.stage_calls: list[StageCall] = []
        self.commit_calls: list[CommitCall] = []
        self._info = info
        self._specs = specs
        self._num_replicas = num_replicas
        self._version = 0
        self._lock = threading.Lock()

    @property
    def num_replicas(self) -> int:
        return self._num_replicas

    @property
    def weight_version(self) -> int:
        return self._version

    def model_info(self) -> ModelInfo:
        return self._info

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        return self._specs

    def generate_batch(
        self,
        prompts: PromptBatch,
        sampling: SamplingConfig,
        *,
        timeout_s: float | None = None,
        on_bad_prompt: BadPrompt = BadPrompt.RAISE,
    ) -> CompletionBatch:
        """Answer at once, as the protocol says; half of each prompt's tokens count as cached."""
        with self._lock:
            self.generate_calls.append(GenerateCall(prompts, sampling, timeout_s, on_bad_prompt))
            version = self._version
        if self.script.columns is not None:
            return self.script.columns
        bad = _bad_rows(prompts, self._info)
        if bad and on_bad_prompt is BadPrompt.RAISE:
            row, reason = next(iter(bad.items()))
            raise BadPromptError(row, reason)
        failures = bad | dict(self.script.failures)
        if self.script.failures and on_bad_prompt is BadPrompt.RAISE:
            raise GenerationError(tuple(sorted(self.script.failures.items())))
        return self._answer(prompts, sampling, version, failures)

    def _answer(
        self, prompts: PromptBatch, sampling: SamplingConfig, version: int, failures: Mapping[int, str]
    ) -> CompletionBatch:
        requests = [
            FakeRequest(row, sample, prompts.row(row), self._limit(prompts, row, sampling), sampling, self._info)
            for row in range(len(prompts))
            if row not in failures
            for sample in range(sampling.n)
        ]
        responses = [np.asarray(self.script.respond(request), dtype=np.int32)[: request.limit] for request in requests]
        tokens, offsets = pack_rows(responses)
        scores = [self.script.score(r.prompt_T, ids) for r, ids in zip(requests, responses, strict=True)]
        ends = [self._end(request, ids) for request, ids in zip(requests, responses, strict=True)]
        return CompletionBatch(
            numbers_N=np.array([request.row for request in requests], dtype=np.int64),
            samples_N=np.array([request.sample for request in requests], dtype=np.int32),
            offsets_N1=offsets,
            tokens_T=tokens,
            logprobs_T=np.concatenate([*scores, np.zeros(0)]).astype(np.float32),
            versions_T=self._versions(offsets, version),
            finish_N=np.array([finish for finish, _ in ends], dtype=np.int8),
            stops_N=tuple(stop for _, stop in ends),
            cached_N=np.array([len(request.prompt_T) // 2 for request in requests], dtype=np.int32),
            failures=tuple(RequestFailure(row, reason) for row, reason in sorted(failures.items())),
            top_logprobs=_top_logprobs(responses, scores) if sampling.logprobs else None,
            prompt_logprobs=None if sampling.prompt_logprobs is None else tuple(map(_prompt_logprobs, requests)),
        )

    def _limit(self, prompts: PromptBatch, row: int, sampling: SamplingConfig) -> int:
        room = self._info.max_model_len - int(prompts.lengths_B[row])
        return room if sampling.max_tokens is None else min(sampling.max_tokens, room)

    def _end(self, request: FakeRequest, ids: Int32) -> tuple[FinishReason, str | int | None]:
        stop = self.script.stops.get(request.row)
        ended = stop is not None or (len(ids) > 0 and int(ids[-1]) in self._info.eos_token_ids)
        finish = FinishReason.STOP if ended else FinishReason.LENGTH
        return self.script.finish.get(request.row, finish), stop

    def _versions(self, offsets_N1: NDArray[np.int64], version: int) -> Int32:
        versions = np.full(int(offsets_N1[-1]), version, dtype=np.int32)
        if self.script.next_version is not None:
            token, later = self.script.next_version
            positions = np.arange(len(versions)) - np.repeat(offsets_N1[:-1], np.diff(offsets_N1))
            versions[positions >= token] = later
        return versions

    def stage_weights(self, update: WeightUpdate, *, timeout_s: float) -> None:
        """Record the update.

        Raises:
            RefitError: Its version is not above the one being served.
        """
        if self.script.stage_error is not None:
            raise self.script.stage_error
        with self._lock:
            if update.version <= self._version:
                raise RefitError(update.version, "stage", (), f"version {self._version} is being served already")
            self.stage_calls.append(StageCall(update, timeout_s))

    def commit_weights(
        self, update: WeightUpdate, *, in_flight: InFlight, kv: KVCache, timeout_s: float
    ) -> tuple[CommitReport, ...]:
        """Serve the update's version from the next call on; the checksum reported is the update's own when it has one.

        Raises:
            RefitError: The update was never staged.
        """
        if self.script.commit_error is not None:
            raise self.script.commit_error
        with self._lock:
            if all(call.update != update for call in self.stage_calls):
                raise RefitError(update.version, "commit", (), "this update was not staged")
            self._version = update.version
            self.commit_calls.append(CommitCall(update, in_flight, kv, timeout_s))
        report = CommitReport(
            version=update.version,
            stall_s=0.0,
            checksum=update.checksum or f"fake-{update.version}",
            prefix_cache_reset=kv is KVCache.RECOMPUTE,
        )
        return (report,) * self._num_replicas


def _bad_rows(prompts: PromptBatch, info: ModelInfo) -> dict[int, str]:
    """Reason per row that cannot be sent."""
    bad: dict[int, str] = {}
    for row in range(len(prompts)):
        ids = prompts.row(row)
        outside = ids[(ids < 0) | (ids >= info.vocab_size)]
        if len(ids) == 0:
            bad[row] = "it has no tokens: give at least one"
        elif len(outside):
            bad[row] = f"token id {int(outside[0])} is outside the vocabulary [0, {info.vocab_size})"
        elif len(ids) >= info.max_model_len:
            bad[row] = f"it has {len(ids)} tokens and the context {info.max_model_len}: no room for a response token"
    return bad


def _prompt_logprobs(request: FakeRequest) -> Float32:
    """The stated logprob of every prompt id but the first, which is NaN."""
    values = stated_logprobs(request.prompt_T[:0], request.prompt_T)
    values[0] = np.nan
    return values


def _top_logprobs(responses: Sequence[Int32], scores: Sequence[Float32]) -> tuple[tuple[dict[int, float], ...], ...]:
    """The sampled token alone."""
    return tuple(
        tuple({int(token): float(score)} for token, score in zip(ids, row, strict=True))
        for ids, row in zip(responses, scores, strict=True)
    )

"""A generation service without an engine: every answer is a stated function of the prompt, the sample and the seed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rl_vllm.errors import BadPromptError, ConfigError, DeadlineError, GenerationError
from rl_vllm.testing.answers import (
    FAKE_MODEL,
    FakeRequest,
    FakeScript,
    FakeWeights,
    answer,
    requests_of,
    stated_seconds,
)
from rl_vllm.types import (
    BadPrompt,
    CommitReport,
    CompletionBatch,
    InFlight,
    KVCache,
    ModelInfo,
    PromptBatch,
    SamplingConfig,
    TensorSpec,
    WeightReceiver,
    WeightUpdate,
)

# As the service's own.
DEFAULT_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """What ``generate_batch`` was asked, or one of its kin."""

    prompts: PromptBatch
    sampling: SamplingConfig | Sequence[SamplingConfig]
    timeout_s: float | None
    on_bad_prompt: BadPrompt
    actor_index: int | None = None


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
    """Implements :class:`rl_vllm.protocols.AsyncGenerationService` in this process; safe to call from any thread.

    Args:
        info: The model it pretends to serve.
        script: Departures from the default behaviour; may be replaced between calls.
        specs: What ``weight_specs`` returns.
        num_replicas: Reports that a commit returns.
        hosts: The machines of each replica.

    Attributes:
        generate_calls: Every ``generate_batch``, ``agenerate_batch`` and ``stream_batch``, in order.
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
        hosts: tuple[str, ...] = (WeightReceiver.THIS_HOST,),
    ) -> None:
        self.script = script if script is not None else FakeScript()
        self.generate_calls: list[GenerateCall] = []
        self.stage_calls: list[StageCall] = []
        self.commit_calls: list[CommitCall] = []
        self._info = info
        self._specs = specs
        self._num_replicas = num_replicas
        self._hosts = hosts
        self._weights = FakeWeights()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, object]:
        """By value: a copy knows the calls so far, and shares nothing."""
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    @property
    def num_replicas(self) -> int:
        return self._num_replicas

    @property
    def weight_version(self) -> int:
        return self._weights.version

    def model_info(self) -> ModelInfo:
        return self._info

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        return self._specs

    def generate_batch(
        self,
        prompts: PromptBatch,
        sampling: SamplingConfig | Sequence[SamplingConfig],
        *,
        timeout_s: float | None = None,
        on_bad_prompt: BadPrompt = BadPrompt.RAISE,
        actor_index: int | None = None,
    ) -> CompletionBatch:
        """Answer at once, as the protocol says."""
        call = GenerateCall(prompts, sampling, timeout_s, on_bad_prompt, actor_index)
        version = self._record(call)
        if self.script.columns is not None:
            return self.script.columns
        failures = self._failures(call)
        if self.script.failures and on_bad_prompt is BadPrompt.RAISE:
            raise GenerationError(tuple(sorted(self.script.failures.items())))
        requests = [
            request for row in range(len(prompts)) if row not in failures for request in self._requests(call, row)
        ]
        return _timed(answer(requests, self.script, version, failures, replica=actor_index or 0))

    async def agenerate_batch(
        self,
        prompts: PromptBatch,
        sampling: SamplingConfig | Sequence[SamplingConfig],
        *,
        timeout_s: float | None = None,
        on_bad_prompt: BadPrompt = BadPrompt.RAISE,
        actor_index: int | None = None,
    ) -> CompletionBatch:
        """As :meth:`generate_batch`."""
        return self.generate_batch(
            prompts, sampling, timeout_s=timeout_s, on_bad_prompt=on_bad_prompt, actor_index=actor_index
        )

    async def stream_batch(
        self,
        prompts: PromptBatch,
        sampling: SamplingConfig | Sequence[SamplingConfig],
        *,
        timeout_s: float | None = None,
        on_bad_prompt: BadPrompt = BadPrompt.RAISE,
        actor_index: int | None = None,
    ) -> AsyncGenerator[CompletionBatch, None]:
        """One chunk for each sample and each failure, in the script's order; versions are those of that moment."""
        call = GenerateCall(prompts, sampling, timeout_s, on_bad_prompt, actor_index)
        self._record(call)
        failures = self._failures(call)
        deadline_s = asyncio.get_running_loop().time() + (DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s)
        first = [row for row in self.script.order if row < len(prompts)]
        for row in dict.fromkeys([*first, *range(len(prompts))]):
            try:
                async with asyncio.timeout_at(deadline_s):
                    if self.script.before is not None:
                        await self.script.before(row)
            except TimeoutError:
                raise DeadlineError(f"{len(prompts)} prompts", timeout_s or DEFAULT_TIMEOUT_S) from None
            for chunk in self._chunks(call, row, failures):
                yield chunk
        if self.script.failures and on_bad_prompt is BadPrompt.RAISE:
            raise GenerationError(tuple(sorted(self.script.failures.items())))

    def _record(self, call: GenerateCall) -> int:
        """Remember a call; the version that is served now."""
        given = call.sampling
        if not isinstance(given, SamplingConfig) and len(given) != len(call.prompts):
            raise ConfigError(f"{len(given)} sampling for {len(call.prompts)} prompts: give one, or one for each")
        with self._lock:
            self.generate_calls.append(call)
            return self._weights.version

    def _failures(self, call: GenerateCall) -> dict[int, str]:
        bad = _bad_rows(call.prompts, self._info)
        if bad and call.on_bad_prompt is BadPrompt.RAISE:
            row, reason = next(iter(bad.items()))
            raise BadPromptError(row, reason)
        return bad | dict(self.script.failures)

    def _requests(self, call: GenerateCall, row: int) -> list[FakeRequest]:
        sampling = call.sampling if isinstance(call.sampling, SamplingConfig) else call.sampling[row]
        return requests_of(row, call.prompts.row(row), sampling, self._info)

    def _chunks(self, call: GenerateCall, row: int, failures: dict[int, str]) -> Iterator[CompletionBatch]:
        """A row's samples one by one, or its failure, with the optional columns that any row asked for."""
        if self.script.columns is not None:
            whole = self.script.columns
            samples = np.flatnonzero(whole.numbers_N == row)
        elif row in failures:
            marked = {row: failures[row]} if call.on_bad_prompt is BadPrompt.MARK else {}
            whole, samples = answer([], self.script, 0, marked), np.zeros(0, np.intp)
        else:
            version, replica = self._weights.version, call.actor_index or 0
            whole = _timed(answer(self._requests(call, row), self.script, version, {}, replica=replica))
            samples = np.arange(len(whole))
        asked = [call.sampling] if isinstance(call.sampling, SamplingConfig) else call.sampling
        whole = whole.filled(
            top_logprobs=any(each.logprobs for each in asked),
            prompt_lengths_B=call.prompts.lengths_B if any(e.prompt_logprobs is not None for e in asked) else None,
        )
        if whole.failures and not len(samples):
            yield whole
        for sample in samples.tolist():
            yield whole.take(np.array([sample]))

    def weight_receivers(self) -> tuple[WeightReceiver, ...]:
        """Each replica with one worker."""
        return tuple(WeightReceiver(index, 1, self._hosts) for index in range(self._num_replicas))

    def stage_weights(self, update: WeightUpdate, *, timeout_s: float) -> None:
        """Record the update.

        Raises:
            RefitError: Its version is not above the one being served.
        """
        if self.script.stage_error is not None:
            raise self.script.stage_error
        with self._lock:
            self._weights.stage(update)
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
            report = self._weights.commit(update, kv)
            self.commit_calls.append(CommitCall(update, in_flight, kv, timeout_s))
        return (report,) * self._num_replicas


def _timed(batch: CompletionBatch) -> CompletionBatch:
    return replace(batch, seconds_N=stated_seconds(batch.numbers_N))


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

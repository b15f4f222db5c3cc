"""Prompts to the service, answers from it: one request at a time, as rollouts need them."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rl_vllm.collectors.stats import CollectorStats
from rl_vllm.envs.dialogue import Answer
from rl_vllm.errors import (
    GenerationError,
    MissingLogprobError,
    MixedVersionsError,
    ServiceAsleepError,
    ServiceOverloadedError,
)
from rl_vllm.protocols import AsyncGenerationService
from rl_vllm.types import BadPrompt, CompletionBatch, FinishReason, PromptBatch, SamplingConfig

# How long a request waits that the service does not take now.
_PAUSE_S = 0.2


class Asker:
    """Sends requests with one set of sampling settings.

    Args:
        service: Who answers.
        sampling: For all requests, but for their seeds and numbers of samples.
        timeout_s: Limit for one request; None means the service's own.
        partial_rollouts: Take answers that weights of several versions sampled.
        stats: Counts of tokens go there.
    """

    def __init__(
        self,
        service: AsyncGenerationService,
        sampling: SamplingConfig,
        *,
        timeout_s: float | None,
        partial_rollouts: bool,
        stats: CollectorStats,
    ) -> None:
        self._service = service
        self._sampling = sampling
        self._timeout_s = timeout_s
        self._partial_rollouts = partial_rollouts
        self._stats = stats

    async def ask(self, prompt_T: NDArray[np.int32], *, seed: int | None, session: str) -> Answer:
        """One answer.

        Raises:
            MixedVersionsError: A refit came into the middle and partial rollouts are not wanted.
            GenerationError, DeadlineError, BadPromptError: As the service says.
        """
        (answer,) = await self.ask_many(prompt_T, n=1, seed=seed, session=session)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def ask_many(
        self, prompt_T: NDArray[np.int32], *, n: int, seed: int | None, session: str
    ) -> list[Answer | Exception]:
        """``n`` answers to one prompt, which share its prefill; an answer that cannot be used is an error."""
        prompts = PromptBatch(prompt_T, np.array([0, len(prompt_T)]), session_ids=(session,))
        sampling = replace(self._sampling, seed=seed, n=n)
        while True:
            try:
                batch = await self._service.agenerate_batch(
                    prompts, sampling, timeout_s=self._timeout_s, on_bad_prompt=BadPrompt.RAISE
                )
            except (ServiceAsleepError, ServiceOverloadedError):
                # Nothing is wrong with the request: it waits, as long as the collector's own deadline lets it.
                await asyncio.sleep(_PAUSE_S)
                continue
            self._stats.tokens_sampled += len(batch.tokens_T)
            if batch.failures:
                raise GenerationError(((0, batch.failures[0].reason),))
            if len(batch) != n:
                raise GenerationError(((0, f"the service returned {len(batch)} of {n} samples"),))
            ordered = batch.sorted_rows()
            return [self._answer(ordered, index) for index in range(n)]

    def _answer(self, batch: CompletionBatch, index: int) -> Answer | Exception:
        logprobs = batch.logprobs(index)
        versions = batch.versions(index)
        finish = int(batch.finish_N[index])
        if finish in (FinishReason.ABORT, FinishReason.ERROR):
            return GenerationError(((0, f"the response ended by {FinishReason(finish).label}"),))
        bad = np.flatnonzero(~np.isfinite(logprobs))
        if len(bad):
            place = int(bad[0])
            return MissingLogprobError(0, place, str(logprobs[place]), int(versions[place]))
        if not self._partial_rollouts and len(versions) and versions[0] != versions[-1]:
            return MixedVersionsError(int(versions[0]), int(versions[-1]))
        return Answer(
            tokens_T=batch.tokens(index),
            logprobs_T=logprobs,
            versions_T=versions.astype(np.int64),
            finish=finish,
            stop=batch.stops_N[index],
            num_cached=int(batch.cached_N[index]),
            seconds=math.nan if batch.seconds_N is None else float(batch.seconds_N[index]),
        )

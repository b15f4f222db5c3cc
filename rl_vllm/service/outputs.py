"""Results in the shape of ``vllm.LLM.generate``'s, rebuilt on the driver from columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np

from rl_vllm.types import CompletionBatch, FinishReason, PromptBatch, WeightVersionSpan


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's logprob, in nats; rank and text are not kept in the columns and are None."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class LogprobRows(Sequence[dict[int, Logprob]]):
    """One ``{token id: Logprob}`` per position, made when it is read: most callers read few."""

    def __init__(self, tokens: list[int], logprobs: list[float], top: tuple[dict[int, float], ...] | None) -> None:
        self._tokens = tokens
        self._logprobs = logprobs
        self._top = top

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[int, Logprob]]: ...
    def __getitem__(self, index: int | slice) -> dict[int, Logprob] | list[dict[int, Logprob]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = {self._tokens[index]: Logprob(self._logprobs[index])}
        if self._top is not None:
            row |= {token: Logprob(value) for token, value in self._top[index].items()}
        return row

    def __iter__(self) -> Iterator[dict[int, Logprob]]:
        return (self[i] for i in range(len(self)))


@dataclass(slots=True)
class CompletionOutput:
    """One sample, with the attributes of ``vllm.CompletionOutput``."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: LogprobRows | None
    finish_reason: str | None
    stop_reason: int | str | None
    weight_versions: tuple[WeightVersionSpan, ...]
    routed_experts: None = None
    lora_request: None = None
    sampling_mask: None = None
    spec_decode_metrics: None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """One prompt's samples, with the attributes of ``vllm.RequestOutput``."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    finished: bool = True
    metrics: None = None
    lora_request: None = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    num_cache_creation_tokens: None = None
    prompt_token_id_logprobs: None = None
    error: str | None = field(default=None)


def to_request_outputs(
    prompts: PromptBatch,
    texts: Sequence[str | None],
    batch: CompletionBatch,
    sample_texts: Sequence[str],
    *,
    with_logprobs: bool,
) -> list[RequestOutput]:
    """One output per prompt, in order.

    Args:
        prompts: The B prompts.
        texts: Each prompt's text, None where ids were given.
        batch: Their completions, ordered by row and sample.
        sample_texts: The text of each completion.
        with_logprobs: Whether the caller asked for logprobs; vLLM gives None otherwise.
    """
    reasons = {failure.number: failure.reason for failure in batch.failures}
    bounds = np.searchsorted(batch.numbers_N, np.arange(len(prompts) + 1))
    results = []
    for row in range(len(prompts)):
        indices = range(int(bounds[row]), int(bounds[row + 1]))
        results.append(
            RequestOutput(
                request_id=str(row),
                prompt=texts[row],
                prompt_token_ids=prompts.row(row).tolist(),
                prompt_logprobs=_prompt_logprobs(prompts, batch, row, indices),
                outputs=[_sample(batch, i, sample_texts[i], with_logprobs=with_logprobs) for i in indices],
                num_cached_tokens=int(batch.cached_N[indices[0]]) if indices else 0,
                error=reasons.get(row),
            )
        )
    return results


def _sample(batch: CompletionBatch, index: int, text: str, *, with_logprobs: bool) -> CompletionOutput:
    tokens = batch.tokens(index).tolist()
    logprobs = batch.logprobs(index)
    top = None if batch.top_logprobs is None else batch.top_logprobs[index]
    return CompletionOutput(
        index=int(batch.samples_N[index]),
        text=text,
        token_ids=tokens,
        cumulative_logprob=float(logprobs.sum(dtype=np.float64)) if with_logprobs else None,
        logprobs=LogprobRows(tokens, logprobs.tolist(), top) if with_logprobs else None,
        finish_reason=FinishReason(int(batch.finish_N[index])).label,
        stop_reason=batch.stops_N[index],
        weight_versions=batch.spans(index),
    )


def _prompt_logprobs(
    prompts: PromptBatch, batch: CompletionBatch, row: int, indices: range
) -> list[dict[int, Logprob] | None] | None:
    if batch.prompt_logprobs is None or not indices:
        return None
    values = batch.prompt_logprobs[indices[0]].tolist()
    tokens = prompts.row(row).tolist()
    return [None if np.isnan(value) else {token: Logprob(value)} for token, value in zip(tokens, values, strict=True)]

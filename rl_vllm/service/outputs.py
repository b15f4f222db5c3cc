"""Results in the shape of ``vllm.LLM.generate``'s, rebuilt on the driver from columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray

from rl_vllm.types import CompletionBatch, EmbeddingBatch, FinishReason, PromptBatch, WeightVersionSpan

Item = TypeVar("Item")


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
    lora_request: object = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    num_cache_creation_tokens: None = None
    prompt_token_id_logprobs: None = None
    error: str | None = field(default=None)


@dataclass(slots=True)
class PoolingOutput:
    """One prompt's pooled vector, with the attributes of vLLM's ``PoolingOutput`` and ``EmbeddingOutput``.

    Attributes:
        data: float32 [D].
    """

    data: torch.Tensor

    @property
    def embedding(self) -> list[float]:
        """The vector as a list."""
        values: list[float] = self.data.tolist()
        return values

    @property
    def hidden_size(self) -> int:
        return len(self.data)


@dataclass(slots=True)
class PoolingRequestOutput:
    """One prompt's vector, with the attributes of ``vllm.PoolingRequestOutput``; ``error`` says why there is none."""

    request_id: str
    outputs: PoolingOutput | None
    prompt_token_ids: list[int]
    prompt: str | None = None
    num_cached_tokens: int = 0
    finished: bool = True
    error: str | None = None


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What of a batch's prompts and requests appears in its outputs; one entry per prompt.

    Attributes:
        texts: Each prompt's text, None where ids were given.
        with_logprobs: Whether the caller asked for logprobs; vLLM gives None otherwise.
        loras: The adapter each prompt asked for, as the caller named it.
    """

    texts: Sequence[str | None]
    with_logprobs: Sequence[bool]
    loras: Sequence[object]


def to_request_outputs(
    prompts: PromptBatch, batch: CompletionBatch, sample_texts: Sequence[str], options: OutputOptions
) -> list[RequestOutput]:
    """One output per prompt, in order; a prompt without a sample and without a failure has no ``outputs``.

    Args:
        prompts: The B prompts.
        batch: Their completions, ordered by row and sample.
        sample_texts: The text of each completion.
        options: What else the outputs tell.
    """
    reasons = {failure.number: failure.reason for failure in batch.failures}
    bounds = np.searchsorted(batch.numbers_N, np.arange(len(prompts) + 1))
    results = []
    for row in range(len(prompts)):
        indices = range(int(bounds[row]), int(bounds[row + 1]))
        shown = options.with_logprobs[row]
        results.append(
            RequestOutput(
                request_id=str(row),
                prompt=options.texts[row],
                prompt_token_ids=prompts.row(row).tolist(),
                prompt_logprobs=prompt_logprobs_of(prompts, batch, row, indices),
                outputs=[to_sample(batch, i, sample_texts[i], with_logprobs=shown) for i in indices],
                num_cached_tokens=int(batch.cached_N[indices[0]]) if indices else 0,
                lora_request=options.loras[row],
                error=reasons.get(row),
            )
        )
    return results


def to_pooling_outputs(
    prompts: PromptBatch, texts: Sequence[str | None], batch: EmbeddingBatch
) -> list[PoolingRequestOutput]:
    """One output per prompt, in order.

    Args:
        prompts: The B prompts.
        texts: Each prompt's text, None where ids were given.
        batch: Their vectors, ``numbers_N`` being rows.
    """
    reasons = {failure.number: failure.reason for failure in batch.failures}
    position = {int(row): index for index, row in enumerate(batch.numbers_N)}
    return [
        PoolingRequestOutput(
            request_id=str(row),
            outputs=PoolingOutput(torch.tensor(batch.values_ND[position[row]])) if row in position else None,
            prompt_token_ids=prompts.row(row).tolist(),
            prompt=texts[row],
            error=reasons.get(row),
        )
        for row in range(len(prompts))
    ]


def to_sample(batch: CompletionBatch, index: int, text: str, *, with_logprobs: bool) -> CompletionOutput:
    """One sample with its text; unfinished in the pieces of a stream."""
    tokens = batch.tokens(index).tolist()
    logprobs = batch.logprobs(index)
    finish = FinishReason(int(batch.finish_N[index]))
    top = None if batch.top_logprobs is None else batch.top_logprobs[index]
    return CompletionOutput(
        index=int(batch.samples_N[index]),
        text=text,
        token_ids=tokens,
        cumulative_logprob=float(logprobs.sum(dtype=np.float64)) if with_logprobs else None,
        logprobs=LogprobRows(tokens, logprobs.tolist(), top) if with_logprobs else None,
        finish_reason=None if finish is FinishReason.UNFINISHED else finish.label,
        stop_reason=batch.stops_N[index],
        weight_versions=batch.spans(index),
    )


def prompt_logprobs_of(
    prompts: PromptBatch, batch: CompletionBatch, row: int, indices: range
) -> list[dict[int, Logprob] | None] | None:
    """What is known of a prompt's tokens, None for an unknown one; None when nobody asked."""
    if batch.prompt_logprobs is None or not indices:
        return None
    values = batch.prompt_logprobs[indices[0]].tolist()
    tokens = prompts.row(row).tolist()
    return [None if np.isnan(value) else {token: Logprob(value)} for token, value in zip(tokens, values, strict=True)]


def join_pieces(pieces: Sequence[CompletionBatch]) -> CompletionBatch:
    """The samples that streamed pieces are parts of, ordered by request and sample; failures are kept.

    A sample's finish and stop are those of its last piece.
    """
    if not pieces:
        return CompletionBatch.empty()
    plain = [replace(piece, top_logprobs=None, prompt_logprobs=None) for piece in pieces]
    parts = CompletionBatch.concatenate(plain)
    order = np.lexsort((np.arange(len(parts)), parts.samples_N, parts.numbers_N))
    parts = parts.take(order)
    keys = np.stack([parts.numbers_N, parts.samples_N.astype(np.int64)])
    is_first = np.ones(len(parts), bool)
    is_first[1:] = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
    first = np.flatnonzero(is_first)
    last = np.append(first[1:], len(parts)) - 1 if len(parts) else first
    top, prompt = _optional_columns(pieces)
    return replace(
        parts,
        numbers_N=parts.numbers_N[first],
        samples_N=parts.samples_N[first],
        offsets_N1=np.append(parts.offsets_N1[:-1][first], parts.offsets_N1[-1]),
        finish_N=parts.finish_N[last],
        stops_N=tuple(parts.stops_N[index] for index in last),
        cached_N=parts.cached_N[first],
        top_logprobs=_of_samples(top, parts, first),
        prompt_logprobs=_of_samples(prompt, parts, first),
    )


def _optional_columns(
    pieces: Sequence[CompletionBatch],
) -> tuple[dict[tuple[int, int], tuple[dict[int, float], ...]], dict[tuple[int, int], NDArray[np.float32]]]:
    """Alternatives and prompt logprobs by request and sample, of the pieces that have any."""
    top: dict[tuple[int, int], tuple[dict[int, float], ...]] = {}
    prompt: dict[tuple[int, int], NDArray[np.float32]] = {}
    for piece in pieces:
        keys = list(zip(piece.numbers_N.tolist(), piece.samples_N.tolist(), strict=True))
        if piece.top_logprobs is not None:
            for key, alternatives in zip(keys, piece.top_logprobs, strict=True):
                top[key] = top.get(key, ()) + tuple(alternatives)
        if piece.prompt_logprobs is not None:
            for key, values in zip(keys, piece.prompt_logprobs, strict=True):
                prompt.setdefault(key, values)
    return top, prompt


def _of_samples(
    found: Mapping[tuple[int, int], Item], parts: CompletionBatch, first: NDArray[np.intp]
) -> tuple[Item, ...] | None:
    keys = [(int(parts.numbers_N[index]), int(parts.samples_N[index])) for index in first]
    return tuple(found[key] for key in keys) if keys and all(key in found for key in keys) else None


def end_samples(whole: CompletionBatch, num_samples: int, finish: FinishReason) -> CompletionBatch:
    """Last pieces, without tokens, of the samples of request 0 that ``whole`` has not ended."""
    ended = set(whole.samples_N[whole.finish_N != FinishReason.UNFINISHED].tolist())
    rest = [sample for sample in range(num_samples) if sample not in ended]
    return replace(
        CompletionBatch.empty(),
        numbers_N=np.zeros(len(rest), np.int64),
        samples_N=np.array(rest, np.int32),
        offsets_N1=np.zeros(len(rest) + 1, np.int64),
        finish_N=np.full(len(rest), finish, np.int8),
        stops_N=(None,) * len(rest),
        cached_N=np.zeros(len(rest), np.int32),
    )

"""vLLM's output objects as columns; they never leave the engine's process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput

from rl_vllm.errors import MissingLogprobError
from rl_vllm.types import CompletionBatch, FinishReason, RequestFailure, pack_rows


def to_columns(
    made: Sequence[tuple[int, RequestOutput]],
    failures: Sequence[RequestFailure],
    *,
    begins: Mapping[tuple[int, int], int] | None = None,
) -> CompletionBatch:
    """Columns of finished requests, or of pieces.

    Args:
        made: Request numbers with vLLM's final outputs, all ``n`` samples in each; or with pieces.
        failures: Requests without an answer.
        begins: For pieces: how many tokens each sample, by request and index, had before its piece.

    A request with an unusable logprob becomes a failure of its own; the others are unharmed.
    """
    # Without a reason a piece is not the last one, and a whole response was cut short from outside.
    no_reason = FinishReason.ABORT if begins is None else FinishReason.UNFINISHED
    begins = {} if begins is None else begins
    kept: list[tuple[int, RequestOutput]] = []
    lost = list(failures)
    logprob_rows: list[list[float]] = []
    for number, output in made:
        try:
            rows = [
                _sampled_logprobs(number, sample, begins.get((number, sample.index), 0)) for sample in output.outputs
            ]
        except MissingLogprobError as error:
            lost.append(RequestFailure(number, str(error)))
            continue
        kept.append((number, output))
        logprob_rows.extend(rows)
    samples = [(number, output, sample) for number, output in kept for sample in output.outputs]
    tokens, offsets = pack_rows([sample.token_ids for _, _, sample in samples])
    logprobs = [value for row in logprob_rows for value in row]
    return CompletionBatch(
        numbers_N=np.array([number for number, _, _ in samples], np.int64),
        samples_N=np.array([sample.index for _, _, sample in samples], np.int32),
        offsets_N1=offsets,
        tokens_T=tokens,
        logprobs_T=np.array(logprobs, np.float32),
        versions_T=_versions([sample for _, _, sample in samples], len(tokens)),
        finish_N=np.array([_finish(sample, no_reason) for _, _, sample in samples], np.int8),
        stops_N=tuple(sample.stop_reason for _, _, sample in samples),
        cached_N=np.array([output.num_cached_tokens or 0 for _, output, _ in samples], np.int32),
        failures=tuple(lost),
        top_logprobs=_top_logprobs([sample for _, _, sample in samples]),
        prompt_logprobs=_prompt_logprobs([output for _, output, _ in samples]),
    )


def _sampled_logprobs(number: int, sample: CompletionOutput, begin: int) -> list[float]:
    """Logprob of every sampled token: the first entry of each position; ``begin`` tokens came before them."""
    flat = sample.logprobs
    length = len(sample.token_ids)
    if length == 0:
        return []
    if not isinstance(flat, FlatLogprobs) or len(flat) < length:
        have = 0 if flat is None else len(flat)
        raise MissingLogprobError(number, begin + have, "missing", _version_at(sample, have))
    starts = flat.start_indices
    one_each = len(flat.logprobs) == len(starts)
    values = flat.logprobs if one_each else [flat.logprobs[start] for start in starts]
    # A stop string can cut tokens off the text's end; the ids and their logprobs are cut alike.
    values = values[:length]
    if not np.isfinite(sum(values)):
        position = next(i for i, value in enumerate(values) if not np.isfinite(value))
        raise MissingLogprobError(number, begin + position, str(values[position]), _version_at(sample, position))
    return values


def _version_at(sample: CompletionOutput, position: int) -> int | None:
    for span in sample.weight_versions or ():
        if span.start <= position < span.end:
            return int(span.version)
    return None


def _versions(samples: Sequence[CompletionOutput], num_tokens: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    versions: list[int] = []
    lengths: list[int] = []
    for sample in samples:
        for span in sample.weight_versions or ():
            versions.append(int(span.version))
            # Tokens after the one that completed a stop string are cut off; their label is not.
            lengths.append(max(min(span.end, len(sample.token_ids)) - span.start, 0))
    columns = np.repeat(np.array(versions, np.int32), np.array(lengths, np.int64))
    assert len(columns) == num_tokens, "the engine labelled fewer tokens with a version than it returned"
    return columns


def _finish(sample: CompletionOutput, no_reason: FinishReason) -> int:
    return no_reason if sample.finish_reason is None else FinishReason.from_label(sample.finish_reason)


def _top_logprobs(samples: Sequence[CompletionOutput]) -> tuple[tuple[dict[int, float], ...], ...] | None:
    flats = [sample.logprobs for sample in samples]
    if not any(isinstance(flat, FlatLogprobs) and len(flat.logprobs) > len(flat) for flat in flats):
        return None
    return tuple(
        ()
        if not isinstance(flat, FlatLogprobs)
        else tuple(
            dict(zip(flat.token_ids[start:end], flat.logprobs[start:end], strict=True))
            for start, end in zip(flat.start_indices, flat.end_indices, strict=True)
        )
        for flat in flats
    )


def _prompt_logprobs(
    outputs: Sequence[RequestOutput],
) -> tuple[np.ndarray[tuple[int], np.dtype[np.float32]], ...] | None:
    """Logprob of each prompt token; NaN where the engine has none, as for the first."""
    if not any(isinstance(output.prompt_logprobs, FlatLogprobs) for output in outputs):
        return None
    rows = []
    for output in outputs:
        ids = output.prompt_token_ids or []
        row = np.full(len(ids), np.nan, np.float32)
        flat = output.prompt_logprobs
        if isinstance(flat, FlatLogprobs):
            for position, (start, end) in enumerate(zip(flat.start_indices, flat.end_indices, strict=True)):
                if end > start:
                    row[position] = flat.logprobs[start]
        rows.append(row)
    return tuple(rows)

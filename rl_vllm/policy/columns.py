"""From completions to aligned per-token columns, padded or ragged, without a loop over tokens.

Axes: B prompts, n samples of each, S = B * n slots (prompt-major), T tokens end to end, P and R the longest prompt and
response, F = P + R.

Two prompts ``[5, 6]`` and ``[7]`` with responses ``[8, 2]`` and ``[9]``, padding 0, give
``full = [[5, 6, 8, 2], [0, 7, 9, 0]]``: prompts end and responses begin at the same position in every row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_vllm.errors import GenerationError, MissingLogprobError
from rl_vllm.types import CompletionBatch, FinishReason, PromptBatch

Int64 = NDArray[np.int64]
Array = NDArray[Any]

NO_VERSION = -1
NO_LOGPROB_OF_PADDING = 0.0


@dataclass(frozen=True, slots=True)
class Slots:
    """Completions of one batch in slot order; a slot without one is empty and invalid.

    Attributes:
        prompt_T, prompt_lengths_S: The prompts, repeated for each sample.
        response_T, logprobs_T, versions_T, lengths_S: The responses; failed slots have length 0.
        prompt_logprobs_T: Aligned with ``prompt_T``, NaN where unknown; None when they were not asked for.
        finish_S: int64, :class:`FinishReason` numbers; ``ERROR`` for a failed slot.
        stops_S: Stop string or id, or None.
        cached_S: int64, prompt tokens read from the prefix cache.
        seconds_S: float32, from the call to the sample's arrival; NaN for a failed slot and where nobody measured it.
        valid_S: False where the service has no completion.
        top_logprobs_S: The engine's alternatives, when asked for.
    """

    prompt_T: Array
    prompt_lengths_S: Int64
    response_T: Array
    logprobs_T: Array
    versions_T: Array
    lengths_S: Int64
    prompt_logprobs_T: Array | None
    finish_S: Int64
    stops_S: list[str | int | None]
    cached_S: Int64
    seconds_S: Array
    valid_S: NDArray[np.bool_]
    top_logprobs_S: list[tuple[dict[int, float], ...]] | None

    def __len__(self) -> int:
        return len(self.lengths_S)

    def prompt_rows(self) -> list[Array]:
        return split_rows(self.prompt_T, self.prompt_lengths_S)

    def response_rows(self) -> list[Array]:
        return split_rows(self.response_T, self.lengths_S)


def slots_from(prompts: PromptBatch, completions: CompletionBatch, *, n: int) -> Slots:
    """Put every completion in its slot.

    Args:
        prompts: B prompts.
        completions: The service's answer: each prompt has ``n`` samples or is in ``failures``.
        n: Samples per prompt.

    Raises:
        GenerationError: The service lost a sample, or returned one twice.
        MissingLogprobError: A sampled token has no finite logprob.
    """
    _check_logprobs(completions)
    slot_N = completions.numbers_N * n + completions.samples_N
    if np.any(np.diff(slot_N) <= 0):
        completions = completions.sorted_rows()
        slot_N = completions.numbers_N * n + completions.samples_N
    count = len(prompts) * n
    valid = np.zeros(count, np.bool_)
    valid[slot_N] = True
    _check_complete(slot_N, valid, completions, n)
    order_S = np.repeat(np.arange(len(prompts)), n)
    prompt_lengths_S = prompts.lengths_B[order_S]
    repeated = slice(None) if n == 1 else _positions(prompts.offsets_B1[order_S], prompt_lengths_S)
    return Slots(
        prompt_T=prompts.tokens_T[repeated],
        prompt_lengths_S=prompt_lengths_S,
        response_T=completions.tokens_T,
        logprobs_T=completions.logprobs_T,
        versions_T=completions.versions_T,
        lengths_S=_spread(slot_N, completions.lengths_N, count, 0),
        prompt_logprobs_T=_prompt_logprobs(slot_N, completions, prompt_lengths_S),
        finish_S=_spread(slot_N, completions.finish_N, count, FinishReason.ERROR),
        stops_S=_spread_objects(slot_N, completions.stops_N, count, None),
        cached_S=_spread(slot_N, completions.cached_N, count, 0),
        seconds_S=_seconds(slot_N, completions, count),
        valid_S=valid,
        top_logprobs_S=None
        if completions.top_logprobs is None
        else _spread_objects(slot_N, completions.top_logprobs, count, ()),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """Per-token values of all slots, each a padded [S, width] array or a list of S rows.

    Attributes:
        prompt, response, full: Token ids, int64.
        response_logprobs, full_logprobs, prompt_logprobs: float32, nats; NaN on prompt tokens whose logprob is unknown,
            0 on padding. ``prompt_logprobs`` is None when they were not asked for.
        versions: int64, the weight version that sampled each token of ``full``; -1 on prompt and padding.
        attention: bool, True on real tokens of ``full``.
        assistant: bool, True on sampled tokens of ``full``.
    """

    prompt: Any
    response: Any
    full: Any
    response_logprobs: Any
    full_logprobs: Any
    prompt_logprobs: Any
    versions: Any
    attention: Any
    assistant: Any


def padded_columns(slots: Slots, *, pad_token_id: int) -> TokenColumns:
    """Prompts padded on the left, responses on the right, ``full`` the one beside the other."""
    prompt_mask = left_mask(slots.prompt_lengths_S)
    response_mask = _right_mask(slots.lengths_S)
    known = slots.prompt_logprobs_T
    prompt = fill(prompt_mask, slots.prompt_T, np.int64, pad_token_id)
    prompt_logprobs = fill(
        prompt_mask, np.float32(np.nan) if known is None else known, np.float32, NO_LOGPROB_OF_PADDING
    )
    response = fill(response_mask, slots.response_T, np.int64, pad_token_id)
    response_logprobs = fill(response_mask, slots.logprobs_T, np.float32, NO_LOGPROB_OF_PADDING)
    versions = fill(response_mask, slots.versions_T, np.int64, NO_VERSION)
    return TokenColumns(
        prompt=prompt,
        response=response,
        full=np.concatenate([prompt, response], axis=1),
        response_logprobs=response_logprobs,
        full_logprobs=np.concatenate([prompt_logprobs, response_logprobs], axis=1),
        prompt_logprobs=None if known is None else prompt_logprobs,
        versions=np.concatenate([np.full_like(prompt, NO_VERSION), versions], axis=1),
        attention=np.concatenate([prompt_mask, response_mask], axis=1),
        assistant=np.concatenate([np.zeros_like(prompt_mask), response_mask], axis=1),
    )


def ragged_columns(slots: Slots) -> TokenColumns:
    """The same values without padding, as one row per slot."""
    full_lengths = slots.prompt_lengths_S + slots.lengths_S
    starts = np.cumsum(full_lengths) - full_lengths
    place = np.arange(int(full_lengths.sum())) - np.repeat(starts, full_lengths)
    is_response = place >= np.repeat(slots.prompt_lengths_S, full_lengths)
    known = slots.prompt_logprobs_T

    def joined(prompt_values: Any, response_values: Any, dtype: Any) -> list[Array]:
        flat = np.empty(len(is_response), dtype)
        flat[~is_response] = prompt_values
        flat[is_response] = response_values
        return split_rows(flat, full_lengths)

    return TokenColumns(
        prompt=split_rows(slots.prompt_T.astype(np.int64), slots.prompt_lengths_S),
        response=split_rows(slots.response_T.astype(np.int64), slots.lengths_S),
        full=joined(slots.prompt_T, slots.response_T, np.int64),
        response_logprobs=split_rows(slots.logprobs_T, slots.lengths_S),
        full_logprobs=joined(np.nan if known is None else known, slots.logprobs_T, np.float32),
        prompt_logprobs=None if known is None else split_rows(known, slots.prompt_lengths_S),
        versions=joined(NO_VERSION, slots.versions_T, np.int64),
        attention=split_rows(np.ones(len(is_response), np.bool_), full_lengths),
        assistant=split_rows(is_response, full_lengths),
    )


def split_rows(flat_T: Array, lengths_S: Int64) -> list[Array]:
    """Rows laid end to end, as S views."""
    ends = np.cumsum(lengths_S)
    return [flat_T[end - length : end] for end, length in zip(ends.tolist(), lengths_S.tolist(), strict=True)]


def _check_logprobs(completions: CompletionBatch) -> None:
    finite = np.isfinite(completions.logprobs_T)
    if finite.all():
        return
    token = int(np.flatnonzero(~finite)[0])
    sample = int(np.searchsorted(completions.offsets_N1, token, side="right")) - 1
    raise MissingLogprobError(
        int(completions.numbers_N[sample]),
        token - int(completions.offsets_N1[sample]),
        str(completions.logprobs_T[token]),
        int(completions.versions_T[token]),
    )


def _check_complete(slot_N: Int64, valid_S: NDArray[np.bool_], completions: CompletionBatch, n: int) -> None:
    failed = {failure.number for failure in completions.failures}
    missing = [slot for slot in np.flatnonzero(~valid_S).tolist() if slot // n not in failed]
    if missing:
        row, sample = divmod(missing[0], n)
        raise GenerationError(((row, f"the service returned neither sample {sample} nor a failure"),))
    if len(slot_N) != int(valid_S.sum()):
        twice = int(slot_N[np.flatnonzero(np.diff(slot_N) == 0)[0]])
        raise GenerationError(((twice // n, f"the service returned sample {twice % n} twice"),))


def _prompt_logprobs(slot_N: Int64, completions: CompletionBatch, lengths_S: Int64) -> Array | None:
    if completions.prompt_logprobs is None:
        return None
    flat = np.full(int(lengths_S.sum()), np.nan, np.float32)
    starts = np.cumsum(lengths_S) - lengths_S
    for slot, values in zip(slot_N.tolist(), completions.prompt_logprobs, strict=True):
        flat[starts[slot] : starts[slot] + len(values)] = values
    return flat


def _seconds(slot_N: Int64, completions: CompletionBatch, count: int) -> Array:
    spread = np.full(count, np.nan, np.float32)
    if completions.seconds_N is not None:
        spread[slot_N] = completions.seconds_N
    return spread


def _positions(starts_S: Int64, lengths_S: Int64) -> Int64:
    """Flat positions of rows that begin at ``starts_S``, one row after the other."""
    shift = starts_S - (np.cumsum(lengths_S) - lengths_S)
    positions: Int64 = np.repeat(shift, lengths_S) + np.arange(int(lengths_S.sum()))
    return positions


def _spread(slot_N: Int64, values_N: Array, count: int, default: int) -> Int64:
    spread = np.full(count, int(default), np.int64)
    spread[slot_N] = values_N
    return spread


def _spread_objects(slot_N: Int64, values_N: tuple[Any, ...], count: int, default: Any) -> list[Any]:
    spread = [default] * count
    for slot, value in zip(slot_N.tolist(), values_N, strict=True):
        spread[slot] = value
    return spread


def left_mask(lengths_S: Int64) -> NDArray[np.bool_]:
    """Bool [S, longest], True where rows that are padded on the left have their values."""
    width = int(lengths_S.max(initial=0))
    return np.arange(width) >= width - lengths_S[:, None]


def _right_mask(lengths_S: Int64) -> NDArray[np.bool_]:
    return np.arange(int(lengths_S.max(initial=0))) < lengths_S[:, None]


def fill(mask: NDArray[np.bool_], values: Any, dtype: Any, padding: float) -> Array:
    """Values laid row after row into the True positions, padding elsewhere."""
    filled = np.full(mask.shape, padding, dtype)
    filled[mask] = values
    return filled

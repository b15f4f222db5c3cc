"""Make a batch fit the engine: refuse what cannot be sent, clamp lengths, spread seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from rl_vllm.config import require_member
from rl_vllm.errors import BadPromptError
from rl_vllm.types import BadPrompt, ModelInfo, PromptBatch, RequestFailure, SamplingConfig

_MASK_64 = (1 << 64) - 1


def find_bad_prompts(
    prompts: PromptBatch, model: ModelInfo, unreadable: Mapping[int, str] | None = None, *, room: int = 1
) -> dict[int, str]:
    """Rows that no engine could answer, with the reason and the remedy.

    Args:
        prompts: The batch.
        model: The served model.
        unreadable: Rows that are known to be bad already, with the reason.
        room: Tokens that a response needs at least: 1, or 0 for an embedding.
    """
    lengths_B = prompts.lengths_B
    reasons = dict(unreadable or {})
    for row in np.flatnonzero(lengths_B == 0):
        reasons.setdefault(int(row), "it is empty: give at least one token")
    for row in np.flatnonzero(lengths_B > model.max_model_len - room):
        left = "which leaves no room for a response in" if room else "more than"
        reasons[int(row)] = (
            f"it has {lengths_B[row]} tokens, {left} max_model_len={model.max_model_len}: shorten it or raise "
            "max_model_len"
        )
    outside = np.flatnonzero((prompts.tokens_T < 0) | (prompts.tokens_T >= model.vocab_size))
    rows = np.searchsorted(prompts.offsets_B1, outside, side="right") - 1
    # One id per row is enough to say, and a prompt may hold millions.
    for row, first in zip(*np.unique(rows, return_index=True), strict=True):
        position = int(outside[first])
        reasons.setdefault(
            int(row),
            f"token id {prompts.tokens_T[position]} at position {position - prompts.offsets_B1[row]} is outside the "
            f"vocabulary [0, {model.vocab_size}): was it encoded with this model's tokenizer?",
        )
    return reasons


def check_prompts(
    prompts: PromptBatch,
    model: ModelInfo,
    on_bad_prompt: BadPrompt,
    unreadable: Mapping[int, str] | None = None,
    *,
    room: int = 1,
) -> tuple[list[int], tuple[RequestFailure, ...]]:
    """Rows to send and failures of the others, in row order; see :func:`find_bad_prompts`.

    Raises:
        BadPromptError: A row is bad and ``on_bad_prompt`` is ``RAISE``; nothing has been sent.
        ConfigError: ``on_bad_prompt`` is no :class:`BadPrompt`.
    """
    require_member("on_bad_prompt", on_bad_prompt, BadPrompt)
    reasons = find_bad_prompts(prompts, model, unreadable, room=room)
    if reasons and on_bad_prompt is BadPrompt.RAISE:
        row = min(reasons)
        raise BadPromptError(row, reasons[row])
    good = [row for row in range(len(prompts)) if row not in reasons]
    return good, tuple(RequestFailure(row, reasons[row]) for row in sorted(reasons))


def settings_per_row(
    prompts: PromptBatch, rows: Sequence[int], sampling: SamplingConfig | Sequence[SamplingConfig], model: ModelInfo
) -> tuple[SamplingConfig, ...]:
    """Sampling settings of each row: response length clamped to the context, its own seed.

    Args:
        prompts: The batch.
        rows: Rows to send.
        sampling: One for all prompts of the batch, or one for each.
        model: The served model.

    Returns:
        One per entry of ``rows``; those with equal settings from one object share one object.
    """
    settings: dict[tuple[int, int, int | None], SamplingConfig] = {}
    result = []
    lengths = prompts.lengths_B
    for row in rows:
        asked = sampling if isinstance(sampling, SamplingConfig) else sampling[row]
        room = model.max_model_len - int(lengths[row])
        limit = room if asked.max_tokens is None else min(asked.max_tokens, room)
        seed = None if asked.seed is None else row_seed(asked.seed, row)
        key = (id(asked), limit, seed)
        if key not in settings:
            settings[key] = replace(asked, max_tokens=limit, min_tokens=min(asked.min_tokens, limit), seed=seed)
        result.append(settings[key])
    return tuple(result)


def row_seed(seed: int, row: int) -> int:
    """Seed of one row, in [0, 2**62): distinct rows and base seeds give unrelated seeds.

    The engine adds the sample's index to it for ``n > 1``, so neighbouring rows must not have neighbouring seeds.
    Source: SplitMix64's output function (Steele, Lea, Flood 2014), applied to ``seed`` and then to ``row``.
    """
    return _mix((_mix(seed & _MASK_64) + row) & _MASK_64) >> 2


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)

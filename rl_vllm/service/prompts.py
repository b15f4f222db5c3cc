"""Make a batch fit the engine: refuse what cannot be sent, clamp lengths, spread seeds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rl_vllm.config import require_member
from rl_vllm.errors import BadPromptError
from rl_vllm.types import BadPrompt, ModelInfo, PromptBatch, RequestFailure, SamplingConfig

_MASK_64 = (1 << 64) - 1


def find_bad_prompts(prompts: PromptBatch, model: ModelInfo) -> dict[int, str]:
    """Rows that no engine could answer, with the reason and the remedy."""
    lengths_B = prompts.lengths_B
    reasons = {int(row): "it is empty: give at least one token" for row in np.flatnonzero(lengths_B == 0)}
    for row in np.flatnonzero(lengths_B >= model.max_model_len):
        reasons[int(row)] = (
            f"it has {lengths_B[row]} tokens, which leaves no room for a response in max_model_len="
            f"{model.max_model_len}: shorten it or raise max_model_len"
        )
    outside = np.flatnonzero((prompts.tokens_T < 0) | (prompts.tokens_T >= model.vocab_size))
    for position in outside:
        row = int(np.searchsorted(prompts.offsets_B1, position, side="right")) - 1
        reasons.setdefault(
            row,
            f"token id {prompts.tokens_T[position]} at position {position - prompts.offsets_B1[row]} is outside the "
            f"vocabulary [0, {model.vocab_size}): was it encoded with this model's tokenizer?",
        )
    return reasons


def check_prompts(
    prompts: PromptBatch, model: ModelInfo, on_bad_prompt: BadPrompt
) -> tuple[list[int], tuple[RequestFailure, ...]]:
    """Rows to send and failures of the others, in row order.

    Raises:
        BadPromptError: A row is bad and ``on_bad_prompt`` is ``RAISE``; nothing has been sent.
        ConfigError: ``on_bad_prompt`` is no :class:`BadPrompt`.
    """
    require_member("on_bad_prompt", on_bad_prompt, BadPrompt)
    reasons = find_bad_prompts(prompts, model)
    if reasons and on_bad_prompt is BadPrompt.RAISE:
        row = min(reasons)
        raise BadPromptError(row, reasons[row])
    good = [row for row in range(len(prompts)) if row not in reasons]
    return good, tuple(RequestFailure(row, reasons[row]) for row in sorted(reasons))


def settings_per_row(
    prompts: PromptBatch, rows: list[int], sampling: SamplingConfig, model: ModelInfo
) -> tuple[SamplingConfig, ...]:
    """Sampling settings of each row: response length clamped to the context, its own seed.

    Rows with equal settings share one object.
    """
    settings: dict[tuple[int, int | None], SamplingConfig] = {}
    result = []
    lengths = prompts.lengths_B
    for row in rows:
        room = model.max_model_len - int(lengths[row])
        limit = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        seed = None if sampling.seed is None else row_seed(sampling.seed, row)
        key = (limit, seed)
        if key not in settings:
            settings[key] = replace(sampling, max_tokens=limit, min_tokens=min(sampling.min_tokens, limit), seed=seed)
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

"""Prompts in every form that ``vllm.LLM.generate`` takes, as token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rl_vllm.errors import BadInputError
from rl_vllm.types import PromptBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | Mapping[str, Any] | Sequence[int]
Prompts = Prompt | Sequence[Prompt]


@dataclass(frozen=True, slots=True)
class ParsedPrompts:
    """The batch, and whether the caller gave one prompt or many.

    Attributes:
        batch: Token ids.
        texts: Each prompt's text, None where ids were given.
        single: One prompt was given, not a list of one.
    """

    batch: PromptBatch
    texts: tuple[str | None, ...]
    single: bool


def parse_prompts(
    prompts: Prompts | None, prompt_token_ids: object, tokenizer: PreTrainedTokenizerBase | None
) -> ParsedPrompts:
    """Read prompts: a string, a ``TokensPrompt``, ids in a list or a 1-D array (one prompt), or many of any of these.

    Raises:
        BadInputError: Both or neither argument is given, a prompt has an unknown form, or there is text and no
            tokenizer.
    """
    if (prompts is None) == (prompt_token_ids is None):
        raise BadInputError("give either prompts or prompt_token_ids, not " + ("none" if prompts is None else "both"))
    given: Any = prompts if prompts is not None else prompt_token_ids
    single = isinstance(given, str | Mapping) or _is_ids(given)
    if not single and not isinstance(given, Iterable):
        raise BadInputError(f"prompts must be text, token ids or a list of them, got {type(given).__name__}")
    items = [given] if single else list(given)
    rows: list[Sequence[int]] = []
    texts: list[str | None] = []
    for index, item in enumerate(items):
        ids, text = _read(item, index, tokenizer)
        rows.append(ids)
        texts.append(text)
    return ParsedPrompts(PromptBatch.from_rows(rows), tuple(texts), single)


def _read(item: object, index: int, tokenizer: PreTrainedTokenizerBase | None) -> tuple[Sequence[int], str | None]:
    if isinstance(item, Mapping):
        if "prompt_token_ids" in item:
            return _checked_ids(item["prompt_token_ids"], index), item.get("prompt")
        if "prompt" in item:
            item = item["prompt"]
        else:
            raise BadInputError(f"prompt {index} is a mapping without 'prompt' or 'prompt_token_ids': {sorted(item)}")
    if isinstance(item, str):
        if tokenizer is None:
            raise BadInputError(f"prompt {index} is text, but this service has no tokenizer: give token ids")
        return tokenizer.encode(item), item
    return _checked_ids(item, index), None


def _is_ids(value: object) -> bool:
    """Whether this is one prompt of ids; an empty list is an empty batch."""
    if isinstance(value, np.ndarray | torch.Tensor):
        return value.ndim < 2
    return isinstance(value, Sequence) and len(value) > 0 and all(_is_id(item) for item in value)


def _is_id(item: object) -> bool:
    return isinstance(item, int | np.integer) and not isinstance(item, bool)


def _checked_ids(value: object, index: int) -> Sequence[int]:
    ids = value.tolist() if isinstance(value, np.ndarray | torch.Tensor) and value.ndim == 1 else value
    if not isinstance(ids, Sequence) or isinstance(ids, str):
        raise BadInputError(f"prompt {index} must be text or a list of token ids, got {type(value).__name__}")
    wrong = next((item for item in ids if not _is_id(item)), None)
    if wrong is not None:
        raise BadInputError(f"prompt {index} holds {wrong!r} ({type(wrong).__name__}), which is not a token id")
    if any(not -(2**31) <= item < 2**31 for item in ids):
        raise BadInputError(f"prompt {index} holds an id that does not fit 32 bits: {max(ids, key=abs)}")
    return ids

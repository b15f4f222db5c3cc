"""Prompts in every form that ``vllm.LLM.generate`` takes, as token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rl_vllm.errors import BadInputError, BadPromptError
from rl_vllm.types import BadPrompt, ModelInfo, PromptBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | Mapping[str, Any] | Sequence[int]
Prompts = Prompt | Sequence[Prompt]

# More than any vocabulary's longest token: a longer text is too long whatever its tokens are, and encoding megabytes to
# learn by how much takes seconds.
MAX_CHARS_PER_TOKEN = 512


@dataclass(frozen=True, slots=True)
class ParsedPrompts:
    """The batch, and whether the caller gave one prompt or many.

    Attributes:
        batch: Token ids; of a row that could not be read, none.
        texts: Each prompt's text, None where ids were given.
        single: One prompt was given, not a list of one.
        bad: Reason for each row that could not be read.
    """

    batch: PromptBatch
    texts: tuple[str | None, ...]
    single: bool
    bad: Mapping[int, str] = field(default_factory=dict)


def parse_prompts(
    prompts: Prompts | None,
    prompt_token_ids: object,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    max_model_len: int | None = None,
    on_bad_prompt: BadPrompt = BadPrompt.RAISE,
) -> ParsedPrompts:
    """Read prompts: a string, a ``TokensPrompt``, ids in a list or a 1-D array (one prompt), or many of any of these.

    Args:
        prompts: In any of the forms.
        prompt_token_ids: Ids of one prompt or of many, in place of ``prompts``.
        tokenizer: For texts; None when the service runs on ids alone.
        max_model_len: A text that cannot fit is not encoded; None encodes every text.
        on_bad_prompt: Whether a row that is no prompt raises or is listed in ``bad``.

    Raises:
        BadInputError: Neither or both arguments are given, or what is given is no prompt and no list of prompts.
        BadPromptError: A row is no prompt, with ``on_bad_prompt=RAISE``.
    """
    if (prompts is None) == (prompt_token_ids is None):
        raise BadInputError("give either prompts or prompt_token_ids, not " + ("none" if prompts is None else "both"))
    given: Any = prompts if prompts is not None else prompt_token_ids
    single = isinstance(given, str | Mapping) or _is_ids(given)
    if not single and not isinstance(given, Iterable):
        raise BadInputError(f"prompts must be text, token ids or a list of them, got {type(given).__name__}")
    items = [given] if single else list(given)
    reader = PromptReader(tokenizer, max_model_len)
    rows: list[Sequence[int]] = []
    texts: list[str | None] = []
    bad: dict[int, str] = {}
    for index, item in enumerate(items):
        try:
            ids, text = reader.read(item)
        except _UnreadableError as error:
            if on_bad_prompt is BadPrompt.RAISE:
                raise BadPromptError(index, str(error)) from None
            ids, text = [], item if isinstance(item, str) else None
            bad[index] = str(error)
        rows.append(ids)
        texts.append(text)
    return ParsedPrompts(PromptBatch.from_rows(rows), tuple(texts), single, bad)


class InputPreprocessor:
    """Turns prompts into what ``generate`` sends; stands for vLLM's object of this name, which 0.32 no longer has.

    Args:
        tokenizer: None when the service runs on ids alone.
        model: Facts of the served model.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, model: ModelInfo) -> None:
        self.tokenizer = tokenizer
        self.model = model

    def preprocess(self, prompt: Prompt) -> dict[str, object]:
        """One prompt as a ``TokensPrompt``: ``prompt_token_ids``, and ``prompt`` where text was given.

        Raises:
            BadInputError: It has no known form.
            BadPromptError: It cannot be read.
        """
        parsed = parse_prompts(prompt, None, self.tokenizer, max_model_len=self.model.max_model_len)
        if not parsed.single:
            raise BadInputError(f"give one prompt, got a list of {len(parsed.batch)}")
        ids: dict[str, object] = {"prompt_token_ids": parsed.batch.row(0).tolist()}
        return ids if parsed.texts[0] is None else {**ids, "prompt": parsed.texts[0]}


class _UnreadableError(Exception):
    """A row is no prompt; says why."""


class PromptReader:
    """Reads one prompt at a time."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, max_model_len: int | None) -> None:
        self._tokenizer = tokenizer
        self._max_chars = None if max_model_len is None else max_model_len * MAX_CHARS_PER_TOKEN

    def read(self, item: object) -> tuple[Sequence[int], str | None]:
        """Its ids, and its text where there is one."""
        if isinstance(item, Mapping):
            text = item.get("prompt")
            if "prompt_token_ids" in item:
                return _checked_ids(item["prompt_token_ids"]), text if isinstance(text, str) else None
            if "prompt" not in item:
                raise _UnreadableError(f"it is a mapping without 'prompt' or 'prompt_token_ids': {sorted(item)}")
            item = text
        if isinstance(item, str):
            return self._encode(item), item
        return _checked_ids(item), None

    def _encode(self, text: str) -> Sequence[int]:
        if self._tokenizer is None:
            raise _UnreadableError("it is text, but this service has no tokenizer: give token ids")
        if self._max_chars is not None and len(text) > self._max_chars:
            raise _UnreadableError(
                f"it has {len(text)} characters, more than {MAX_CHARS_PER_TOKEN} for each token of max_model_len="
                f"{self._max_chars // MAX_CHARS_PER_TOKEN}: shorten it or raise max_model_len"
            )
        ids: list[int] = self._tokenizer.encode(text)
        return ids


def _is_ids(value: object) -> bool:
    """Whether this is one prompt of ids, or meant as one; an empty list is an empty batch."""
    if isinstance(value, np.ndarray | torch.Tensor):
        return value.ndim < 2
    return isinstance(value, Sequence) and len(value) > 0 and all(_is_number(item) for item in value)


def _is_number(item: object) -> bool:
    return isinstance(item, int | float | np.number | np.bool_) or (isinstance(item, torch.Tensor) and item.ndim == 0)


def _is_id(item: object) -> bool:
    return isinstance(item, int | np.integer) and not isinstance(item, bool)


def _checked_ids(value: object) -> Sequence[int]:
    ids = value.tolist() if isinstance(value, np.ndarray | torch.Tensor) and value.ndim == 1 else value
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise _UnreadableError(f"it must be text or a list of token ids, got {type(value).__name__}")
    # Millions of ids are looked at one by one only when one of them is no plain int.
    if set(map(type, ids)) - {int}:
        ids = [item.item() if isinstance(item, torch.Tensor) and item.ndim == 0 else item for item in ids]
        for item in ids:
            if not _is_id(item):
                raise _UnreadableError(f"it holds {_in_short(item)} ({type(item).__name__}), which is not a token id")
    if len(ids) and not (min(ids) >= -(2**31) and max(ids) < 2**31):
        raise _UnreadableError(f"it holds an id that does not fit 32 bits: {max(ids, key=abs)}")
    return ids


def _in_short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "..."

"""Response ids as the text that follows the prompt, at once or as it is made."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from rl_vllm.types import CompletionBatch, FinishReason, ModelInfo, PromptBatch, SamplingConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Enough of the prompt for a tokenizer to know whether the response begins inside a word.
_CONTEXT_TOKENS = 5
_BROKEN_CHARACTER = "\ufffd"


def decode_samples(
    tokenizer: PreTrainedTokenizerBase | None,
    prompts: PromptBatch,
    batch: CompletionBatch,
    sampling: SamplingConfig | Sequence[SamplingConfig],
) -> list[str]:
    """Text of each sample, as vLLM makes it: what decoding it after its prompt adds, up to what ended it.

    The EOS, stop id or stop string that ended a sample is left out unless ``include_stop_str_in_output`` is set.
    Without a tokenizer every text is empty.

    Args:
        tokenizer: The model's, or None.
        prompts: The batch.
        batch: Its samples; ``numbers_N`` holds rows.
        sampling: One for all prompts of the batch, or one for each.
    """
    if tokenizer is None or len(batch) == 0:
        return [""] * len(batch)
    rows = batch.numbers_N.tolist()
    settings = [sampling if isinstance(sampling, SamplingConfig) else sampling[row] for row in rows]
    texts = [""] * len(batch)
    for skip in {each.skip_special_tokens for each in settings}:
        indices = [index for index, each in enumerate(settings) if each.skip_special_tokens is skip]
        contexts = [context_ids(prompts, rows[index]) for index in indices]
        samples = [_shown_ids(batch, index, settings[index]) for index in indices]
        before = tokenizer.batch_decode(contexts, skip_special_tokens=skip)
        joined = [context + sample for context, sample in zip(contexts, samples, strict=True)]
        after = tokenizer.batch_decode(joined, skip_special_tokens=skip)
        for index, sample, prefix, whole in zip(indices, samples, before, after, strict=True):
            # A character that the sample began and did not end is left out.
            text = whole[_shared_length(prefix, whole) :].rstrip(_BROKEN_CHARACTER)
            stop = batch.stops_N[index]
            if isinstance(stop, str):
                # A stop string counts from the first one that ends after the ``min_tokens``.
                ignored = tokenizer.decode(sample[: settings[index].min_tokens], skip_special_tokens=skip)
                keep = settings[index].include_stop_str_in_output
                text = _cut(text, stop, len(ignored), keep_stop=keep)
            texts[index] = text
    return texts


def context_ids(prompts: PromptBatch, row: int) -> list[int]:
    """The end of a prompt, which the text of its response depends on."""
    ids: list[int] = prompts.row(row)[-_CONTEXT_TOKENS:].tolist()
    return ids


class TextStream:
    """Text of one sample while it is made: its parts, joined, are what :func:`decode_samples` makes of the whole.

    What later ids may still change is held back: a character that is not complete, what may become a stop string, and
    an id that may turn out to have ended the sample.

    Args:
        tokenizer: The model's.
        context: :func:`context_ids` of its prompt.
        sampling: The request's settings.
        model: Says which ids end a sample.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, context: list[int], sampling: SamplingConfig, model: ModelInfo
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = sampling.skip_special_tokens
        self._ids = list(context)
        # As vLLM does it: ids from ``_start`` are decoded, those before ``_read`` are in ``_decoded`` already.
        self._start = 0
        self._read = len(context)
        self._decoded = ""
        self._shown = 0
        self._ending = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else model.eos_token_ids)}
        self._held_chars = max((len(stop) - 1 for stop in sampling.stop), default=0)
        self._before = self._decode(0, len(context))

    def push(self, ids: Sequence[int]) -> str:
        """Take further ids; the text that is certain now and was not before."""
        self._ids += ids
        end = len(self._ids)
        if end > self._read and self._ids[-1] in self._ending:
            end -= 1
        if end > self._read:
            text = self._decode(self._start, end)
            added = text[_shared_length(self._before, text) :]
            if added and not text.endswith(_BROKEN_CHARACTER):
                self._decoded += added
                self._start, self._read = self._read, end
                self._before = self._decode(self._start, end)
        return self._show(len(self._decoded) - self._held_chars)

    def finish(self, whole: str) -> str:
        """The rest, given the text of the whole sample."""
        shown, self._decoded, self._shown = self._shown, whole, len(whole)
        return whole[shown:]

    @property
    def text(self) -> str:
        """What has been shown so far."""
        return self._decoded[: self._shown]

    def _show(self, end: int) -> str:
        start = self._shown
        self._shown = max(start, end)
        return self._decoded[start : self._shown]

    def _decode(self, start: int, end: int) -> str:
        text = self._tokenizer.decode(self._ids[start:end], skip_special_tokens=self._skip)
        assert isinstance(text, str), "one row of ids is one text"
        return text


def _shared_length(prefix: str, whole: str) -> int:
    """Characters that both begin with: fewer than ``prefix`` has when it ends inside a character."""
    if whole.startswith(prefix):
        return len(prefix)
    return next(i for i, (old, new) in enumerate(zip_longest(prefix, whole)) if old != new)


def _shown_ids(batch: CompletionBatch, index: int, sampling: SamplingConfig) -> list[int]:
    """A sample's ids without the EOS or stop id that ended it, unless that is to be kept."""
    ids: list[int] = batch.tokens(index).tolist()
    ended_by_id = batch.finish_N[index] == FinishReason.STOP and not isinstance(batch.stops_N[index], str)
    return ids[:-1] if ended_by_id and not sampling.include_stop_str_in_output else ids


def _cut(text: str, stop: str, ignored_chars: int, *, keep_stop: bool) -> str:
    position = text.find(stop, max(0, ignored_chars - len(stop) + 1))
    if position < 0:
        return text
    return text[: position + len(stop)] if keep_stop else text[:position]

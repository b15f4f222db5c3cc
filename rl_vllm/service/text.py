"""Response ids as the text that follows the prompt."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

from rl_vllm.types import CompletionBatch, FinishReason, PromptBatch, SamplingConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Enough of the prompt for a tokenizer to know whether the response begins inside a word.
_CONTEXT_TOKENS = 5
_BROKEN_CHARACTER = "\ufffd"


def decode_samples(
    tokenizer: PreTrainedTokenizerBase | None, prompts: PromptBatch, batch: CompletionBatch, sampling: SamplingConfig
) -> list[str]:
    """Text of each sample, as vLLM makes it: what decoding it after its prompt adds, up to what ended it.

    The EOS, stop id or stop string that ended a sample is left out unless ``include_stop_str_in_output`` is set.
    Without a tokenizer every text is empty.
    """
    if tokenizer is None or len(batch) == 0:
        return [""] * len(batch)
    skip = sampling.skip_special_tokens
    contexts = [prompts.row(row)[-_CONTEXT_TOKENS:].tolist() for row in batch.numbers_N.tolist()]
    samples = [_shown_ids(batch, index, sampling) for index in range(len(batch))]
    before = tokenizer.batch_decode(contexts, skip_special_tokens=skip)
    joined = [context + sample for context, sample in zip(contexts, samples, strict=True)]
    after = tokenizer.batch_decode(joined, skip_special_tokens=skip)
    texts = []
    for index, (prefix, whole) in enumerate(zip(before, after, strict=True)):
        # A character that the sample began and did not end is left out.
        text = whole[_shared_length(prefix, whole) :].rstrip(_BROKEN_CHARACTER)
        stop = batch.stops_N[index]
        if isinstance(stop, str):
            # A stop string counts from the first one that ends after the ``min_tokens``.
            ignored = tokenizer.decode(samples[index][: sampling.min_tokens], skip_special_tokens=skip)
            text = _cut(text, stop, len(ignored), keep_stop=sampling.include_stop_str_in_output)
        texts.append(text)
    return texts


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

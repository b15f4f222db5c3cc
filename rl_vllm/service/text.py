"""Response ids as the text that follows the prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_vllm.types import CompletionBatch, PromptBatch, SamplingConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Enough of the prompt for a tokenizer to know whether the response begins inside a word.
_CONTEXT_TOKENS = 5


def decode_samples(
    tokenizer: PreTrainedTokenizerBase | None, prompts: PromptBatch, batch: CompletionBatch, sampling: SamplingConfig
) -> list[str]:
    """Text of each sample: what decoding it after its prompt adds, cut at the stop string that ended it.

    Without a tokenizer every text is empty, as vLLM's is.
    """
    if tokenizer is None:
        return [""] * len(batch)
    skip = sampling.skip_special_tokens
    contexts = [prompts.row(row)[-_CONTEXT_TOKENS:].tolist() for row in batch.numbers_N.tolist()]
    samples = [batch.tokens(index).tolist() for index in range(len(batch))]
    before = tokenizer.batch_decode(contexts, skip_special_tokens=skip)
    joined = [context + sample for context, sample in zip(contexts, samples, strict=True)]
    after = tokenizer.batch_decode(joined, skip_special_tokens=skip)
    texts = []
    for index, (prefix, whole) in enumerate(zip(before, after, strict=True)):
        # A prefix that ends inside a character decodes differently with what follows; then the sample stands alone.
        stands_alone = not whole.startswith(prefix)
        text = tokenizer.decode(samples[index], skip_special_tokens=skip) if stands_alone else whole[len(prefix) :]
        texts.append(_cut(text, batch.stops_N[index], keep_stop=sampling.include_stop_str_in_output))
    return texts


def _cut(text: str, stop: str | int | None, *, keep_stop: bool) -> str:
    if not isinstance(stop, str):
        return text
    position = text.find(stop)
    if position < 0:
        return text
    return text[: position + len(stop)] if keep_stop else text[:position]

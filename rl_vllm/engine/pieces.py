"""Pieces of responses: the tokens that came since the last one, with the weights that made them.

vLLM is asked for cumulative outputs, whose ids and logprobs are its own growing lists: it copies nothing for a step
that nobody has read, where its deltas are cut and merged again at every step. It tells the versions of whole responses
only; but its record of an unfinished sample describes, like the lists, the tokens that it has processed until now.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
from vllm.v1.engine.output_processor import OutputProcessor


def cut_piece(
    output: RequestOutput, request_id: str, processor: OutputProcessor, sent: dict[int, int]
) -> dict[int, int]:
    """Leave in each sample of ``output`` what is new: ids, logprobs, and version spans counted from the first of it.

    Samples without news are left out, and prompt logprobs come with the first piece only. Call it in the same turn of
    the loop that took ``output`` from its collector.

    Args:
        output: A cumulative output, changed in place.
        request_id: vLLM's internal id of the request.
        processor: Where vLLM keeps unfinished samples.
        sent: Number of tokens delivered of each sample by index; brought up to date.

    Returns:
        The numbers in ``sent`` as they were, for the samples that are left.
    """
    begins: dict[int, int] = {}
    samples = []
    for sample in output.outputs:
        begin = sent.get(sample.index, 0)
        end = len(sample.token_ids)
        if end == begin and not sample.finished():
            continue
        spans = _spans(sample, request_id, processor, end)
        # New lists: the old ones are vLLM's.
        sample.token_ids = sample.token_ids[begin:end]
        sample.logprobs = None if sample.logprobs is None else sample.logprobs[begin:end]
        sample.weight_versions = [
            WeightVersionSpan(span.version, max(span.start, begin) - begin, min(span.end, end) - begin)
            for span in spans
            if span.start < end and span.end > begin
        ]
        begins[sample.index] = begin
        sent[sample.index] = end
        samples.append(sample)
    output.outputs = samples
    if all(begins.values()):
        output.prompt_logprobs = None
    return begins


def _spans(
    sample: CompletionOutput, request_id: str, processor: OutputProcessor, end: int
) -> Sequence[WeightVersionSpan]:
    """The versions of a sample's tokens from the first on."""
    if sample.finished():
        return sample.weight_versions or ()
    # With several samples each is a request of its own, under the index and the parent's id.
    name = request_id if request_id in processor.request_states else f"{sample.index}_{request_id}"
    starts = processor.request_states[name].weight_version_starts
    ends = [start for _, start in starts[1:]] + [end]
    return [WeightVersionSpan(version, start, stop) for (version, start), stop in zip(starts, ends, strict=True)]

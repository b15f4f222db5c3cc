"""From chunks of the engines to what the caller of a generating or pooling call gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rl_vllm.errors import GenerationError
from rl_vllm.service.jobs import GenerateJob, Job
from rl_vllm.service.outputs import (
    OutputOptions,
    PoolingRequestOutput,
    RequestOutput,
    to_pooling_outputs,
    to_request_outputs,
)
from rl_vllm.service.text import decode_samples
from rl_vllm.types import BadPrompt, CompletionBatch, EmbeddingBatch, RequestFailure

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def collect(work: GenerateJob, groups: Sequence[Sequence[CompletionBatch]]) -> CompletionBatch:
    """The whole answer in the order of the rows, with the rows that have none.

    Raises:
        GenerationError: The engine refused rows, with ``on_bad_prompt=RAISE``.
    """
    joined = (work.fill(CompletionBatch.concatenate(chunks)) for chunks in groups)
    batch = CompletionBatch.concatenate(joined).sorted_rows()
    return batch.with_failures(failures_of(work.job, batch.failures))


class ChunkReader:
    """Makes of what comes from the engines what the reader of a stream gets.

    Args:
        work: What was asked.
    """

    def __init__(self, work: GenerateJob) -> None:
        self._work = work
        self._raises = work.job.on_bad_prompt is BadPrompt.RAISE
        self._failed: list[RequestFailure] = []

    def refused(self) -> CompletionBatch | None:
        """What can be said before anything is sent: the rows that are not."""
        failures = self._work.job.refused
        return self._work.fill(CompletionBatch.empty()).with_failures(failures) if failures else None

    def read(self, chunk: CompletionBatch) -> CompletionBatch | None:
        """A chunk with the columns of all, or None when it has nothing for the reader."""
        if self._raises:
            self._failed.extend(chunk.failures)
            chunk = chunk.with_failures(())
        return self._work.fill(chunk) if len(chunk) or chunk.failures else None

    def end(self) -> None:
        """After the last one.

        Raises:
            GenerationError: The engine refused rows, with ``on_bad_prompt=RAISE``.
        """
        failures_of(self._work.job, self._failed)


def failures_of(job: Job, failures: Sequence[RequestFailure]) -> list[RequestFailure]:
    """All failures of a call in the order of the rows, the refused ones included.

    Raises:
        GenerationError: The engine refused rows, with ``on_bad_prompt=RAISE``.
    """
    ordered = sorted(failures, key=lambda failure: failure.number)
    if ordered and job.on_bad_prompt is BadPrompt.RAISE:
        raise GenerationError(tuple((failure.number, failure.reason) for failure in ordered))
    return sorted([*ordered, *job.refused], key=lambda failure: failure.number)


def present(
    work: GenerateJob, groups: Sequence[Sequence[CompletionBatch]], tokenizer: PreTrainedTokenizerBase | None
) -> RequestOutput | list[RequestOutput]:
    """The answer as ``generate`` returns it.

    Raises:
        GenerationError: The engine refused rows, with ``on_bad_prompt=RAISE``.
    """
    job = work.job
    # One call names all rows that failed, whatever group they were in.
    failed = failures_of(job, [failure for chunks in groups for chunk in chunks for failure in chunk.failures])
    options = OutputOptions(job.parsed.texts, work.with_logprobs, job.adapters)
    outputs: list[RequestOutput] = []
    for chunks in groups or [[]]:
        batch = CompletionBatch.concatenate(chunks).sorted_rows().with_failures(failed)
        texts = decode_samples(tokenizer, job.prompts, batch, work.sampling)
        mine = to_request_outputs(job.prompts, batch, texts, options)
        outputs = [new if new.outputs else old for old, new in zip(outputs or mine, mine, strict=True)]
    return outputs[0] if job.parsed.single else outputs


def present_vectors(job: Job, chunks: Sequence[EmbeddingBatch]) -> PoolingRequestOutput | list[PoolingRequestOutput]:
    """The answer as ``encode`` returns it.

    Raises:
        GenerationError: The engine refused rows, with ``on_bad_prompt=RAISE``.
    """
    batch = EmbeddingBatch.concatenate(chunks)
    batch = replace(batch, failures=tuple(failures_of(job, batch.failures)))
    outputs = to_pooling_outputs(job.prompts, job.parsed.texts, batch)
    return outputs[0] if job.parsed.single else outputs

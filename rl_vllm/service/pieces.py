"""Streamed pieces as outputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rl_vllm.service.outputs import RequestOutput, join_pieces, prompt_logprobs_of, to_sample
from rl_vllm.service.requests import LiveRequest
from rl_vllm.service.text import TextStream, context_ids, decode_samples
from rl_vllm.types import CompletionBatch, FinishReason, ModelInfo

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODES = ("delta", "cumulative")


@dataclass(slots=True)
class _Sample:
    """One sample so far."""

    text: TextStream | None
    pieces: list[CompletionBatch] = field(default_factory=list)
    cumulative_logprob: float = 0.0

    def joined(self) -> CompletionBatch:
        """All so far as one piece, kept in place of the others: the next join is of two."""
        if len(self.pieces) > 1:
            self.pieces = [join_pieces(self.pieces)]
        return self.pieces[0]


class PieceReader:
    """Turns the pieces of one request into outputs, in the reader's thread.

    Args:
        live: The request.
        tokenizer: None when the service runs on ids alone: every text is empty.
        model: The served model.
        cumulative: Whether an output holds all so far, or what is new.
    """

    def __init__(
        self, live: LiveRequest, tokenizer: PreTrainedTokenizerBase | None, model: ModelInfo, *, cumulative: bool
    ) -> None:
        self._record = live.record
        self._work = live.work
        self._prompts = live.work.job.prompts
        self._tokenizer = tokenizer
        self._model = model
        self._cumulative = cumulative
        self._samples: dict[int, _Sample] = {}
        self._num_finished = 0
        self._prompt_ids: list[int] = self._prompts.row(0).tolist()

    def read(self, piece: CompletionBatch) -> RequestOutput:
        """The output of one piece; it holds the samples that went on."""
        outputs = []
        for index in range(len(piece)):
            part = piece.take(np.array([index], np.intp))
            sample = self._sample_of(int(part.samples_N[0]))
            sample.pieces.append(part)
            sample.cumulative_logprob += float(part.logprobs_T.sum(dtype=np.float64))
            new = self._new_text(sample, part)
            shown = sample.joined() if self._cumulative else part
            text = sample.text.text if self._cumulative and sample.text is not None else new
            output = to_sample(shown, 0, text, with_logprobs=self._work.with_logprobs[0])
            if self._work.with_logprobs[0]:
                output.cumulative_logprob = sample.cumulative_logprob
            outputs.append(output)
            self._num_finished += output.finished()
        return RequestOutput(
            request_id=self._record.request_id,
            prompt=self._work.job.parsed.texts[0],
            prompt_token_ids=self._prompt_ids,
            prompt_logprobs=prompt_logprobs_of(self._prompts, piece, 0, range(len(piece))),
            outputs=outputs,
            num_cached_tokens=int(piece.cached_N.max(initial=0)),
            finished=self._num_finished == self._record.params.n,
            lora_request=self._record.lora_request,
        )

    def _sample_of(self, number: int) -> _Sample:
        if number not in self._samples:
            text = None
            if self._tokenizer is not None:
                context = context_ids(self._prompts, 0)
                text = TextStream(self._tokenizer, context, self._record.params, self._model)
            self._samples[number] = _Sample(text)
        return self._samples[number]

    def _new_text(self, sample: _Sample, part: CompletionBatch) -> str:
        if sample.text is None:
            return ""
        if part.finish_N[0] == FinishReason.UNFINISHED:
            return sample.text.push(part.tokens_T.tolist())
        (text,) = decode_samples(self._tokenizer, self._prompts, sample.joined(), self._record.params)
        return sample.text.finish(text)

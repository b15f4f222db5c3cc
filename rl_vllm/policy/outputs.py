"""From columns to TorchRL's tensorclasses.

===============================  ========  =====================================================================
Key                              Type      Meaning
===============================  ========  =====================================================================
``tokens.prompt``                int64     [*, P], padded on the left
``tokens.response``              int64     [*, R], padded on the right; what the model sampled, its EOS included
``tokens.full``                  int64     [*, F], prompt and response side by side, F = P + R
``masks.all_attention_mask``     bool      [*, F], True on real tokens
``masks.all_assistant_mask``     bool      [*, F], True on sampled tokens
``log_probs.response``           float32   [*, R], nats, in ``completion.logprobs_mode``; 0 on padding
``log_probs.full``               float32   [*, F], NaN on prompt tokens unless they were asked for; 0 on padding
``log_probs.prompt``             float32   [*, P], only with ``prompt_logprobs``; NaN where unknown
``policy_version``               int64     [*, F], the weights that sampled each token; -1 on prompt and padding
``text.prompt/response/full``    str       only with a tokenizer; ``full`` is the two joined
``history.prompt/response/full`` History   only in history mode; ``full`` is the prompt and the assistant's message
``completion.finish_reason``     int64     [*], a :class:`rl_vllm.types.FinishReason` number
``completion.stop_reason``       object    [*], stop string or id, None for EOS and for length
``completion.prompt_length``     int64     [*], tokens
``completion.response_length``   int64     [*], tokens
``completion.cached_tokens``     int64     [*], prompt tokens read from the prefix cache
``completion.seconds``           float32   [*], from the call to the sample's arrival; NaN where unknown
``completion.valid``             bool      [*], False when the service has no completion for the row
``completion.truncated``         bool      [*], the response ended by length
``completion.logprobs_mode``     str       the meaning of the logprobs
``completion.top_logprobs``      object    [*], ``({id: logprob}, ...)``, only with ``logprobs`` above 0
===============================  ========  =====================================================================

``*`` is the batch, with one more axis of ``num_samples`` when that is set. NaN stands for "unknown", so that nothing
takes it for a probability of 1; TorchRL's ``GRPOLoss`` leaves non-finite positions out. With ``pad_output=False`` the
per-token entries are rows of a lazy stack, without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, MetaData, NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torchrl.modules.llm.policies import LogProbs, Masks, Text, Tokens

from rl_vllm.policy.columns import Slots, TokenColumns
from rl_vllm.types import FinishReason


@dataclass(frozen=True, slots=True)
class TextRows:
    """Text of every slot."""

    prompt_S: list[str]
    response_S: list[str]


def padded_tensordict(
    columns: TokenColumns,
    slots: Slots,
    *,
    shape: torch.Size,
    device: torch.device | None,
    logprobs_mode: str,
    text: TextRows | None,
) -> TensorDict:
    """One dense tensordict of batch size ``shape``; the keys are those of the module's table."""

    def tensor(array: Any) -> torch.Tensor:
        return torch.from_numpy(array).reshape(*shape, array.shape[-1]).to(device)

    fields = {
        "tokens": Tokens(
            prompt=tensor(columns.prompt), response=tensor(columns.response), full=tensor(columns.full),
            padded=MetaData(data=True), batch_size=shape,
        ),
        "masks": Masks(
            all_attention_mask=tensor(columns.attention), all_assistant_mask=tensor(columns.assistant),
            padded=MetaData(data=True), batch_size=shape,
        ),
        "log_probs": LogProbs(
            prompt=None if columns.prompt_logprobs is None else tensor(columns.prompt_logprobs),
            response=tensor(columns.response_logprobs), full=tensor(columns.full_logprobs),
            padded=MetaData(data=True), batch_size=shape,
        ),
        "policy_version": tensor(columns.versions),
        "completion": _completion(slots, shape, device, logprobs_mode),
    }  # fmt: skip
    if text is not None:
        fields["text"] = _text(text, shape)
    return TensorDict(fields, batch_size=shape)


def ragged_tensordict(
    columns: TokenColumns,
    slots: Slots,
    *,
    shape: torch.Size,
    device: torch.device | None,
    logprobs_mode: str,
    text: TextRows | None,
) -> TensorDictBase:
    """A lazy stack of one tensordict per slot; the keys are those of the module's table."""
    facts = _completion(slots, torch.Size([len(slots)]), device, logprobs_mode).unbind(0)
    unpadded = MetaData(data=False)

    def tensors(rows: Sequence[Any]) -> list[torch.Tensor]:
        # Copies: a view would drag the whole batch along when a row is pickled or kept in a buffer.
        return [torch.from_numpy(row.copy()).to(device) for row in rows]

    prompt, response, full = tensors(columns.prompt), tensors(columns.response), tensors(columns.full)
    attention, assistant = tensors(columns.attention), tensors(columns.assistant)
    scores, full_scores = tensors(columns.response_logprobs), tensors(columns.full_logprobs)
    prompt_scores = None if columns.prompt_logprobs is None else tensors(columns.prompt_logprobs)
    versions = tensors(columns.versions)
    rows = []
    for s in range(len(slots)):
        fields = {
            "tokens": Tokens(prompt=prompt[s], response=response[s], full=full[s], padded=unpadded),
            "masks": Masks(all_attention_mask=attention[s], all_assistant_mask=assistant[s], padded=unpadded),
            "log_probs": LogProbs(
                prompt=None if prompt_scores is None else prompt_scores[s],
                response=scores[s], full=full_scores[s], padded=unpadded,
            ),
            "policy_version": versions[s],
            "completion": facts[s],
        }  # fmt: skip
        if text is not None:
            joined = text.prompt_S[s] + text.response_S[s]
            fields["text"] = Text(prompt=text.prompt_S[s], response=text.response_S[s], full=joined)
        rows.append(TensorDict(fields, batch_size=()))
    return stack_rows(rows, shape)


def stack_rows(rows: Sequence[TensorDictBase], shape: torch.Size) -> TensorDictBase:
    """Nested lazy stacks of batch size ``shape``, filled row after row; no row is copied."""
    if len(shape) == 0:
        return rows[0]
    if 0 in shape:
        return TensorDict(batch_size=shape)
    step = len(rows) // shape[0]
    return LazyStackedTensorDict(
        *[stack_rows(rows[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])], stack_dim=0
    )


def non_tensor(values: Sequence[Any], shape: torch.Size) -> Any:
    """Objects as an entry of batch size ``shape``, indexed and stacked like a tensor."""
    if all(value is None for value in values):
        return NonTensorData(None, batch_size=shape)
    if len(shape) == 0:
        return NonTensorData(values[0])
    if len(shape) == 1:
        return NonTensorStack(*[NonTensorData(value) for value in values])
    step = len(values) // shape[0]
    return NonTensorStack(*[non_tensor(values[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])])


def _completion(slots: Slots, shape: torch.Size, device: torch.device | None, logprobs_mode: str) -> TensorDict:
    def tensor(array: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).reshape(shape).to(device)

    fields = {
        "finish_reason": tensor(slots.finish_S),
        "stop_reason": non_tensor(slots.stops_S, shape),
        "prompt_length": tensor(slots.prompt_lengths_S),
        "response_length": tensor(slots.lengths_S),
        "cached_tokens": tensor(slots.cached_S),
        "seconds": tensor(slots.seconds_S),
        "valid": tensor(slots.valid_S),
        "truncated": tensor(slots.finish_S == FinishReason.LENGTH),
        "logprobs_mode": NonTensorData(logprobs_mode, batch_size=shape),
    }
    if slots.top_logprobs_S is not None:
        fields["top_logprobs"] = non_tensor(slots.top_logprobs_S, shape)
    return TensorDict(fields, batch_size=shape)


def _text(text: TextRows, shape: torch.Size) -> Text:
    full = [prompt + response for prompt, response in zip(text.prompt_S, text.response_S, strict=True)]
    return Text(
        prompt=non_tensor(text.prompt_S, shape),
        response=non_tensor(text.response_S, shape),
        full=non_tensor(full, shape),
        batch_size=shape,
    )

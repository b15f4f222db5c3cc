"""From what a policy wrote to the answer of each row."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from rl_vllm.envs.dialogue import Answer
from rl_vllm.errors import BadInputError
from rl_vllm.policy.columns import NO_VERSION
from rl_vllm.types import FinishReason

_RESPONSE = ("tokens", "response")


def read_answers(tensordict: TensorDictBase, answer_end_ids: Collection[int]) -> list[Answer]:
    """One answer per row of a tensordict of batch size [B].

    Args:
        tensordict: ``tokens.response`` [B, R] or ragged, and if there are: ``completion.response_length`` [B] (without
            it a padded row has as many as ``masks.all_assistant_mask`` marks, or all), ``log_probs.response`` (NaN
            without it), ``policy_version`` (-1), ``completion.finish_reason`` (a response that ends with an end of
            answer stopped, another one was cut by length), ``completion.stop_reason`` (None).
        answer_end_ids: What ends an answer.

    Raises:
        BadInputError: There is no response, or a row has no completion (its ``completion.valid`` is False).
    """
    responses = _rows(tensordict, _RESPONSE)
    if responses is None:
        found = sorted(str(key) for key in tensordict.keys(include_nested=True, leaves_only=True))
        raise BadInputError(f"the tensordict has no {_RESPONSE} to step with; it has: {', '.join(found)}")
    valid = _values(tensordict, ("completion", "valid"))
    if valid is not None and not all(valid):
        raise BadInputError(
            f"row {valid.index(False)} has no completion: an environment cannot go on without one; use "
            "on_bad_prompt=RAISE, or AsyncRolloutCollector, which tries again"
        )
    lengths = _lengths(tensordict, responses)
    logprobs = _rows(tensordict, ("log_probs", "response"))
    versions = _rows(tensordict, "policy_version")
    finish = _values(tensordict, ("completion", "finish_reason"))
    stops = _objects(tensordict, ("completion", "stop_reason"))
    cached = _values(tensordict, ("completion", "cached_tokens"))
    answers = []
    for row, (ids, length) in enumerate(zip(responses, lengths, strict=True)):
        tokens = ids[:length].astype(np.int32)
        ended = length > 0 and int(tokens[-1]) in answer_end_ids
        width = len(ids)
        answers.append(
            Answer(
                tokens_T=tokens,
                logprobs_T=np.full(length, np.nan, np.float32) if logprobs is None else logprobs[row][:length],
                # Versions span prompt and response: the response is at their end.
                versions_T=np.full(length, NO_VERSION) if versions is None else _tail(versions[row], width)[:length],
                finish=(FinishReason.STOP if ended else FinishReason.LENGTH) if finish is None else finish[row],
                stop=None if stops is None else stops[row],
                num_cached=0 if cached is None else cached[row],
            )
        )
    return answers


def _lengths(tensordict: TensorDictBase, responses: list[NDArray[Any]]) -> list[int]:
    stated = _values(tensordict, ("completion", "response_length"))
    if stated is not None:
        return stated
    masks = _rows(tensordict, ("masks", "all_assistant_mask"))
    if masks is None:
        return [len(row) for row in responses]
    return [int(_tail(mask, len(row)).sum()) for mask, row in zip(masks, responses, strict=True)]


def _tail(row: NDArray[Any], width: int) -> NDArray[Any]:
    return row[len(row) - width :]


def _rows(tensordict: TensorDictBase, key: Any) -> list[NDArray[Any]] | None:
    value = tensordict.get(key, None, as_list=True)
    if value is None:
        return None
    return [row.detach().cpu().numpy() for row in (value if isinstance(value, list) else value.unbind(0))]


def _values(tensordict: TensorDictBase, key: tuple[str, str]) -> list[Any] | None:
    value = tensordict.get(key, None)
    return value.reshape(-1).tolist() if isinstance(value, torch.Tensor) else None


def _objects(tensordict: TensorDictBase, key: tuple[str, str]) -> list[Any] | None:
    if key not in tensordict.keys(include_nested=True):
        return None
    found: list[Any] = tensordict.get(key).tolist()
    return found

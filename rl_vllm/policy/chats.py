"""Chats in, chats out: the response of each slot as an assistant message."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from numpy.typing import NDArray
from tensordict import lazy_stack
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory

from rl_vllm.policy.columns import Slots
from rl_vllm.types import FinishReason


def spoken_rows(slots: Slots, eos_token_ids: Collection[int]) -> list[NDArray[Any]]:
    """Response ids of each slot without the token that ended the turn.

    A chat template writes that token itself: left in the message, it would stand twice in the next turn's prompt.
    """
    return [
        row[:-1] if finish == FinishReason.STOP and len(row) and _is_end(int(row[-1]), stop, eos_token_ids) else row
        for row, finish, stop in zip(slots.response_rows(), slots.finish_S.tolist(), slots.stops_S, strict=True)
    ]


def chat_history(history: Any, content_S: list[str], *, n: int, shape: torch.Size) -> Any:
    """The prompts, the answers as assistant messages, and both joined.

    Args:
        history: ``History`` [B, turns].
        content_S: The answers, ``n`` for each prompt.
        n: Samples per prompt.
        shape: Batch size of the result.

    Returns:
        ``ChatHistory``; ``prompt`` and ``full`` are [*shape, turns], ``response`` is [*shape, 1].
    """
    rows = []
    for slot, content in enumerate(content_S):
        prompt = history[slot // n]
        answer = History(role="assistant", content=content)
        rows.append(
            ChatHistory(
                prompt=prompt,
                response=lazy_stack([answer]),
                full=prompt.append(answer, inplace=False, dim=-1),
            )
        )
    return _stack(rows, shape)


def _is_end(token: int, stop: str | int | None, eos_token_ids: Collection[int]) -> bool:
    return token == stop if stop is not None else token in eos_token_ids


def _stack(rows: list[Any], shape: torch.Size) -> Any:
    if len(shape) == 0:
        return rows[0]
    if 0 in shape:
        return ChatHistory(batch_size=shape)
    step = len(rows) // shape[0]
    return lazy_stack([_stack(rows[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])])

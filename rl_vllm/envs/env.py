"""Prompt sets as TorchRL environments: ``ChatEnv`` with a prompt stream in front and a reward behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase
from torchrl.data.llm import History
from torchrl.envs import Compose, InitTracker, TransformedEnv
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms import DataLoadingPrimer

from rl_vllm.config import require_at_least, require_choice
from rl_vllm.envs.prompts import PromptSet
from rl_vllm.envs.reward import PROMPT_ID_KEY, RESPONSE_KEYS, PromptReward
from rl_vllm.errors import ConfigError


def make_env(
    prompts: PromptSet,
    *,
    num_prompts: int,
    group_size: int = 1,
    seed: int | None = None,
    first_position: int = 0,
    input_mode: str = "history",
    tokenizer: Any = None,
) -> TransformedEnv:
    """A single-turn environment of batch size ``[num_prompts * group_size]``.

    ``reset`` draws the next prompts, each ``group_size`` times in a row, and writes ``(input_mode, "prompt")``, the
    input of :class:`~rl_vllm.policy.VLLMPolicy` in the same mode, with ``prompt_id`` int64 [B] (the entry's index),
    ``question`` and ``answer`` (text) beside it; ``answer`` is empty when the entry states none. ``step`` scores the
    response and ends the episode: see :class:`~rl_vllm.envs.reward.PromptReward`.

    Groups have one ``prompt_id``: ``MCAdvantage(grpo_size=group_size, prompt_key="prompt_id")`` finds them.

    Args:
        prompts: What is asked, and how it is scored.
        num_prompts: Different prompts per batch, at most ``len(prompts)``.
        group_size: Rows per prompt.
        seed: Order of the prompts, shuffled anew in each pass; None keeps the set's own order.
        first_position: Prompts to skip in that order: a run that stopped after k batches goes on with
            ``k * num_prompts``.
        input_mode: ``history`` or ``text``.
        tokenizer: Needed in text mode, to render the chat.

    Raises:
        ConfigError: A number is out of range, the mode is unknown, or text mode has no tokenizer.
    """
    require_at_least("num_prompts", num_prompts, 1)
    require_at_least("group_size", group_size, 1)
    require_at_least("first_position", first_position, 0)
    require_choice("input_mode", input_mode, tuple(RESPONSE_KEYS))
    if num_prompts > len(prompts):
        raise ConfigError(f"num_prompts={num_prompts}, but the prompt set has {len(prompts)}")
    if input_mode == "text" and tokenizer is None:
        raise ConfigError("input_mode='text' renders chats with a tokenizer: pass tokenizer=")
    batch_size = torch.Size([num_prompts * group_size])
    chat = ChatEnv(batch_size=batch_size, input_mode=input_mode, tokenizer=tokenizer, data_key="query")
    stream = PromptStream(prompts, batch_size=num_prompts, seed=seed, first_position=first_position)
    primer = DataLoadingPrimer(dataloader=stream, repeats=group_size, batch_size=batch_size)
    end_marker = "" if tokenizer is None or tokenizer.eos_token is None else tokenizer.eos_token
    reward = PromptReward(prompts, input_mode=input_mode, end_marker=end_marker)
    # TorchRL's collectors ask for the tracker when the policy is a module.
    return TransformedEnv(chat, Compose(primer, InitTracker(), reward))


@dataclass(frozen=True, slots=True)
class PromptStream:
    """Batches of prompts without end, in the form that TorchRL's ``DataLoadingPrimer`` reads.

    Attributes:
        prompts: Where they come from.
        batch_size: Prompts per batch.
        seed: See :meth:`PromptSet.order`.
        first_position: See :meth:`PromptSet.order`.
    """

    prompts: PromptSet
    batch_size: int
    seed: int | None = None
    first_position: int = 0

    def __iter__(self) -> Iterator[TensorDictBase]:
        order = self.prompts.order(seed=self.seed, start=self.first_position)
        while True:
            yield self._batch(list(islice(order, self.batch_size)))

    def _batch(self, indices: list[int]) -> TensorDictBase:
        entries = [self.prompts.entries[index] for index in indices]
        return TensorDict(
            {
                "query": History.from_chats([self.prompts.chat(index) for index in indices]),
                PROMPT_ID_KEY: torch.tensor(indices),
                "question": NonTensorStack(*(entry["question"] for entry in entries)),
                "answer": NonTensorStack(*(str(entry.get("answer") or "") for entry in entries)),
            },
            batch_size=[len(indices)],
        )

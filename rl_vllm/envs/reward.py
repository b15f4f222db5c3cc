"""The reward of a finished turn, and the end of its episode."""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data import Composite, Unbounded
from torchrl.data.llm import History
from torchrl.envs import Transform

from rl_vllm.envs.prompts import PromptSet
from rl_vllm.errors import RewardError

# In history mode the response is the assistant's message; in text mode what was sampled, end marker included.
RESPONSE_KEYS = {"history": ("history", "response"), "text": ("text", "response")}
PROMPT_ID_KEY = "prompt_id"
LARGEST_REWARD = torch.finfo(torch.float32).max


class PromptReward(Transform):
    """Scores each response with its prompt's reward function and ends the episode.

    Reads the response, in its mode's form, and ``prompt_id`` int64 [B]; writes ``reward`` float32 [B, 1], and ``done``
    and ``terminated`` True [B, 1]. A response is scored without its end marker and surrounding white space.

    Args:
        prompts: What ``prompt_id`` counts in.
        input_mode: ``history`` or ``text``.
        end_marker: Text of the end-of-sequence token, which text mode leaves in the response.

    Raises:
        RewardError: When stepping: a reward is not one finite number, or its function raised; names prompt and value.
    """

    def __init__(self, prompts: PromptSet, *, input_mode: str = "history", end_marker: str = "") -> None:
        self._response_key = RESPONSE_KEYS[input_mode]
        super().__init__(in_keys=[self._response_key, PROMPT_ID_KEY], out_keys=["reward", "done", "terminated"])
        self._prompts = prompts
        self._end_marker = end_marker

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        rewards = [self._score(row) for row in tensordict.unbind(0)]
        device = next_tensordict.device
        next_tensordict.set("reward", torch.tensor(rewards, dtype=torch.float32, device=device).unsqueeze(-1))
        for key in ("done", "terminated"):
            next_tensordict.set(key, torch.ones(len(rewards), 1, dtype=torch.bool, device=device))
        return next_tensordict

    def _score(self, row: TensorDictBase) -> float:
        index = int(row[PROMPT_ID_KEY])
        response = row[self._response_key]
        if isinstance(response, History):
            response = response.content[-1]
        response = response.removesuffix(self._end_marker).strip()
        entry = self._prompts.entries[index]
        where = f"prompt {index} ({shorten(entry['question'])}), response {shorten(response)}"
        try:
            value = self._prompts.reward(response, entry)
        except Exception as error:
            raise RewardError(f"the reward function raised {type(error).__name__}: {error}, on {where}") from error
        return one_finite_number(value, where)

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """One float32 per row."""
        reward_spec["reward"] = Unbounded(shape=(*reward_spec.shape, 1), dtype=torch.float32)
        return reward_spec


def one_finite_number(value: Any, where: str) -> float:
    """The value as a float; anything but one finite number is a :class:`RewardError` that says ``where``."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise RewardError(f"the reward has shape {tuple(value.shape)} instead of one number, on {where}")
        value = value.item()
    if not isinstance(value, numbers.Real):
        shown = shorten(str(value))
        raise RewardError(f"the reward is {shown} ({type(value).__name__}) instead of one number, on {where}")
    number = float(value)
    if not math.isfinite(number):
        raise RewardError(f"the reward is {number}, on {where}: return a finite number, 0 for a wrong answer")
    if abs(number) > LARGEST_REWARD:
        raise RewardError(
            f"the reward is {number}, on {where}: float32, which holds rewards, ends at {LARGEST_REWARD:.3g}"
        )
    return number


def shorten(text: str, limit: int = 80) -> str:
    """A text as one quoted line of about ``limit`` characters."""
    flat = " ".join(text.split())
    return repr(flat if len(flat) <= limit else f"{flat[: limit - 3]}...")

"""Rollouts as a TorchRL environment, token-exact over many turns.

A row is one rollout. ``reset`` gives it a prompt, ``step`` takes the model's answer and gives the next prompt, which
begins with exactly the ids that were generated before. The policy reads ``tokens`` and its tokenizer is not used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import EnvBase

from rl_vllm.config import require_at_least
from rl_vllm.envs.background import Background
from rl_vllm.envs.dialogue import Answer
from rl_vllm.envs.prompts import Entry
from rl_vllm.envs.rollout import Rollout
from rl_vllm.envs.rollout_task import RolloutTask
from rl_vllm.envs.stepping import read_answers
from rl_vllm.policy.columns import fill, left_mask


class RolloutEnv(EnvBase):
    """An environment of batch size ``[num_prompts * group_size]`` over a task.

    ============================= ========  ====================================================================
    Key                           Type      Meaning
    ============================= ========  ====================================================================
    ``tokens.prompt``             int64     [B, L], what the model reads, padded on the left
    ``attention_mask``            bool      [B, L], True on its ids
    ``group_id``                  int64     [B], number of the prompt's draw; a group's rows share it
    ``turn``                      int64     [B], answers so far
    ``reward``                    float32   [B, 1], of the turn, and of the outcome in the last one
    ``done``                      bool      [B, 1], the rollout is over
    ``terminated``, ``truncated`` bool      [B, 1], by the task; because context, turns or length ran out
    ============================= ========  ====================================================================

    When all prompts were drawn, ``reset`` begins again with the first, as TorchRL's environments over data loaders do.
    ``step`` reads what :class:`rl_vllm.VLLMPolicy` writes: ``tokens.response``, ``log_probs.response``,
    ``policy_version`` and ``completion``; only the first is needed.

    Args:
        task: What is asked, and how it goes on and is scored.
        num_prompts: Prompts at a time.
        group_size: Rows per prompt.
        pad_token_id: Fills padding; nothing reads it back.
        step_timeout_s: Limit for one step of all rows, in seconds.

    Raises:
        ConfigError: A number is out of range.
        BadInputError: At ``reset``: a prompt cannot be read, or fills the context.
        ConfigError: At ``reset``: the prompts were an iterator, and it is exhausted.
        RewardError: At ``step``: a reward function failed; names prompt and value.
    """

    def __init__(
        self,
        task: RolloutTask,
        *,
        num_prompts: int = 1,
        group_size: int = 1,
        pad_token_id: int = 0,
        step_timeout_s: float = 600.0,
    ) -> None:
        require_at_least("num_prompts", num_prompts, 1)
        require_at_least("group_size", group_size, 1)
        super().__init__(batch_size=torch.Size([num_prompts * group_size]))
        self.task = task
        self.rollouts: list[Rollout] = []
        self._group_size = group_size
        self._pad_token_id = pad_token_id
        self._step_timeout_s = step_timeout_s
        self._draws = self._repeated()
        self._groups = [-1] * self.batch_size[0]
        self._background: Background | None = None
        self._make_specs()

    def _make_specs(self) -> None:
        shape = self.batch_size
        ragged = (*shape, -1)
        self.observation_spec = Composite(
            tokens=Composite(prompt=Unbounded(shape=ragged, dtype=torch.int64), shape=shape),
            attention_mask=Unbounded(shape=ragged, dtype=torch.bool),
            group_id=Unbounded(shape=shape, dtype=torch.int64),
            turn=Unbounded(shape=shape, dtype=torch.int64),
            shape=shape,
        )
        ids = Bounded(low=0, high=len(self.task.setup.renderer.tokenizer) - 1, shape=ragged, dtype=torch.int64)
        self.action_spec = Composite(tokens=Composite(response=ids, shape=shape), shape=shape)
        self.reward_spec = Unbounded(shape=(*shape, 1), dtype=torch.float32)
        done = {name: Unbounded(shape=(*shape, 1), dtype=torch.bool) for name in ("done", "terminated", "truncated")}
        self.done_spec = Composite(**done, shape=shape)

    def _repeated(self) -> Iterator[tuple[int, Entry]]:
        """Every prompt as often as a group has rows; round and round, as TorchRL's data loaders go."""
        position = 0
        while True:
            for entry in self.task.source.entries():
                for _ in range(self._group_size):
                    yield position, entry
                position += 1

    def _reset(self, tensordict: TensorDictBase | None, **_options: Any) -> TensorDictBase:
        count = self.batch_size[0]
        rows = list(range(count))
        if tensordict is not None and tensordict.get("_reset", None) is not None:
            rows = tensordict.get("_reset").reshape(count).nonzero().reshape(-1).tolist()
        if not self.rollouts:
            rows = list(range(count))
        # All are drawn before anything changes: a source may fail in the middle.
        drawn = [next(self._draws) for _ in rows]
        fresh = [Rollout(self.task.setup, entry) for _, entry in drawn]
        if self.rollouts:
            self._run(_together([self.rollouts[row].close() for row in rows]), "rollouts to close")
        else:
            self.rollouts = list(fresh)
        for row, rollout, (group, _) in zip(rows, fresh, drawn, strict=True):
            self.rollouts[row] = rollout
            self._groups[row] = group
        self._run(_together([rollout.begin() for rollout in fresh]), "rollouts to begin")
        return self._observation()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        answers = read_answers(tensordict, self.task.setup.renderer.answer_end_ids)
        rewards = self._run(self._advance(answers), "rollouts to go on")
        result = self._observation()
        over = torch.tensor([rollout.done for rollout in self.rollouts]).unsqueeze(-1)
        cut = torch.tensor([rollout.truncated for rollout in self.rollouts]).unsqueeze(-1)
        result.set("reward", torch.tensor(rewards, dtype=torch.float32).unsqueeze(-1))
        result.set("done", over)
        result.set("terminated", over & ~cut)
        result.set("truncated", over & cut)
        return result

    async def _advance(self, answers: list[Answer]) -> list[float]:
        """Hand each row its answer; the rewards of the turn, with the outcome's on the last, and 0 once it is over."""
        rows = [row for row, rollout in enumerate(self.rollouts) if not rollout.done]
        taken = await _together([self.rollouts[row].take(answers[row]) for row in rows])
        rewards: list[Any] = [0.0] * len(self.rollouts)
        for row, reward in zip(rows, taken, strict=True):
            rewards[row] = reward
        over = [row for row in rows if self.rollouts[row].done]
        scores = await self.task.rewards.score([self.rollouts[row].finished() for row in over])
        for row, score in zip(over, scores, strict=True):
            if score.error is not None:
                raise score.error
            rewards[row] += score.value
        return rewards

    def _observation(self) -> TensorDict:
        prompts = [rollout.prompt_T for rollout in self.rollouts]
        mask = left_mask(np.array([len(prompt_T) for prompt_T in prompts]))
        ids = fill(mask, np.concatenate(prompts), np.int64, self._pad_token_id)
        return TensorDict(
            {
                ("tokens", "prompt"): torch.from_numpy(ids),
                "attention_mask": torch.from_numpy(mask),
                "group_id": torch.tensor(self._groups),
                "turn": torch.tensor([len(rollout.turn_rewards) for rollout in self.rollouts]),
            },
            batch_size=self.batch_size,
        )

    def _run(self, work: Any, waited_for: str) -> Any:
        if self._background is None:
            self._background = Background("rl_vllm-env")
        return self._background.run(work, timeout_s=self._step_timeout_s, waited_for=waited_for)

    def _set_seed(self, seed: int | None) -> None:
        """The prompts' order is the source's own, and sampling is the policy's: there is nothing to seed."""

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the rollouts and end the thread that runs them."""
        if self._background is not None:
            try:
                self._run(_together([rollout.close() for rollout in self.rollouts]), "rollouts to close")
            finally:
                self._background.close()
                self._background = None
        super().close(raise_if_closed=raise_if_closed)


async def _together(works: list[Any]) -> list[Any]:
    """Run all at once; the first error is raised when the others have ended."""
    results = await asyncio.gather(*works, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results

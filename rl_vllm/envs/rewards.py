"""What finished rollouts are worth: any number of reward functions, weighted, with failures kept apart from zeros."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from rl_vllm.config import require_above_zero, require_at_least
from rl_vllm.envs.calls import Outcome, call, function_name
from rl_vllm.envs.episode import Finished
from rl_vllm.envs.reward import LARGEST_REWARD, one_finite_number, shorten
from rl_vllm.errors import ConfigError, DeadlineError, RewardError


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward function and how it is called.

    Attributes:
        function: From the response (stripped) and its entry to one finite number. An ordinary function runs in a
            thread; a coroutine function is awaited and must not block.
        weight: Factor of its value in the sum; 0 only reports it.
        name: Key of its value among the parts; None takes the function's own name.
        batched: It takes all rollouts at once, as lists, and returns a sequence, array or tensor of numbers.
        whole: It takes a :class:`Finished` (batched: a list of them) in place of response and entry.

    Raises:
        ConfigError: The function is not callable, or the weight is not finite.
    """

    function: Callable[..., Any]
    weight: float = 1.0
    name: str | None = None
    batched: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ConfigError(
                f"a reward is {self.function!r}: give a function, a Reward, or a list of these or (function, weight)"
            )
        if isinstance(self.weight, bool) or not isinstance(self.weight, int | float) or not math.isfinite(self.weight):
            raise ConfigError(f"the weight of reward {self.label!r} must be a finite number, got {self.weight!r}")

    @property
    def label(self) -> str:
        """Its name, or its function's."""
        return function_name(self.function) if self.name is None else self.name


RewardLike: TypeAlias = "Reward | Callable[..., Any] | tuple[Callable[..., Any], float]"


@dataclass(frozen=True, slots=True)
class Score:
    """What one rollout is worth.

    Attributes:
        value: The weighted sum, or None when a function failed on this rollout.
        parts: What each function that did not fail returned, by name, before its weight.
        error: Which functions failed, on what and why; None when there is a value.
    """

    value: float | None
    parts: dict[str, float]
    error: RewardError | None = None


class Rewards:
    """Reward functions as one.

    A function that raises, returns what is not one finite number, or takes longer than ``timeout_s`` costs the rollouts
    it was called for their value; it never makes it 0 and never raises. True and False count as 1 and 0.

    Ordinary functions run in daemon threads. Python cannot stop a thread: one that hangs is left behind, goes on to
    use what it uses, and ends with the program, whose end it does not delay. Let functions that may hang have limits of
    their own.

    Args:
        functions: A function, a :class:`Reward`, or a sequence of these or of ``(function, weight)``. Functions of the
            same name are numbered: ``length``, ``length_2``.
        timeout_s: For each call, from its own start.
        max_running: Calls at the same time; further ones wait.

    Raises:
        ConfigError: There is no function, or a setting is out of range.
    """

    def __init__(
        self, functions: RewardLike | Sequence[RewardLike], *, timeout_s: float = 60.0, max_running: int = 256
    ) -> None:
        require_above_zero("timeout_s", timeout_s)
        require_at_least("max_running", max_running, 1)
        given: list[Any] = list(functions) if isinstance(functions, Sequence) else [functions]
        if not given:
            raise ConfigError("there are no reward functions: give at least one")
        self._rewards = _named([_as_reward(item) for item in given])
        self._timeout_s = float(timeout_s)
        self._max_running = max_running

    @property
    def names(self) -> tuple[str, ...]:
        """Keys of the parts, in the order of the functions."""
        return tuple(self._rewards)

    async def score(self, finished: Sequence[Finished]) -> list[Score]:
        """Score rollouts; all functions and rollouts run concurrently.

        Returns:
            A score for each rollout, in order.
        """
        rollouts = list(finished)
        if not rollouts:
            return []
        slots = asyncio.Semaphore(self._max_running)
        columns = await asyncio.gather(
            *(self._column(name, reward, rollouts, slots) for name, reward in self._rewards.items())
        )
        return [self._sum(dict(zip(self._rewards, row, strict=True))) for row in zip(*columns, strict=True)]

    async def _column(
        self, name: str, reward: Reward, rollouts: list[Finished], slots: asyncio.Semaphore
    ) -> list[float | RewardError]:
        """One function's value, or failure, for each rollout."""

        async def run(*arguments: Any) -> Outcome:
            async with slots:
                return await call(reward.function, *arguments, timeout_s=self._timeout_s)

        if not reward.batched:
            calls = (run(one) if reward.whole else run(one.response, one.entry) for one in rollouts)
            outcomes = await asyncio.gather(*calls)
        elif reward.whole:
            outcomes = _split(await run(rollouts), len(rollouts))
        else:
            outcomes = _split(
                await run([one.response for one in rollouts], [one.entry for one in rollouts]), len(rollouts)
            )
        return [_judge(name, outcome, one) for outcome, one in zip(outcomes, rollouts, strict=True)]

    def _sum(self, row: dict[str, float | RewardError]) -> Score:
        parts = {name: value for name, value in row.items() if not isinstance(value, RewardError)}
        errors = [value for value in row.values() if isinstance(value, RewardError)]
        if errors:
            error = errors[0] if len(errors) == 1 else RewardError("; ".join(str(one) for one in errors))
            return Score(None, parts, error)
        total = float(sum(self._rewards[name].weight * value for name, value in parts.items()))
        if not abs(total) <= LARGEST_REWARD:
            return Score(None, parts, RewardError(f"the weighted sum of {parts} is {total}: lower weights or values"))
        return Score(total, parts)


def _as_reward(item: RewardLike) -> Reward:
    if isinstance(item, Reward):
        return item
    if isinstance(item, tuple):
        if len(item) != 2:
            raise ConfigError(f"a reward is {item!r}: a tuple must be (function, weight)")
        return Reward(item[0], weight=item[1])
    return Reward(item)


def _named(rewards: list[Reward]) -> dict[str, Reward]:
    named: dict[str, Reward] = {}
    for reward in rewards:
        name, number = reward.label, 1
        while name in named:
            number += 1
            name = f"{reward.label}_{number}"
        named[name] = reward
    return named


def _split(outcome: Outcome, count: int) -> list[Outcome]:
    """What a batched function returned, row by row; a failure is every row's."""
    if outcome.error is not None:
        return [outcome] * count
    values = outcome.value
    if isinstance(values, torch.Tensor | np.ndarray):
        values = values.reshape(-1).tolist()
    if isinstance(values, str) or not isinstance(values, Sequence):
        error = RewardError(f"returned {shorten(str(values))} ({type(values).__name__}) instead of {count} numbers")
    elif len(values) != count:
        error = RewardError(f"returned {len(values)} numbers for {count} rollouts")
    else:
        return [Outcome(value) for value in values]
    return [Outcome(error=error)] * count


def _judge(name: str, outcome: Outcome, rollout: Finished) -> float | RewardError:
    question = shorten(str(rollout.entry.get("question", "")))
    where = f"prompt {question}, response {shorten(rollout.response)}"
    if isinstance(outcome.error, DeadlineError):
        limit = outcome.error.timeout_s
        text = f"reward {name!r} had not returned after {limit:g} s, on {where}: make it faster or raise timeout_s"
        return RewardError(text)
    if isinstance(outcome.error, RewardError):
        return RewardError(f"reward {name!r} {outcome.error}, on {where}")
    if outcome.error is not None:
        reason = f"{type(outcome.error).__name__}: {outcome.error}"
        error = RewardError(f"reward {name!r} raised {reason}, on {where}")
        error.__cause__ = outcome.error
        return error
    try:
        return one_finite_number(outcome.value, where)
    except RewardError as error:
        return RewardError(f"reward {name!r}: {error}")

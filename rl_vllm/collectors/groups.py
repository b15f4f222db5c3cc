"""The rollouts of one prompt, from its draw to their rewards."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from rl_vllm.collectors.asking import Asker
from rl_vllm.collectors.ledger import Draw
from rl_vllm.collectors.seeds import request_seed
from rl_vllm.collectors.stats import CollectorStats
from rl_vllm.envs.rewards import Score
from rl_vllm.envs.rollout import Rollout
from rl_vllm.envs.rollout_task import RolloutTask
from rl_vllm.errors import (
    BadInputError,
    BadPromptError,
    ConfigError,
    EngineDiedError,
    ServiceNotRunningError,
)

logger = logging.getLogger(__name__)

# What no other prompt would escape: the collector ends with it.
FATAL = (ConfigError, EngineDiedError, ServiceNotRunningError)
# What the same prompt would meet again.
_HOPELESS = (BadInputError, BadPromptError)


@dataclass(slots=True)
class Sample:
    """One rollout of a group that is over.

    Attributes:
        rollout: What was said.
        score: What it is worth.
        attempt: 0 for the first.
        turn_reward: The rewards of its turns, added.
    """

    rollout: Rollout
    score: Score
    attempt: int

    @property
    def reward(self) -> float:
        """Of the outcome and of all turns."""
        assert self.score.value is not None
        return self.score.value + sum(self.rollout.turn_rewards)


@dataclass(slots=True, eq=False)
class Group:
    """All rollouts of one prompt.

    Attributes:
        draw: The prompt.
        samples: In order of their numbers.
    """

    draw: Draw
    samples: list[Sample] = field(default_factory=list)


class GroupFailedError(Exception):
    """A rollout of a group failed for good; the group is dropped."""

    def __init__(self, draw: Draw, cause: Exception) -> None:
        super().__init__(f"prompt {draw.position}: {type(cause).__name__}: {cause}")
        self.cause = cause


class GroupRunner:
    """Runs groups of one task.

    Args:
        task: What is asked.
        asker: Who answers.
        group_size: Rollouts per group.
        max_retries: Fresh attempts per rollout.
        seed: Base of the seeds, or None.
        stats: Counts of retries and failures go there.
    """

    def __init__(
        self,
        task: RolloutTask,
        asker: Asker,
        *,
        group_size: int,
        max_retries: int,
        seed: int | None,
        stats: CollectorStats,
    ) -> None:
        self._task = task
        self._asker = asker
        self._group_size = group_size
        self._max_retries = max_retries
        self._seed = seed
        self._stats = stats

    async def run(self, draw: Draw) -> Group:
        """All rollouts of a prompt, with their rewards.

        Raises:
            GroupFailedError: A rollout failed more often than allowed, or cannot succeed.
            Exception: One of :data:`FATAL`.
        """
        done: dict[int, Sample] = {}
        attempts = dict.fromkeys(range(self._group_size), 0)
        while True:
            missing = [number for number in attempts if number not in done]
            if not missing:
                return Group(draw, [done[number] for number in sorted(done)])
            results = await self._attempt(draw, {number: attempts[number] for number in missing})
            for number, result in results.items():
                if isinstance(result, Sample):
                    done[number] = result
                    continue
                self._judge(draw, result, attempts[number])
                attempts[number] += 1
                self._stats.rollouts_retried += 1

    def _judge(self, draw: Draw, error: Exception, attempt: int) -> None:
        """Raise when the group cannot go on."""
        if isinstance(error, FATAL):
            raise error
        self._stats.failures[type(error).__name__] += 1
        if isinstance(error, _HOPELESS) or attempt >= self._max_retries:
            raise GroupFailedError(draw, error) from error
        logger.info("prompt %d, attempt %d failed and is made again: %s", draw.position, attempt, error)

    async def _attempt(self, draw: Draw, attempts: dict[int, int]) -> dict[int, Sample | Exception]:
        """One attempt at each rollout that is missing; what failed is an error."""
        if self._task.setup.is_single_turn and set(attempts.values()) == {0}:
            (together,) = await asyncio.gather(self._together(draw, len(attempts)), return_exceptions=True)
            ended: list[Rollout | BaseException] = (
                [together] * len(attempts) if isinstance(together, BaseException) else list(together)
            )
        else:
            works = [self._one(draw, number, attempt) for number, attempt in attempts.items()]
            ended = await asyncio.gather(*works, return_exceptions=True)
        rollouts = dict(zip(attempts, (_error_or(each) for each in ended), strict=True))
        over = {number: each for number, each in rollouts.items() if isinstance(each, Rollout)}
        scores = await self._task.rewards.score([rollout.finished() for rollout in over.values()])
        results: dict[int, Sample | Exception] = {n: e for n, e in rollouts.items() if not isinstance(e, Rollout)}
        for (number, rollout), score in zip(over.items(), scores, strict=True):
            failed = score.error
            results[number] = failed if failed is not None else Sample(rollout, score, attempts[number])
        return results

    async def _together(self, draw: Draw, count: int) -> list[Rollout | Exception]:
        """First attempts at single turns: one request for all, which share the prompt's prefill."""
        rollouts = [Rollout(self._task.setup, draw.entry) for _ in range(count)]
        for rollout in rollouts:
            await rollout.begin()
        answers = await self._asker.ask_many(
            rollouts[0].prompt_T, n=count, seed=self._seed_of(draw, 0, 0, 0), session=f"{draw.position}"
        )
        results: list[Rollout | Exception] = []
        for rollout, answer in zip(rollouts, answers, strict=True):
            if isinstance(answer, Exception):
                results.append(answer)
                continue
            await rollout.take(answer)
            results.append(rollout)
        return results

    async def _one(self, draw: Draw, number: int, attempt: int) -> Rollout:
        """One rollout, turn by turn, with a fresh interaction."""
        rollout = Rollout(self._task.setup, draw.entry)
        session = f"{draw.position}/{number}/{attempt}"
        try:
            await rollout.begin()
            turn = 0
            while not rollout.done:
                seed = self._seed_of(draw, number, attempt, turn)
                await rollout.take(await self._asker.ask(rollout.prompt_T, seed=seed, session=session))
                turn += 1
        finally:
            # The rollout is over, well or not: how its interaction closes changes nothing about it.
            (closed,) = await asyncio.gather(rollout.close(), return_exceptions=True)
            if isinstance(closed, Exception):
                logger.warning("an interaction failed to close: %s: %s", type(closed).__name__, closed)
        return rollout

    def _seed_of(self, draw: Draw, sample: int, attempt: int, turn: int) -> int | None:
        return request_seed(self._seed, position=draw.position, sample=sample, attempt=attempt, turn=turn)


def _error_or(result: Rollout | BaseException) -> Rollout | Exception:
    if isinstance(result, Rollout | Exception):
        return result
    raise result

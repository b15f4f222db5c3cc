"""Prompt sets over reasoning-gym: training and held-out prompts that share nothing."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rl_vllm.config import require_at_least
from rl_vllm.envs.prompts import Entry, PromptSet
from rl_vllm.envs.rewards import Reward
from rl_vllm.envs.sources import PromptSource
from rl_vllm.errors import BadInputError, ConfigError

# reasoning-gym draws entry ``i`` of a dataset from ``Random(seed + i)``: neighbouring seeds would give the same entries
# one place further on. Streams this far apart never meet.
_STREAM_STRIDE = 10_000_000
# Entries drawn per entry wanted before a task counts as too small.
_MAX_DRAWS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig:
    """One reasoning-gym task, cut into training and held-out prompts.

    Attributes:
        name: The task's name in reasoning-gym, for example ``needle_haystack``.
        options: The task's own settings, for example ``{"max_num_statements": 2}``.
        num_train: Training prompts.
        num_held_out: Prompts that training never sees.
        num_examples: Worked examples, with different answers, in front of every question.
        system_prompt: First message of every chat; None leaves it to the model's chat template.
        seed: Another seed, other prompts.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    num_train: int = 512
    num_held_out: int = 64
    num_examples: int = 2
    system_prompt: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("num_train", 1), ("num_held_out", 1), ("num_examples", 0), ("seed", 0)):
            require_at_least(name, getattr(self, name), low)
        reserved = {"seed", "size"} & set(self.options)
        if reserved:
            raise ConfigError(f"options holds {sorted(reserved)}: set seed, num_train and num_held_out instead")


@dataclass(frozen=True, slots=True)
class TaskSplits:
    """Two prompt sets of one task; no question is in both, and no example is in either."""

    train: PromptSet
    held_out: PromptSet


def load_task(config: TaskConfig) -> TaskSplits:
    """Draw a task's prompts; the reward is reasoning-gym's own score of the whole response.

    The held-out prompts do not depend on ``num_train``.

    Raises:
        ConfigError: reasoning-gym is not installed, has no such task, or refuses an option.
        BadInputError: The task has fewer different prompts than asked for, or no answers to show as examples.
    """
    streams = (_Stream(config, number) for number in range(3))
    taken: set[str] = set()
    examples = _draw(next(streams), config.num_examples, taken, distinct_answers=True)
    held_out = _draw(next(streams), config.num_held_out, taken)
    last = next(streams)
    train = _draw(last, config.num_train, taken)
    return TaskSplits(
        *(PromptSet(entries, last.score, examples, config.system_prompt) for entries in (train, held_out)),
    )


def from_prompt_set(
    prompts: PromptSet, *, seed: int | None = None, epochs: int | None = 1
) -> tuple[PromptSource, Reward]:
    """A prompt set, such as :func:`load_task` draws from reasoning-gym, as a source and the reward that belongs to it.

    Args:
        prompts: Its examples and system prompt are part of every chat.
        seed: See :class:`PromptSource`.
        epochs: See :class:`PromptSource`.
    """
    return PromptSource(prompts, seed=seed, epochs=epochs), Reward(prompts.reward)


class _Stream:
    """Endless entries of one task."""

    def __init__(self, config: TaskConfig, number: int) -> None:
        self.name = config.name
        seed = (3 * config.seed + number) * _STREAM_STRIDE
        self._dataset = _create(config.name, {**config.options, "seed": seed, "size": _STREAM_STRIDE})

    def __iter__(self) -> Iterator[Entry]:
        return (self._dataset[index] for index in range(_STREAM_STRIDE))

    def score(self, response: str, entry: Entry) -> float:
        """reasoning-gym's score, 0 to 1."""
        score: float = self._dataset.score_answer(response, entry)
        return score


def _create(name: str, options: dict[str, Any]) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise ConfigError(f"tasks come from reasoning-gym: {error}; run pip install reasoning-gym") from error
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3) or [*sorted(DATASETS)[:3], "..."]
        raise ConfigError(f"reasoning-gym has no task {name!r}; near: {', '.join(near)}")
    try:
        return reasoning_gym.create_dataset(name, **options)
    except (TypeError, ValueError, AssertionError) as error:
        shown = {key: value for key, value in options.items() if key not in ("seed", "size")}
        raise ConfigError(f"reasoning-gym's {name} refuses {shown}: {error}") from error


def _draw(stream: _Stream, count: int, taken: set[str], *, distinct_answers: bool = False) -> tuple[Entry, ...]:
    """The first entries whose questions nobody has; adds them to ``taken``."""
    found: list[Entry] = []
    answers: set[object] = set()
    for draws, entry in enumerate(stream):
        if len(found) == count:
            break
        if draws >= _MAX_DRAWS * count:
            raise BadInputError(
                f"{stream.name} has too few different prompts: {len(found)} of {count} after {draws} draws; "
                "ask for fewer, or widen the task with options"
            )
        question = entry["question"].strip()
        if question in taken or (distinct_answers and entry["answer"] in answers):
            continue
        taken.add(question)
        answers.add(entry["answer"])
        found.append(entry)
    return tuple(found)

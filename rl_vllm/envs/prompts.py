"""What is asked and how answers are scored: entries, worked examples and a reward, as one frozen value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from rl_vllm.errors import BadInputError

# reasoning-gym's own form: "question" and "answer" are text, the rest belongs to whoever scores.
Entry: TypeAlias = Mapping[str, Any]
RewardFunction: TypeAlias = Callable[[str, Entry], float]


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts with the means to score what is said to them.

    Attributes:
        entries: One mapping per prompt; ``question`` is what the user asks, ``answer`` what an example would show.
        reward: From the response, stripped of white space, and its entry to one finite number.
        examples: Entries shown with their answers, in order, before every question.
        system_prompt: First message of every chat; None leaves it to the model's chat template.

    Raises:
        BadInputError: There are no entries; a question is not text or is empty; an example's answer is not text.
    """

    entries: tuple[Entry, ...]
    reward: RewardFunction
    examples: tuple[Entry, ...] = ()
    system_prompt: str | None = None

    def __post_init__(self) -> None:
        if not self.entries:
            raise BadInputError("the dataset is empty: a prompt set needs at least one entry")
        for index, entry in enumerate(self.entries):
            _require_text(entry, "question", f"entry {index}")
        for index, entry in enumerate(self.examples):
            _require_text(entry, "question", f"example {index}")
            _require_text(entry, "answer", f"example {index}")

    def __len__(self) -> int:
        return len(self.entries)

    def chat(self, index: int) -> list[dict[str, str]]:
        """The messages of one prompt: system prompt, examples, question; the next turn is the model's."""
        messages = []
        if self.system_prompt is not None:
            messages.append({"role": "system", "content": self.system_prompt})
        for example in self.examples:
            messages.append({"role": "user", "content": example["question"].strip()})
            messages.append({"role": "assistant", "content": example["answer"].strip()})
        messages.append({"role": "user", "content": self.entries[index]["question"].strip()})
        return messages

    def order(self, *, seed: int | None, start: int = 0) -> Iterator[int]:
        """Indices without end, every prompt once per pass, from position ``start`` of that sequence on.

        Args:
            seed: Shuffles each pass differently, and alike in every run; None keeps the entries' order.
            start: Positions to skip: a run that stopped after ``k`` prompts goes on with ``start=k``.
        """
        yield from endless_order(len(self), seed=seed, start=start)


def endless_order(count: int, *, seed: int | None, start: int = 0) -> Iterator[int]:
    """Every index below ``count`` once per pass, from position ``start`` of that sequence on; never ends.

    Args:
        count: At least 1.
        seed: Shuffles each pass differently, and alike in every run; None counts upwards.
        start: Positions to skip.
    """
    epoch, offset = divmod(start, count)
    while True:
        indices = range(count) if seed is None else np.random.default_rng([seed, epoch]).permutation(count).tolist()
        yield from indices[offset:]
        epoch, offset = epoch + 1, 0


def _require_text(entry: Entry, field: str, who: str) -> None:
    value = entry.get(field)
    if not isinstance(value, str) or not value.strip():
        raise BadInputError(f"{who} of the dataset has {field}={value!r}: it must be text")

"""What a rollout talks to and what is scored: the values and protocols that environments are built from.

A rollout asks an *interaction* for messages, gives it the model's answer, and so on until it is over; *rewards* then
score the finished rollout. A single-turn task has no interaction.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from rl_vllm.envs.prompts import Entry

# As chat templates read them: "role", "content", and what a template knows besides ("name", "tool_call_id", ...).
Message: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """What an interaction says to an answer of the model.

    Attributes:
        messages: What the model reads next: a tool's result, an observation, a question. Empty when it is over.
        reward: For this turn alone, one finite number; the rewards of a rollout's turns are added to the reward of its
            outcome.
        done: The rollout is over.
    """

    messages: tuple[Message, ...] = ()
    reward: float = 0.0
    done: bool = False


class Interaction(Protocol):
    """The other side of one multi-turn rollout; it has its own state and is used for one rollout only.

    Each method may be an ordinary one, which runs in a thread, or a coroutine. What it raises fails the rollout: a
    collector tries again with a fresh interaction.
    """

    def begin(self, messages: Sequence[Message]) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """The chat that the model sees first, from the one the prompt made."""
        ...

    def reply(self, answer: str, messages: Sequence[Message]) -> Reply | Awaitable[Reply]:
        """React to the model's answer.

        Args:
            answer: Its text, without the token that ended the turn.
            messages: The whole chat, the answer last. It may be edited in place: the model reads the edited chat next,
                as a new segment.
        """
        ...

    def close(self) -> None:
        """Give back what it holds; called once, also after an error."""
        ...


# A fresh interaction for each rollout, from the entry of its prompt.
InteractionFactory: TypeAlias = Callable[[Entry], Interaction]


@dataclass(frozen=True, slots=True)
class Finished:
    """A rollout that is over, as a reward function sees it.

    Attributes:
        entry: The prompt's entry.
        messages: The whole chat, the last answer included.
        response: The model's last answer, stripped of white space and without the token that ended the turn.
        num_turns: Answers of the model.
        truncated: It ended because the context or the number of turns ran out, or the last answer was cut by length.
    """

    entry: Entry
    messages: tuple[Message, ...]
    response: str
    num_turns: int = 1
    truncated: bool = False

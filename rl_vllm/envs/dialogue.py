"""One dialogue as exact token ids, with the provenance of each.

What was generated is never decoded and encoded again: the next prompt begins with exactly the ids that passed through
the model, and only what the template adds to them is new. When that cannot be, because a template or the environment
changed what was said before, the segment so far is sealed and another one begins; each is a sequence to train on.

Two turns of a ChatML dialogue, with E the end of turn, ``u`` ids of the user, ``h`` the header of an answer and ``a``
what the model sampled, are one segment ``u u E h | a a E | u E h | a E`` whose ``a`` and the E behind it are sampled.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_vllm.config import require_choice
from rl_vllm.envs.episode import Message
from rl_vllm.errors import PrefixMismatchError
from rl_vllm.policy.columns import NO_VERSION
from rl_vllm.policy.rendering import ChatRenderer
from rl_vllm.policy.splice import replace_prefix_tokens

logger = logging.getLogger(__name__)

ON_REWRITE = ("splice", "segment")


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model sampled in one turn.

    Attributes:
        tokens_T: int32 [T], the end of turn included when it was sampled.
        logprobs_T: float32 [T], nats.
        versions_T: int64 [T], the weights that sampled each.
        finish: A :class:`rl_vllm.types.FinishReason` number.
        stop: Stop string or id, or None.
        num_cached: Prompt tokens read from the prefix cache.
        seconds: From the request to its answer; NaN when it is not known.
    """

    tokens_T: NDArray[np.int32]
    logprobs_T: NDArray[np.float32]
    versions_T: NDArray[np.int64]
    finish: int
    stop: str | int | None = None
    num_cached: int = 0
    seconds: float = math.nan


@dataclass(slots=True)
class Segment:
    """A sequence that passed through the model, and where each token came from.

    Attributes:
        tokens_T: int64 [T].
        sampled_T: bool [T], True on what the model sampled.
        logprobs_T: float32 [T], nats; NaN on what it did not sample.
        versions_T: int64 [T], the weights that sampled the token; -1 on what was not sampled.
        answers: The turns whose answers are in it.
        num_prompt: Tokens before the first sampled one.
    """

    tokens_T: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    sampled_T: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    logprobs_T: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    versions_T: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    answers: list[Answer] = field(default_factory=list)
    num_prompt: int = 0

    def __len__(self) -> int:
        return len(self.tokens_T)

    def read(self, tokens: Sequence[int]) -> None:
        """Append what the model reads."""
        count = len(tokens)
        self._append(
            np.asarray(tokens, np.int64),
            np.zeros(count, np.bool_),
            np.full(count, np.nan, np.float32),
            np.full(count, NO_VERSION, np.int64),
        )
        if not self.answers:
            self.num_prompt = len(self)

    def sample(self, answer: Answer) -> None:
        """Append what the model sampled."""
        self.answers.append(answer)
        sampled = np.ones(len(answer.tokens_T), np.bool_)
        self._append(answer.tokens_T.astype(np.int64), sampled, answer.logprobs_T, answer.versions_T.astype(np.int64))

    def cut(self, length: int) -> None:
        """Forget what comes after the first ``length`` tokens, none of which was sampled."""
        self.tokens_T, self.sampled_T = self.tokens_T[:length], self.sampled_T[:length]
        self.logprobs_T, self.versions_T = self.logprobs_T[:length], self.versions_T[:length]

    def _append(self, tokens: Any, sampled: Any, logprobs: Any, versions: Any) -> None:
        self.tokens_T = np.concatenate([self.tokens_T, tokens])
        self.sampled_T = np.concatenate([self.sampled_T, sampled])
        self.logprobs_T = np.concatenate([self.logprobs_T, logprobs.astype(np.float32)])
        self.versions_T = np.concatenate([self.versions_T, versions])


class Dialogue:
    """Builds prompts and records answers, turn by turn.

    Args:
        renderer: The chat template.
        on_rewrite: What happens when the template writes an earlier answer differently (templates that leave thoughts
            out do): ``splice`` keeps the ids that passed through the model, ``segment`` begins a new segment with the
            template's ids.
        tools: Schemas that the template shows.

    Attributes:
        segments: All segments, the current one last.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        *,
        on_rewrite: str = "splice",
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        require_choice("on_rewrite", on_rewrite, ON_REWRITE)
        self.segments: list[Segment] = []
        self._renderer = renderer
        self._on_rewrite = on_rewrite
        self._tools = tools
        # What the current segment says, message by message, its last answer included, as it was then; and the render of
        # its last prompt.
        self._said: list[Message] = []
        self._rendered: list[int] = []

    def prompt(self, messages: Sequence[Message]) -> NDArray[np.int32]:
        """Ids of the next turn's prompt, int32 [T].

        Args:
            messages: The whole chat: what earlier calls got, their answers, and what is new.
        """
        full = self._ids(messages, add_generation_prompt=True)
        ids = self._continued(messages, full) if self.segments else None
        if ids is None:
            self.segments.append(Segment())
            ids = full
        segment = self.segments[-1]
        segment.read(ids[len(segment) :])
        self._said = copied(messages)
        self._rendered = full
        return np.asarray(ids, np.int32)

    def answer(self, answer: Answer) -> str:
        """Record an answer to the last prompt.

        Returns:
            Its text without the token that ended the turn: the content of the assistant's message.
        """
        self.segments[-1].sample(answer)
        spoken = answer.tokens_T.tolist()
        if spoken and (spoken[-1] in self._renderer.answer_end_ids or spoken[-1] == answer.stop):
            spoken = spoken[:-1]
        text = self._renderer.decode(spoken)
        self._said.append({"role": "assistant", "content": text})
        return text

    def _continued(self, messages: Sequence[Message], full: list[int]) -> list[int] | None:
        """The current segment's ids and what is new; None when a new segment must begin."""
        said = len(self._said)
        if list(messages[:said]) != self._said:
            return None
        prefix = self._ids(messages[:said], add_generation_prompt=False)
        if self._rewrites(full):
            if self._on_rewrite == "segment":
                return None
            _warn_of_rewriting()
        try:
            added = self._added(prefix, full)
            if not self._begins_alike(prefix, full) and not self._shows(messages[said:], prefix):
                logger.info("a new segment begins: the chat template left out turns, so that they cannot be counted")
                return None
        except PrefixMismatchError as error:
            logger.info("a new segment begins: %s", error)
            return None
        return [*self.segments[-1].tokens_T.tolist(), *added]

    def _added(self, prefix: list[int], full: list[int]) -> list[int]:
        """What goes behind the current segment's ids."""
        exact = self.segments[-1].tokens_T.tolist()
        return replace_prefix_tokens(exact, prefix, full, self._renderer.end_of_turn_ids)[len(exact) :]

    def _begins_alike(self, prefix: list[int], full: list[int]) -> bool:
        """Whether the whole chat's render writes the turns before as they were, so that counting them is safe."""
        length = 1 + max(place for place, token in enumerate(prefix) if token in self._renderer.end_of_turn_ids)
        return full[:length] == prefix[:length]

    def _shows(self, new: Sequence[Message], prefix: list[int]) -> bool:
        """Whether all that is new stands in what would be added; counting alone loses it when turns are left out.

        Marks stand in for the texts: a template may escape those, and they may be part of a header or of one another.
        """
        marked, marks = _marked(new)
        text = self._renderer.decode(self._added(prefix, self._ids([*self._said, *marked], add_generation_prompt=True)))
        return all(mark in text for mark in marks)

    def _rewrites(self, full: list[int]) -> bool:
        """Whether the new render says something else than the last one and the answer to it."""
        before = self._renderer.decode(self._rendered) + self._said[-1]["content"].rstrip()
        return not self._renderer.decode(full).startswith(before)

    def _ids(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> list[int]:
        return self._renderer.ids(messages, add_generation_prompt=add_generation_prompt, tools=self._tools)


def copied(messages: Sequence[Message]) -> list[Message]:
    """Messages of one's own, which nobody else changes."""
    return [copy.deepcopy(dict(message)) for message in messages]


def _marked(messages: Sequence[Message]) -> tuple[list[Message], list[str]]:
    """The messages with a mark in place of each text, and the marks."""
    marks: list[str] = []

    def mark() -> str:
        marks.append(f"[text {len(marks)}]")
        return marks[-1]

    def marked(content: Any) -> Any:
        if isinstance(content, str):
            return mark()
        if not isinstance(content, list | tuple):
            return content
        return [{**part, "text": mark()} if _is_text(part) else part for part in content]

    contents = [{"content": marked(message["content"])} if "content" in message else {} for message in messages]
    return [{**message, **content} for message, content in zip(messages, contents, strict=True)], marks


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


class _Once:
    warned = False


def _warn_of_rewriting() -> None:
    if not _Once.warned:
        _Once.warned = True
        logger.warning(
            "the chat template writes earlier answers differently from what the model said (thoughts left out, white "
            "space): the ids that passed through the model are kept; on_rewrite='segment' begins a new segment instead"
        )

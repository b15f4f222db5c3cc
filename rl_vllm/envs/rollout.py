"""One rollout: a dialogue of the model with an interaction, turn by turn, without anything that generates.

Whoever drives it (an environment, a collector) gets a prompt, has it answered, and hands the answer back:

    rollout = Rollout(setup, entry)
    await rollout.begin()
    while not rollout.done:
        await rollout.take(answer_to(rollout.prompt_T))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_vllm.config import name_hint, require_above_zero, require_at_least, require_choice
from rl_vllm.envs.calls import call
from rl_vllm.envs.dialogue import ON_REWRITE, Answer, Dialogue, Segment, copied
from rl_vllm.envs.episode import Finished, Interaction, InteractionFactory, Message, Reply
from rl_vllm.envs.prompts import Entry
from rl_vllm.envs.reward import one_finite_number, shorten
from rl_vllm.envs.sources import first_messages
from rl_vllm.errors import BadInputError, ConfigError
from rl_vllm.policy import VLLMPolicy
from rl_vllm.policy.rendering import ChatRenderer
from rl_vllm.types import FinishReason

_RENDERER_SETTINGS = frozenset({"chat_template", "template_kwargs", "end_of_turn_ids"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSetup:
    """What all rollouts of a task have in common.

    Attributes:
        renderer: The chat template.
        max_model_len: Longest prompt plus response, in tokens.
        interaction: Makes the other side of each rollout; None means one turn.
        system_prompt: First message of every chat; None leaves it to the template.
        tools: Schemas that the template shows.
        max_turns: Answers of the model in one rollout, at most.
        on_rewrite: See :class:`rl_vllm.envs.dialogue.Dialogue`.
        interaction_timeout_s: Limit for each call to the interaction, in seconds.
    """

    renderer: ChatRenderer
    max_model_len: int
    interaction: InteractionFactory | None = None
    system_prompt: str | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    max_turns: int = 16
    on_rewrite: str = "splice"
    interaction_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        require_at_least("max_turns", self.max_turns, 1)
        require_above_zero("interaction_timeout_s", self.interaction_timeout_s)
        require_choice("on_rewrite", self.on_rewrite, ON_REWRITE)

    @property
    def is_single_turn(self) -> bool:
        """Whether a rollout is over with its first answer."""
        return self.interaction is None

    @classmethod
    def of(cls, policy: VLLMPolicy, **settings: Any) -> RolloutSetup:
        """The setup for rollouts of one policy: its tokenizer, template and context.

        Args:
            policy: Any input mode; it must have a tokenizer.
            settings: Fields of this class but ``renderer`` and ``max_model_len``, and arguments of
                :class:`rl_vllm.policy.ChatRenderer` but the first.

        Raises:
            ConfigError: The policy has no tokenizer, a name is unknown, or the renderer refuses.
        """
        if policy.tokenizer is None:
            raise ConfigError("rollouts render chats, and the policy has no tokenizer: pass it tokenizer=")
        known = sorted({entry.name for entry in fields(cls)} - {"renderer", "max_model_len"} | _RENDERER_SETTINGS)
        for name in settings:
            if name not in known:
                raise ConfigError(f"RolloutSetup has no setting {name!r}: {name_hint(name, known, 'it takes')}")
        info = policy.service.model_info()
        rendering = {name: settings.pop(name) for name in _RENDERER_SETTINGS & set(settings)}
        rendering.setdefault("chat_template", policy.options.chat_template)
        renderer = ChatRenderer(policy.tokenizer, eos_token_ids=info.eos_token_ids, **rendering)
        return cls(renderer=renderer, max_model_len=info.max_model_len, **settings)


class Rollout:
    """The state of one rollout.

    Args:
        setup: What it has in common with others.
        entry: The prompt's entry.

    Attributes:
        prompt_T: int32 [T], what the model reads next, or read last when the rollout is over.
        messages: The chat so far.
        turn_rewards: Of each turn that is over.
        done: It is over.
        truncated: It is over because the context or the turns ran out, or its last answer was cut by length.
    """

    def __init__(self, setup: RolloutSetup, entry: Entry) -> None:
        self.entry = entry
        self.prompt_T: NDArray[np.int32] = np.zeros(0, np.int32)
        self.messages: list[Message] = []
        self.turn_rewards: list[float] = []
        self.done = False
        self.truncated = False
        self._setup = setup
        self._dialogue = Dialogue(setup.renderer, on_rewrite=setup.on_rewrite, tools=setup.tools)
        self._interaction: Interaction | None = None
        self._response = ""

    @property
    def segments(self) -> list[Segment]:
        """What passed through the model."""
        return self._dialogue.segments

    async def begin(self) -> None:
        """Set ``prompt_T`` to the first prompt.

        Raises:
            BadInputError: The entry has no messages, or its prompt fills the context.
            Exception: What the interaction raised.
        """
        messages = copied(first_messages(self.entry, self._setup.system_prompt))
        if self._setup.interaction is not None:
            self._interaction = await self._call(self._setup.interaction, self.entry)
            messages = copied(await self._call(self._interaction.begin, messages))
        self.messages = messages
        self.prompt_T = self._dialogue.prompt(messages)
        if len(self.prompt_T) >= self._setup.max_model_len:
            raise BadInputError(
                f"the first prompt has {len(self.prompt_T)} tokens and the context {self._setup.max_model_len}: "
                "no room for a response token; shorten the prompt or raise max_model_len"
            )

    async def take(self, answer: Answer) -> float:
        """Record the answer to ``prompt_T``, and set the next prompt or ``done``.

        Returns:
            The turn's own reward.

        Raises:
            BadInputError: The interaction returned something else than a :class:`Reply`.
            RewardError: The turn's reward is not one finite number; names prompt and value.
            Exception: What the interaction raised.
        """
        text = self._dialogue.answer(answer)
        self._response = text.strip()
        self.messages = [*self.messages, {"role": "assistant", "content": text}]
        reply = Reply(done=True)
        if self._interaction is not None:
            reply = await self._reply_to(text, self._interaction)
        reward = one_finite_number(reply.reward, self._where())
        self.turn_rewards.append(reward)
        cut = answer.finish == FinishReason.LENGTH
        if reply.done or not reply.messages:
            self._end(truncated=cut)
        elif len(self.turn_rewards) >= self._setup.max_turns:
            self._end(truncated=True)
        else:
            self.messages = [*self.messages, *copied(reply.messages)]
            sealed, length = len(self.segments), len(self.segments[-1])
            prompt_T = self._dialogue.prompt(self.messages)
            if len(prompt_T) < self._setup.max_model_len:
                self.prompt_T = prompt_T
            else:
                self._forget_prompt(sealed, length)
                self._end(truncated=True)
        return reward

    def finished(self) -> Finished:
        """The rollout as reward functions see it; call it when it is done."""
        return Finished(
            entry=self.entry,
            messages=tuple(self.messages),
            response=self._response,
            num_turns=len(self.turn_rewards),
            truncated=self.truncated,
        )

    async def close(self) -> None:
        """Close the interaction; idempotent."""
        interaction, self._interaction = self._interaction, None
        if interaction is not None:
            await self._call(interaction.close)

    async def _reply_to(self, text: str, interaction: Interaction) -> Reply:
        reply = await self._call(interaction.reply, text, self.messages)
        if not isinstance(reply, Reply):
            raise BadInputError(
                f"{type(interaction).__name__}.reply returned {shorten(str(reply))} ({type(reply).__name__}) "
                f"instead of a Reply, on {self._where()}"
            )
        return reply

    def _where(self) -> str:
        question = shorten(str(self.entry.get("question", "")))
        return f"prompt {question}, turn {len(self.turn_rewards)}, answer {shorten(self._response)}"

    def _end(self, *, truncated: bool) -> None:
        self.done = True
        self.truncated = truncated

    def _forget_prompt(self, num_segments: int, length: int) -> None:
        """Take out of the segments what no model will read."""
        del self.segments[num_segments:]
        self.segments[-1].cut(length)

    async def _call(self, function: Any, *arguments: Any) -> Any:
        outcome = await call(function, *arguments, timeout_s=self._setup.interaction_timeout_s)
        if isinstance(outcome.error, Exception):
            raise outcome.error
        if outcome.error is not None:
            # An exit or a cancellation that it raised is its own failure, and nobody else's end.
            raise RuntimeError(f"an interaction raised {outcome.error!r}") from outcome.error
        return outcome.value

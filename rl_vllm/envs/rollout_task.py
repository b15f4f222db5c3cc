"""What is asked, how it goes on, and how it is scored, as one value that environments and collectors share."""

from __future__ import annotations

from typing import Any

from rl_vllm.envs.episode import InteractionFactory
from rl_vllm.envs.rewards import RewardLike, Rewards
from rl_vllm.envs.rollout import RolloutSetup
from rl_vllm.envs.sources import PromptData, PromptSource, as_source
from rl_vllm.envs.tools import ToolUse
from rl_vllm.policy import VLLMPolicy


class RolloutTask:
    """Prompts, rewards and the setup of their rollouts.

    Args:
        prompts: What :func:`rl_vllm.envs.as_source` takes: a list, a ``datasets.Dataset``, the path of a jsonl file, a
            generator function, a :class:`rl_vllm.envs.PromptSet`, a :class:`rl_vllm.envs.PromptSource`.
        reward: One function or several; see :class:`rl_vllm.envs.Rewards`.
        policy: Who answers; its tokenizer and chat template render the chats.
        interaction: Makes the other side of each multi-turn rollout; None means one turn. Of a
            :class:`rl_vllm.envs.ToolUse`, the schemas are shown by the template unless ``tools`` says otherwise.
        settings: Further fields of :class:`rl_vllm.envs.RolloutSetup`.

    Attributes:
        source: The prompts.
        rewards: The rewards.
        setup: What all rollouts have in common.

    Raises:
        BadInputError: The prompts cannot be read.
        ConfigError: A setting is unknown or out of range, or the policy has no tokenizer.
    """

    def __init__(
        self,
        prompts: PromptData,
        reward: RewardLike,
        *,
        policy: VLLMPolicy,
        interaction: InteractionFactory | None = None,
        **settings: Any,
    ) -> None:
        self.source: PromptSource = as_source(prompts)
        self.rewards = reward if isinstance(reward, Rewards) else Rewards(reward)
        if isinstance(interaction, ToolUse):
            settings.setdefault("tools", interaction.schemas)
        self.setup = RolloutSetup.of(policy, interaction=interaction, **settings)

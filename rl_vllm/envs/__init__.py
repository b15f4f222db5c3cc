"""Prompts and rewards as TorchRL environments."""

from rl_vllm.envs.env import PromptStream, make_env
from rl_vllm.envs.prompts import Entry, PromptSet, RewardFunction
from rl_vllm.envs.reward import PromptReward
from rl_vllm.envs.tasks import TaskConfig, TaskSplits, load_task

__all__ = [
    "Entry",
    "PromptReward",
    "PromptSet",
    "PromptStream",
    "RewardFunction",
    "TaskConfig",
    "TaskSplits",
    "load_task",
    "make_env",
]

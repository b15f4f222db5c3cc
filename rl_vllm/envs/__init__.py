"""Prompts, what rollouts talk to, and rewards; single-turn prompts also as TorchRL environments."""

from rl_vllm.envs.env import PromptStream, make_env
from rl_vllm.envs.episode import Finished, Interaction, InteractionFactory, Message, Reply
from rl_vllm.envs.games import GymnasiumText, TextEnv
from rl_vllm.envs.mcp import MCPServer, MCPTool
from rl_vllm.envs.prompts import Entry, PromptSet, RewardFunction
from rl_vllm.envs.reward import PromptReward
from rl_vllm.envs.rewards import Reward, Rewards, Score
from rl_vllm.envs.rollout import Rollout, RolloutSetup
from rl_vllm.envs.rollout_env import RolloutEnv
from rl_vllm.envs.rollout_task import RolloutTask
from rl_vllm.envs.sandbox import PythonSandbox
from rl_vllm.envs.sources import IndexedRows, PromptSource, as_source, first_messages
from rl_vllm.envs.tasks import TaskConfig, TaskSplits, from_prompt_set, load_task
from rl_vllm.envs.tools import ToolCall, ToolUse, parse_tool_calls
from rl_vllm.envs.verifiers import VerifiersRollouts, from_verifiers

__all__ = [
    "Entry",
    "Finished",
    "GymnasiumText",
    "IndexedRows",
    "Interaction",
    "InteractionFactory",
    "MCPServer",
    "MCPTool",
    "Message",
    "PromptReward",
    "PromptSet",
    "PromptSource",
    "PromptStream",
    "PythonSandbox",
    "Reply",
    "Reward",
    "RewardFunction",
    "Rewards",
    "Rollout",
    "RolloutEnv",
    "RolloutSetup",
    "RolloutTask",
    "Score",
    "TaskConfig",
    "TaskSplits",
    "TextEnv",
    "ToolCall",
    "ToolUse",
    "VerifiersRollouts",
    "as_source",
    "first_messages",
    "from_prompt_set",
    "from_verifiers",
    "load_task",
    "make_env",
    "parse_tool_calls",
]

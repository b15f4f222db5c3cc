"""A tensordict policy over any generation service."""

from rl_vllm.policy.options import PolicyOptions
from rl_vllm.policy.policy import VLLMPolicy
from rl_vllm.policy.rendering import ChatRenderer
from rl_vllm.policy.sampling import CallSeeds, merge_sampling, sampling_from
from rl_vllm.policy.splice import replace_prefix_tokens

__all__ = [
    "VLLMPolicy",
    "PolicyOptions",
    "CallSeeds",
    "merge_sampling",
    "sampling_from",
    "ChatRenderer",
    "replace_prefix_tokens",
]

"""A tensordict policy over any generation service."""

from rl_vllm.policy.options import PolicyOptions
from rl_vllm.policy.policy import VLLMPolicy
from rl_vllm.policy.sampling import CallSeeds, merge_sampling, sampling_from

__all__ = ["VLLMPolicy", "PolicyOptions", "CallSeeds", "merge_sampling", "sampling_from"]

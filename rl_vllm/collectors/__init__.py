"""Between rollouts and replay buffers: what TorchRL's collectors and buffers leave to the user."""

from rl_vllm.collectors.advantages import GroupAdvantages, group_advantages

__all__ = ["GroupAdvantages", "group_advantages"]

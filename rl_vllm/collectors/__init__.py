"""Between rollouts and replay buffers: what TorchRL's collectors and buffers leave to the user."""

from rl_vllm.collectors.advantages import GroupAdvantages, group_advantages
from rl_vllm.collectors.async_collector import AsyncRolloutCollector
from rl_vllm.collectors.config import CollectorConfig
from rl_vllm.collectors.ratios import RatioStats, ratio_stats
from rl_vllm.collectors.stats import CollectorStats

__all__ = [
    "AsyncRolloutCollector",
    "CollectorConfig",
    "CollectorStats",
    "GroupAdvantages",
    "RatioStats",
    "group_advantages",
    "ratio_stats",
]

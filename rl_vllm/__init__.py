"""A rollout engine for TorchRL: an async, multi-replica vLLM service behind a tensordict policy.

The public names are imported when they are first used: ``import rl_vllm`` loads neither vLLM, Ray nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_vllm.async_vllm import AsyncVLLM, make_async_vllm_engine
    from rl_vllm.collectors import AsyncRolloutCollector, CollectorConfig
    from rl_vllm.config import EngineConfig, RefitConfig, ServiceConfig
    from rl_vllm.envs import RolloutEnv, RolloutTask
    from rl_vllm.policy import VLLMPolicy, replace_prefix_tokens
    from rl_vllm.types import RefitReceipt, SamplingConfig
    from rl_vllm.weights import VLLMWeightSyncScheme

__version__ = "0.1.0"

__all__ = [
    "AsyncRolloutCollector",
    "AsyncVLLM",
    "CollectorConfig",
    "EngineConfig",
    "RefitConfig",
    "RefitReceipt",
    "RolloutEnv",
    "RolloutTask",
    "SamplingConfig",
    "ServiceConfig",
    "VLLMPolicy",
    "VLLMWeightSyncScheme",
    "__version__",
    "make_async_vllm_engine",
    "replace_prefix_tokens",
]

_HOMES = {
    "AsyncRolloutCollector": "rl_vllm.collectors",
    "AsyncVLLM": "rl_vllm.async_vllm",
    "CollectorConfig": "rl_vllm.collectors",
    "EngineConfig": "rl_vllm.config",
    "RefitConfig": "rl_vllm.config",
    "RefitReceipt": "rl_vllm.types",
    "RolloutEnv": "rl_vllm.envs",
    "RolloutTask": "rl_vllm.envs",
    "SamplingConfig": "rl_vllm.types",
    "ServiceConfig": "rl_vllm.config",
    "VLLMPolicy": "rl_vllm.policy",
    "VLLMWeightSyncScheme": "rl_vllm.weights",
    "make_async_vllm_engine": "rl_vllm.async_vllm",
    "replace_prefix_tokens": "rl_vllm.policy",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))

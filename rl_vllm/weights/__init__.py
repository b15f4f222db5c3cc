"""Weights from a trainer to every replica, with proof that they took."""

from rl_vllm.weights.broadcast import BroadcastTransport
from rl_vllm.weights.check import check_specs
from rl_vllm.weights.lockstep import LeadingSource, join_refit
from rl_vllm.weights.scheme import VLLMWeightReceiver, VLLMWeightSender, VLLMWeightSyncScheme
from rl_vllm.weights.shared_storage import SharedStorageTransport
from rl_vllm.weights.source import CastSource, ModuleSource
from rl_vllm.weights.update import refit

__all__ = [
    "BroadcastTransport",
    "CastSource",
    "LeadingSource",
    "ModuleSource",
    "SharedStorageTransport",
    "VLLMWeightReceiver",
    "VLLMWeightSender",
    "VLLMWeightSyncScheme",
    "check_specs",
    "join_refit",
    "refit",
]

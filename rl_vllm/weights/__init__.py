"""Weights from a trainer to every replica, with proof that they took."""

from rl_vllm.weights.adapter import refit_adapter
from rl_vllm.weights.auto import RefitFacts, TransportChoice, choose_transport
from rl_vllm.weights.broadcast import BroadcastTransport
from rl_vllm.weights.check import check_specs
from rl_vllm.weights.ipc import IPCTransport
from rl_vllm.weights.lockstep import LeadingSource, join_refit
from rl_vllm.weights.object_store import ObjectStoreTransport
from rl_vllm.weights.scheme import VLLMWeightReceiver, VLLMWeightSender, VLLMWeightSyncScheme
from rl_vllm.weights.shared_storage import SharedStorageTransport
from rl_vllm.weights.source import CastSource, ModuleSource
from rl_vllm.weights.update import refit
from rl_vllm.weights.vllm_nccl import VLLMNCCLTransport

__all__ = [
    "BroadcastTransport",
    "CastSource",
    "IPCTransport",
    "LeadingSource",
    "ModuleSource",
    "ObjectStoreTransport",
    "RefitFacts",
    "SharedStorageTransport",
    "TransportChoice",
    "VLLMNCCLTransport",
    "VLLMWeightReceiver",
    "VLLMWeightSender",
    "VLLMWeightSyncScheme",
    "check_specs",
    "choose_transport",
    "join_refit",
    "refit",
    "refit_adapter",
]

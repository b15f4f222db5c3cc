"""Frozen values shared by every layer."""

from rl_vllm.types.batch import (
    CompletionBatch,
    FinishReason,
    PromptBatch,
    RequestBatch,
    RequestFailure,
    WeightVersionSpan,
    pack_rows,
)
from rl_vllm.types.sampling import SamplingConfig
from rl_vllm.types.state import BadPrompt, EngineMetrics, ModelInfo, ReplicaState
from rl_vllm.types.weights import (
    CommitReport,
    InFlight,
    KVCache,
    RefitReceipt,
    ShardEntry,
    TensorSpec,
    WeightManifest,
    WeightUpdate,
    weights_digest,
)

__all__ = [
    "BadPrompt",
    "CommitReport",
    "CompletionBatch",
    "EngineMetrics",
    "FinishReason",
    "InFlight",
    "KVCache",
    "ModelInfo",
    "PromptBatch",
    "RefitReceipt",
    "ReplicaState",
    "RequestBatch",
    "RequestFailure",
    "SamplingConfig",
    "ShardEntry",
    "TensorSpec",
    "WeightManifest",
    "WeightUpdate",
    "WeightVersionSpan",
    "pack_rows",
    "weights_digest",
]

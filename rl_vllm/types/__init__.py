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
from rl_vllm.types.embedding import EmbeddingBatch, EmbeddingRequest, PoolingConfig
from rl_vllm.types.sampling import SamplingConfig
from rl_vllm.types.state import (
    BadPrompt,
    EngineMetrics,
    LoRAAdapter,
    ModelInfo,
    Overload,
    ReplicaState,
    RequestStatus,
)
from rl_vllm.types.stats import ReplicaSample, ReplicaStats
from rl_vllm.types.weights import (
    CommitReport,
    InFlight,
    KVCache,
    RefitReceipt,
    Sending,
    ShardEntry,
    TensorSpec,
    Verify,
    WeightManifest,
    WeightReceiver,
    WeightUpdate,
    digest_of,
    weights_digest,
)

__all__ = [
    "BadPrompt",
    "CommitReport",
    "CompletionBatch",
    "EmbeddingBatch",
    "EmbeddingRequest",
    "EngineMetrics",
    "FinishReason",
    "InFlight",
    "KVCache",
    "LoRAAdapter",
    "ModelInfo",
    "Overload",
    "PoolingConfig",
    "PromptBatch",
    "RefitReceipt",
    "ReplicaSample",
    "ReplicaState",
    "ReplicaStats",
    "RequestBatch",
    "RequestFailure",
    "RequestStatus",
    "SamplingConfig",
    "Sending",
    "ShardEntry",
    "TensorSpec",
    "Verify",
    "WeightManifest",
    "WeightReceiver",
    "WeightUpdate",
    "WeightVersionSpan",
    "pack_rows",
    "digest_of",
    "weights_digest",
]

"""Every exception this package raises on purpose.

Each class states what happened, with values, and what to do; keeps the facts as attributes; and survives pickling,
because most of them cross a process boundary before anyone reads them.
"""

from rl_vllm.errors.base import (
    BadInputError,
    BadPromptError,
    ConfigError,
    DeadlineError,
    EngineDiedError,
    EngineStartError,
    NoReplicaServesError,
    NotEnoughResourcesError,
    ReplicaCallError,
    ReplicaIndexError,
    RLVLLMError,
    ServiceAsleepError,
    ServiceNotRunningError,
    ServiceOverloadedError,
    UnknownRequestError,
    UnsupportedByEngineError,
)
from rl_vllm.errors.rollouts import (
    GenerationError,
    MissingLogprobError,
    MixedVersionsError,
    NoProgressError,
    OverSamplingError,
    PrefixMismatchError,
    RewardError,
)
from rl_vllm.errors.weights import (
    AdapterMismatchError,
    AdapterRefitError,
    RefitError,
    WeightsMismatchError,
)

__all__ = [
    "AdapterMismatchError",
    "AdapterRefitError",
    "BadInputError",
    "BadPromptError",
    "ConfigError",
    "DeadlineError",
    "EngineDiedError",
    "EngineStartError",
    "GenerationError",
    "MissingLogprobError",
    "MixedVersionsError",
    "NoProgressError",
    "NoReplicaServesError",
    "NotEnoughResourcesError",
    "OverSamplingError",
    "PrefixMismatchError",
    "RLVLLMError",
    "RefitError",
    "ReplicaCallError",
    "ReplicaIndexError",
    "RewardError",
    "ServiceAsleepError",
    "ServiceNotRunningError",
    "ServiceOverloadedError",
    "UnknownRequestError",
    "UnsupportedByEngineError",
    "WeightsMismatchError",
]

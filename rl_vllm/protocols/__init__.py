"""The seams: what the layers know of each other.

Policy and weights see only this package, so both run against the fakes in :mod:`rl_vllm.testing`.
"""

from rl_vllm.protocols.engine import Engine
from rl_vllm.protocols.service import AdapterService, AsyncGenerationService, GenerationService
from rl_vllm.protocols.trainer_end import GroupPlan, Peers, TrainerEnd, TrainerEndOpener
from rl_vllm.protocols.weights import SendingTransport, WeightSource, WeightTransport

__all__ = [
    "AdapterService",
    "AsyncGenerationService",
    "Engine",
    "GenerationService",
    "GroupPlan",
    "Peers",
    "SendingTransport",
    "TrainerEnd",
    "TrainerEndOpener",
    "WeightSource",
    "WeightTransport",
]

"""The multi-replica service: launch, routing, the request table, refits, clean-up."""

from rl_vllm.service.outputs import CompletionOutput, Logprob, PoolingOutput, PoolingRequestOutput, RequestOutput
from rl_vllm.service.requests import RequestManager, StreamingRequest
from rl_vllm.service.service import VLLMService

__all__ = [
    "CompletionOutput",
    "Logprob",
    "PoolingOutput",
    "PoolingRequestOutput",
    "RequestManager",
    "RequestOutput",
    "StreamingRequest",
    "VLLMService",
]

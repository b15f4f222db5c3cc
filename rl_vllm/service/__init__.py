"""The multi-replica service: launch, routing, the request table, refits, clean-up."""

from rl_vllm.service.outputs import CompletionOutput, Logprob, PoolingOutput, PoolingRequestOutput, RequestOutput
from rl_vllm.service.remote import RemoteService
from rl_vllm.service.requests import RequestManager, StreamingRequest
from rl_vllm.service.service import VLLMService

__all__ = [
    "CompletionOutput",
    "Logprob",
    "PoolingOutput",
    "PoolingRequestOutput",
    "RemoteService",
    "RequestManager",
    "RequestOutput",
    "StreamingRequest",
    "VLLMService",
]

"""The service with TorchRL's engine interface."""

from rl_vllm.async_vllm.engine import AsyncVLLM, make_async_vllm_engine

__all__ = ["AsyncVLLM", "make_async_vllm_engine"]

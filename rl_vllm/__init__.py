"""A rollout engine for TorchRL: an async, multi-replica vLLM service behind a tensordict policy."""

__version__ = "0.1.0"

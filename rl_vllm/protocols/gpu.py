"""The GPU that this process computes on: asked for here only, so that a machine without one can stand in for it."""

from __future__ import annotations

import torch

from rl_vllm.errors import ConfigError


def require_gpu(transport: str) -> None:
    """Refuse a transport that exists on GPUs only.

    Raises:
        ConfigError: This process has no GPU.
    """
    if not torch.cuda.is_available():
        raise ConfigError(
            f"transport={transport!r} moves weights between GPUs and this process sees none: use "
            "transport='broadcast' or transport='shared_storage', or give the trainer a GPU (CUDA_VISIBLE_DEVICES)"
        )


def this_gpu() -> torch.device:
    """The GPU that is current in the calling thread."""
    return torch.device("cuda", torch.cuda.current_device())


def use_gpu(device: torch.device) -> None:
    """Make it the calling thread's: a new thread begins with the first GPU. Nothing for a CPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def gpu_uuid(device: torch.device) -> str:
    """What tells one GPU from all others, on this host and elsewhere; empty for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def settle(device: torch.device) -> None:
    """Wait until the calling thread's stream has done what it was given. Nothing for a CPU."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def collect_ipc() -> None:
    """Free memory that other processes do not map any more."""
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]

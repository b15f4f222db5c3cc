"""Entry point of ``vllm.general_plugins``: vLLM calls :func:`register` in each of its processes."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

BACKEND = "rl_vllm"

# Set by the actor that owns an engine.
DIE_WITH_PARENT = "RL_VLLM_DIE_WITH_PARENT"
_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Make the weight-transfer backend ``rl_vllm`` known to this process.

    Idempotent. Only the name is registered: the backend's module is imported when an engine asks for it, so a user who
    has this package installed and runs vLLM without it pays nothing.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "rl_vllm.engine.transfer", "RefitTransferEngine")

    if DIE_WITH_PARENT in os.environ and _is_engine_process():
        _die_with_parent()
        _make_seeds_safe()


def _is_engine_process() -> bool:
    """Whether this is a process that vLLM started, and not the one that owns the engine."""
    return os.environ[DIE_WITH_PARENT] != str(os.getpid())


def _die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends: a killed owner cannot stop its engine any more."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        # The parent was gone before the request was made.
        os.kill(os.getpid(), signal.SIGKILL)


def _make_seeds_safe() -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from rl_vllm.engine import cpu_seeds

        cpu_seeds.install()

"""Entry point of ``vllm.general_plugins``: vLLM calls :func:`register` in each of its processes."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from rl_vllm.engine.segment_names import name_after

BACKEND = "rl_vllm"

# Set by whoever owns an engine: its pid, and its thread when the engine is one of several things in a program.
DIE_WITH_PARENT = "RL_VLLM_DIE_WITH_PARENT"
OWNER_THREAD = "RL_VLLM_OWNER_THREAD"
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
        thread = os.environ.get(OWNER_THREAD)
        name_after(int(os.environ[DIE_WITH_PARENT]), None if thread is None else int(thread))
        _die_with_parent()
        _correct_cpu_build()


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


def _correct_cpu_build() -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from rl_vllm.engine import cpu_idle, cpu_lora, cpu_seeds

        cpu_idle.install()
        cpu_seeds.install()
        cpu_lora.install()

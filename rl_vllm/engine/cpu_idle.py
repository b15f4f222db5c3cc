"""Leave the cores to others while an engine has nothing to do.

A worker of vLLM looks for its next message without a pause until a second after the last one. Every heartbeat is a
message: an idle replica on CPUs would take half a core from the trainer beside it.
"""

from __future__ import annotations

from functools import partial

# Longer than a step of generation, after which the next message comes at once.
_LOOKS_FOR_S = 0.05


def install() -> None:
    """Have workers in this process wait for a signal sooner. Idempotent."""
    from vllm.distributed.device_communicators import shm_broadcast

    if not isinstance(shm_broadcast.SpinCondition, partial):
        shm_broadcast.SpinCondition = partial(shm_broadcast.SpinCondition, busy_loop_s=_LOOKS_FOR_S)

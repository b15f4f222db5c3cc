"""Shared memory that says whose it is: what a killed engine leaves is then found by name."""

from __future__ import annotations

from multiprocessing import process, shared_memory

from rl_vllm.engine import reaper

_RANDOM_CHARACTERS = 16


def name_after(owner: int, thread: int | None = None) -> None:
    """Have this process's segments and semaphores bear the name of the engine's owner: a process, or one thread of it.

    A reaper that looks now and then does not see those that were made just before an engine was killed.
    """
    mark = reaper.owner_mark(owner, thread)
    if mark is None:
        # The owner is gone, and this process about to follow it.
        return
    # ``multiprocessing`` has no interface for it; it names what it makes after these.
    prefix = f"/psm_{mark}"
    vars(shared_memory)["_SHM_NAME_PREFIX"] = prefix
    vars(shared_memory)["_SHM_SAFE_NAME_LENGTH"] = len(prefix) + _RANDOM_CHARACTERS
    vars(process.current_process())["_config"]["semprefix"] = f"/mp-{mark}"

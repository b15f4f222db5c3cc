"""Cores of a CPU replica: its own while there are enough.

Left alone, every engine binds to the first core of the machine.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import tempfile
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)


class CoreLease:
    """Cores held by this process until it ends or calls :meth:`release`.

    A core is held by a lock on a file, which the kernel drops when the process dies, however it dies.

    Args:
        num_workers: Worker processes of the engine.
        cores_per_worker: Cores each of them computes on.
        folder: Where the lock files lie; one folder per machine and user.
    """

    def __init__(self, *, num_workers: int, cores_per_worker: int, folder: Path | None = None) -> None:
        self._folder = folder or Path(tempfile.gettempdir()) / f"rl_vllm-cores-{os.getuid()}"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._locks: list[IO[str]] = []
        allowed = sorted(os.sched_getaffinity(0))
        wanted = num_workers * cores_per_worker
        held: list[int] = []
        # More engines than cores: the rest share, every core twice before any three times.
        for place in itertools.count():
            held += self._take_free(allowed, place, wanted - len(held))
            if place == 0 and len(held) < wanted:
                logger.warning("only %d of the %d cores asked for are free: others are shared", len(held), wanted)
            if len(held) == wanted:
                break
        self.groups = tuple(
            tuple(held[worker * cores_per_worker : (worker + 1) * cores_per_worker]) for worker in range(num_workers)
        )

    @property
    def environment(self) -> dict[str, str | None]:
        """What the engine's processes are started with; None for what must not be set."""
        return {
            "VLLM_CPU_OMP_THREADS_BIND": self.binding,
            # Would override the size in the engine's settings.
            "VLLM_CPU_KVCACHE_SPACE": None,
            # Weights in huge pages: most of the time to load them goes into getting pages.
            "THP_MEM_ALLOC_ENABLE": "1",
        }

    @property
    def binding(self) -> str:
        """The groups in vLLM's notation: cores of one worker joined by commas, workers by ``|``."""
        return "|".join(",".join(map(str, sorted(set(group)))) for group in self.groups)

    def release(self) -> None:
        """Let others have the cores. Idempotent."""
        for lock in self._locks:
            lock.close()
        self._locks.clear()

    def _take_free(self, allowed: list[int], place: int, wanted: int) -> list[int]:
        """Up to ``wanted`` cores whose lock number ``place`` is free: each lock is a place for one holder."""
        held: list[int] = []
        for core in allowed:
            if len(held) == wanted:
                break
            file = (self._folder / f"core-{core}.{place}.lock").open("w")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
            else:
                self._locks.append(file)
                held.append(core)
        return held

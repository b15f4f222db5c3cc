"""Finds what a test session leaves behind: engine and Ray processes, and shared memory."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

# Every process started below the session inherits this variable, whoever its parent is later.
MARKER = "RL_VLLM_TEST_SESSION"
SHARED_MEMORY = Path("/dev/shm")
_POLL_S = 0.1


@dataclass(frozen=True)
class Snapshot:
    """What was there when the session started, which is none of its business.

    Attributes:
        session: The value of ``MARKER`` in this session.
        started: (pid, creation time) of every process.
        segments: Names of the shared-memory files.
    """

    session: str
    started: frozenset[tuple[int, float]]
    segments: frozenset[str]

    @classmethod
    def take(cls) -> Snapshot:
        """Mark this process, and so all that it starts from now on, and note what exists."""
        os.environ[MARKER] = secrets.token_hex(8)
        # setproctitle would write long titles over the variables of a process, the marker among them.
        os.environ["SPT_NOENV"] = "1"
        started = frozenset(_identity(process) for process in psutil.process_iter())
        return cls(os.environ[MARKER], started, frozenset(_segments()))

    def leftovers(self, *, within_s: float) -> list[str]:
        """A line for each leftover that is still there after ``within_s`` seconds; returns early when none is."""
        deadline = time.monotonic() + within_s
        while True:
            found = [*self._processes(), *self._shared_memory()]
            if not found or time.monotonic() >= deadline:
                return found
            time.sleep(_POLL_S)

    def _processes(self) -> Iterator[str]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if _is_engine_or_ray(process) and self._started(process):
                    yield f"process {process.pid}: {_title(process)}"

    def _shared_memory(self) -> Iterator[str]:
        new = _segments() - self.segments
        if not new:
            return
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if not self._started(process):
                    new -= _mapped_segments(process)
        yield from (f"shared memory {SHARED_MEMORY / name}" for name in sorted(new))

    def _started(self, process: psutil.Process) -> bool:
        """Whether this session started a process, or is it."""
        if process.pid == os.getpid():
            return True
        if process.status() == psutil.STATUS_ZOMBIE or _identity(process) in self.started:
            return False
        environment = process.environ()
        if environment:
            return environment.get(MARKER) == self.session
        # Its variables are gone: judge by its parents. An orphan is nobody else's either.
        parents = [parent.pid for parent in process.parents()]
        return os.getpid() in parents or process.ppid() == 1


def _identity(process: psutil.Process) -> tuple[int, float]:
    return process.pid, process.create_time()


def _title(process: psutil.Process) -> str:
    return " ".join(process.cmdline()).strip() or process.name()


def _is_engine_or_ray(process: psutil.Process) -> bool:
    title = _title(process)
    return title.startswith(("VLLM::", "ray::")) or any(
        part in title for part in ("/ray/core/src/", "/ray/_private/", "/ray/dashboard/", "ray-dashboard")
    )


def _segments() -> set[str]:
    """Shared-memory files as Python's ``multiprocessing.shared_memory`` names them."""
    return {path.name for path in SHARED_MEMORY.glob("psm_*")}


def _mapped_segments(process: psutil.Process) -> set[str]:
    """Names of the shared-memory files that a living process holds; none where the system does not tell."""
    try:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
    except OSError:
        return set()
    return {line.rpartition("/")[2] for line in maps.splitlines() if str(SHARED_MEMORY) in line}

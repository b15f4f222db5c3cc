"""Finds what a test session leaves behind: engine and Ray processes, shared memory, listening ports."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

# Every process started below the session inherits this variable, whoever its parent is later.
MARKER = "RL_VLLM_TEST_SESSION"
SHARED_MEMORY = Path("/dev/shm")
_POLL_S = 0.1
_WATCH_PERIOD_S = 2.0
_OWN_TITLES = ("VLLM::", "ray::")
_OWN_PROGRAMS = (
    "/ray/core/src/",
    "/ray/_private/",
    "/ray/dashboard/",
    "ray-dashboard",
    "--multiprocessing-fork",
    "/rl_vllm/engine/reaper.py",
)
Identity = tuple[int, float]


@dataclass
class Snapshot:
    """What was there when the session started, which is none of its business, and what it has made since.

    Shared memory bears no name of its maker. So who maps which file is looked at again and again: what a process of the
    session has mapped is the session's. A file that nobody was seen to map is the session's too, unless somebody else
    ran engines, Ray or tests meanwhile, whose it may be. Files are told by their inodes: who makes a semaphore maps it
    under a passing name.

    Attributes:
        session: The value of ``MARKER`` in this session.
        started: (pid, creation time) of every process.
        segments: Inodes of the shared-memory files.
        mapped: Inodes of the new files that processes of the session were seen to map.
        is_shared: Whether others were seen that make shared memory.
    """

    session: str
    started: frozenset[Identity]
    segments: frozenset[int]
    mapped: set[int] = field(default_factory=set)
    is_shared: bool = False
    _foreign: set[Identity] = field(default_factory=set)

    @classmethod
    def take(cls) -> Snapshot:
        """Mark this process, and so all that it starts from now on, and note what exists."""
        os.environ[MARKER] = secrets.token_hex(8)
        # setproctitle would write long titles over the variables of a process, the marker among them.
        os.environ["SPT_NOENV"] = "1"
        started = frozenset(_identity(process) for process in psutil.process_iter())
        return cls(os.environ[MARKER], started, frozenset(_segments().values()))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Look who maps what every now and then."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(_WATCH_PERIOD_S):
                self.look()

        thread = threading.Thread(target=watch, name="leaks", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def look(self) -> None:
        """Note which new files the session's processes map now, and whether others make such files."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if self._is_ours(process):
                    self.mapped |= _mapped_inodes(process) - self.segments
                elif not self.is_shared:
                    self.is_shared = _is_engine_or_ray(process) or MARKER in process.environ()

    def leftovers(self, *, within_s: float) -> list[str]:
        """A line for each leftover that is still there after ``within_s`` seconds; returns early when none is."""
        deadline = time.monotonic() + within_s
        while True:
            self.look()
            found = [*self._processes(), *self._shared_memory(), *self._ports()]
            if not found or time.monotonic() >= deadline:
                return found
            time.sleep(_POLL_S)

    def _processes(self) -> Iterator[str]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if _is_engine_or_ray(process) and self._is_ours(process):
                    yield f"process {process.pid}: {_title(process)}"

    def _shared_memory(self) -> Iterator[str]:
        new = {name: inode for name, inode in _segments().items() if inode not in self.segments}
        suspected = {name for name, inode in new.items() if inode in self.mapped}
        if not self.is_shared:
            suspected |= {name for name in new if name.startswith(("psm_", "sem.mp-"))}
        if not suspected:
            return
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                held = _mapped_inodes(process)
                if not self._is_ours(process):
                    suspected -= {name for name in suspected if new[name] in held}
                elif process.pid == os.getpid():
                    # A lock of this process: it is removed with the object, at the latest when the process ends.
                    suspected -= {name for name in suspected if new[name] in held and name.startswith("sem.mp-")}
        yield from (f"shared memory {SHARED_MEMORY / name}" for name in sorted(suspected))

    def _ports(self) -> Iterator[str]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                # This process is about to end, and what it listens on with it: gloo, for one, never closes its port.
                if process.pid != os.getpid() and self._is_ours(process):
                    for port in sorted(_listening(process)):
                        yield f"port {port} of process {process.pid}: {_title(process)}"

    def _is_ours(self, process: psutil.Process) -> bool:
        """Whether this session started a process, or is it."""
        if process.pid == os.getpid():
            return True
        if process.status() == psutil.STATUS_ZOMBIE or _identity(process) in self.started:
            return False
        identity = _identity(process)
        if identity in self._foreign:
            return False
        environment = process.environ()
        if not environment:
            # Its variables are gone, or not yet its own: judge by its parents. An orphan is nobody else's either.
            parents = [parent.pid for parent in process.parents()]
            return os.getpid() in parents or (process.ppid() == 1 and _is_engine_or_ray(process))
        if environment.get(MARKER) == self.session:
            return True
        self._foreign.add(identity)
        return False


def _identity(process: psutil.Process) -> Identity:
    return process.pid, process.create_time()


def _title(process: psutil.Process) -> str:
    return " ".join(process.cmdline()).strip() or process.name()


def _is_engine_or_ray(process: psutil.Process) -> bool:
    title = _title(process)
    return title.startswith(_OWN_TITLES) or any(part in title for part in _OWN_PROGRAMS)


def _listening(process: psutil.Process) -> set[str]:
    """Addresses on which a process listens for TCP."""
    connections = process.net_connections("tcp")
    return {f"{each.laddr.ip}:{each.laddr.port}" for each in connections if each.status == psutil.CONN_LISTEN}


def _segments() -> dict[str, int]:
    """Names of all shared-memory files with their inodes."""
    found = {}
    for path in SHARED_MEMORY.glob("*"):
        with contextlib.suppress(FileNotFoundError):
            found[path.name] = path.stat().st_ino
    return found


def _mapped_inodes(process: psutil.Process) -> set[int]:
    """Shared-memory files that a living process holds; none where the system does not tell."""
    try:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
    except OSError:
        return set()
    return {int(line.split(None, 5)[4]) for line in maps.splitlines() if f"{SHARED_MEMORY}/" in line}

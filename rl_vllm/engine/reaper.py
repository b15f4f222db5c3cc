"""Clean up after an engine's owner, however it ended.

Usage: ``python reaper.py PID [THREAD]``. Leaves a process of its own behind, detached from PID, on the standard library
alone, and ends when that has taken its first look: what PID has then is known, however soon PID ends. While PID lives
it notes its descendants and the shared-memory files they map. When PID is gone it kills those that are left, and
removes the files that bear PID's name, and those of the others that nobody maps any more: a killed engine leaves its
``psm_*`` segments behind. With THREAD, one of PID's, it watches that thread; what others of PID have
started is none of its business.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# Engines make their segments while they start: look often then, and seldom later.
_START_S = 60.0
_START_SCAN_PERIOD_S = 0.25
_SCAN_PERIOD_S = 1.0
_KILL_GRACE_S = 5.0
_IN_USE_GRACE_S = 15.0
_START_TIMEOUT_S = 30.0
# Shared memory and semaphores of Python's multiprocessing.
_SEGMENTS = ("/dev/shm/psm_", "/dev/shm/sem.mp-")

# A process is told from a later one with the same pid by its start time.
Process = tuple[int, str]


def start_time(pid: int) -> str | None:
    """Ticks from boot to the process's start, or None when there is no such process or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def owner_mark(pid: int, thread: int | None = None) -> str | None:
    """What the names of an owner's shared-memory files contain, of all its threads or of one; None if it is gone.

    Unlike a pid alone, it is never another's: it holds the time when the process began.
    """
    began = start_time(pid)
    if began is None:
        return None
    return f"{pid:x}-{int(began):x}-" + ("" if thread is None else f"{thread:x}-")


def descendants(pid: int, thread: int | None = None) -> set[Process]:
    """Living children of ``pid``, or only those that one of its threads started, their children, and so on."""
    found: set[Process] = set()
    for task in [str(thread)] if thread is not None else _threads(pid):
        with suppress(OSError):
            for child in map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split()):
                began = start_time(child)
                if began is not None:
                    found.add((child, began))
                    found |= descendants(child)
    return found


def _threads(pid: int) -> list[str]:
    try:
        return [path.name for path in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []


def mapped_segments(pid: int) -> set[str]:
    """Shared-memory files of Python's ``multiprocessing`` that a process maps.

    They are told by their inodes: who makes a semaphore maps it under a passing name.
    """
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    inodes = {line.split(None, 5)[4] for line in lines if "/dev/shm/" in line}
    return {name for name, inode in _segments().items() if inode in inodes} if inodes else set()


def _segments() -> dict[str, str]:
    """Every shared-memory file of ``multiprocessing`` with its inode."""
    found = {}
    for path in Path("/dev/shm").glob("*"):
        if str(path).startswith(_SEGMENTS):
            with suppress(FileNotFoundError):
                found[str(path)] = str(path.stat().st_ino)
    return found


def kill_all(processes: set[Process]) -> None:
    """Kill what still runs of ``processes`` and wait until it is gone."""
    deadline = time.monotonic() + _KILL_GRACE_S
    while time.monotonic() < deadline:
        alive = [pid for pid, began in processes if start_time(pid) == began]
        if not alive:
            return
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def remove_unused(segments: set[str]) -> set[str]:
    """Remove the files that no process maps; the others."""
    in_use = {name for entry in Path("/proc").glob("[0-9]*") for name in mapped_segments(int(entry.name))}
    for name in segments - in_use:
        with suppress(FileNotFoundError):
            Path(name).unlink()
    return segments & in_use


def remove_when_unused(segments: set[str], within_s: float) -> None:
    """Remove files as the processes that map them end: on a busy machine a killed one takes its time."""
    deadline = time.monotonic() + within_s
    left = remove_unused(segments)
    while left and time.monotonic() < deadline:
        time.sleep(_START_SCAN_PERIOD_S)
        left = remove_unused(left)


def watch(pid: int, thread: int | None, on_first_look: Callable[[], None]) -> None:
    """Return when ``pid``, or its ``thread``, has ended and nothing of it is left; say when its family is known."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    mark = owner_mark(pid, thread)
    # An owner that starts its own reaper has this process among its descendants until that is detached.
    itself = {(os.getpid(), start_time(os.getpid()) or "")}
    seen: set[Process] = set()
    segments: set[str] = set()
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    ended = False
    first = True
    settled = time.monotonic() + _START_S
    while not ended:
        period_s = _START_SCAN_PERIOD_S if time.monotonic() < settled else _SCAN_PERIOD_S
        ended = bool(poller.poll(0 if first else period_s * 1000))
        ended = ended or (thread is not None and not Path(f"/proc/{pid}/task/{thread}").exists())
        seen |= descendants(pid, thread)
        # A child of an engine that has died is nobody's descendant: look below everything seen before.
        for child, began in list(seen):
            if start_time(child) == began:
                seen |= descendants(child)
                segments |= mapped_segments(child)
        if thread is None:
            segments |= mapped_segments(pid)
        seen = {(child, began) for child, began in seen - itself if start_time(child) == began}
        segments = {name for name in segments if Path(name).exists()}
        if first:
            on_first_look()
            first = False
    kill_all(seen)
    # Those that were made between two looks are known by their names, and nobody is left who may use them.
    marked = {name for name in _segments() if mark is not None and mark in name}
    for name in marked:
        with suppress(FileNotFoundError):
            Path(name).unlink()
    remove_when_unused(segments - marked, _IN_USE_GRACE_S)


def start(pid: int, thread: int | None = None) -> None:
    """Start a reaper for ``pid`` or one thread of it, which ends when nothing of that is left; return when it watches.

    Args:
        pid: The owner.
        thread: Native id of the thread whose children it watches, or None for those of all threads.
    """
    owner = [str(pid)] if thread is None else [str(pid), str(thread)]
    subprocess.run([sys.executable, "-S", "-E", __file__, *owner], check=True, timeout=_START_TIMEOUT_S)


def main() -> None:
    """Detach, then watch: the owner's supervisor kills its direct children with it."""
    told, tell = os.pipe()
    if os.fork():
        os.close(tell)
        # Ends when the other process writes, or ends without.
        os.read(told, 1)
        os._exit(0)
    os.setsid()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    pid, *thread = map(int, sys.argv[1:])
    watch(pid, thread[0] if thread else None, on_first_look=lambda: os.close(tell))


if __name__ == "__main__":
    main()

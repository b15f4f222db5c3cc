"""Clean up after an engine's owner, however it ended.

Usage: ``python reaper.py PID``. Leaves a process of its own behind, detached from PID, on the standard library alone,
and ends when that has taken its first look: what PID has then is known, however soon PID ends. While
PID lives it notes PID's descendants and the shared-memory files they map. When PID is gone it kills those that are left
and removes the files nobody maps any more: a killed engine leaves its ``psm_*`` segments behind.
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


def descendants(pid: int) -> set[Process]:
    """Living children of ``pid``, their children, and so on."""
    found: set[Process] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, task.read_text().split()):
                began = start_time(child)
                if began is not None:
                    found.add((child, began))
                    found |= descendants(child)
    return found


def mapped_segments(pid: int) -> set[str]:
    """Shared-memory files of Python's ``multiprocessing`` that a process maps."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        names = (line.split(None, 5)[5] for line in lines if "/dev/shm/" in line and not line.endswith("(deleted)"))
        return {name for name in names if name.startswith(_SEGMENTS)}
    return set()


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


def remove_unused(segments: set[str]) -> None:
    """Remove the files that no process maps."""
    in_use = {name for entry in Path("/proc").glob("[0-9]*") for name in mapped_segments(int(entry.name))}
    for name in segments - in_use:
        with suppress(FileNotFoundError):
            Path(name).unlink()


def watch(pid: int, on_first_look: Callable[[], None]) -> None:
    """Return when ``pid`` has ended and nothing of it is left; say when its descendants are known."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
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
        seen |= descendants(pid)
        # A child of an engine that has died is nobody's descendant: look below everything seen before.
        for child, began in list(seen):
            if start_time(child) == began:
                seen |= descendants(child)
                segments |= mapped_segments(child)
        segments |= mapped_segments(pid)
        seen = {(child, began) for child, began in seen if start_time(child) == began}
        segments = {name for name in segments if Path(name).exists()}
        if first:
            on_first_look()
            first = False
    kill_all(seen)
    remove_unused(segments)


def start(pid: int) -> None:
    """Start a reaper for ``pid``, which ends when nothing of ``pid`` is left; return when it watches."""
    subprocess.run([sys.executable, "-S", "-E", __file__, str(pid)], check=True, timeout=_START_TIMEOUT_S)


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
    watch(int(sys.argv[1]), on_first_look=lambda: os.close(tell))


if __name__ == "__main__":
    main()

"""A folder on this machine that goes with its owner, however that ends."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from pathlib import Path

MEMORY_FOLDER = Path("/dev/shm")
_START_TIMEOUT_S = 30.0

# Runs as a separate process, one for all folders of its owner: it is told of each that is made or removed, and when its
# owner ends, by whatever signal, it removes those that are left. The end of a pipe is the one message that even a
# killed process sends. It leaves its parent at once: Ray ends the children of a worker that it kills, before they could
# do anything.
_GUARDIAN = """
import os, shutil, signal, sys
if os.fork():
    os._exit(0)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
print(os.getpid(), flush=True)
os.close(1)
folders = set()
for line in sys.stdin:
    (folders.add if line[0] == "+" else folders.discard)(line[1:-1])
for folder in folders:
    shutil.rmtree(folder, ignore_errors=True)
os._exit(0)
"""


class PrivateFolder:
    """Made when it is built; gone after :meth:`remove`, with this object, or with this process, even a killed one.

    Args:
        prefix: Its name begins with this.
        wanted_bytes: It lies in memory when that has more room than this, else in the temporary folder.

    Attributes:
        path: Where it is.
        guardian: Process id of who removes it after this process; one does so for all folders of a process.

    Raises:
        OSError: It cannot be made.
    """

    def __init__(self, prefix: str, wanted_bytes: int) -> None:
        in_memory = MEMORY_FOLDER.is_dir() and shutil.disk_usage(MEMORY_FOLDER).free > wanted_bytes
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=MEMORY_FOLDER if in_memory else None))
        try:
            self.guardian = _GUARDIANS.watch(self.path)
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        self._remove = weakref.finalize(self, _remove, self.path, os.getpid())

    def remove(self) -> None:
        """Remove it with all it holds; files that are mapped stay readable through their mappings. Idempotent."""
        self._remove()


class _Guardians:
    """The guardian of this process, started when the first folder is made and again when it was killed."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner = 0
        self._pid = 0
        self._pipe: int | None = None
        self._folders: set[Path] = set()

    def watch(self, folder: Path) -> int:
        """Have the folder removed when this process ends; returns who will.

        Raises:
            OSError: Nobody can be started for it.
        """
        with self._lock:
            if self._owner != os.getpid():
                # After a fork: the parent's folders are its own, and so is the guardian that knows them.
                self._hang_up()
                self._owner, self._folders = os.getpid(), set()
            if not self._tell(f"+{folder}"):
                self._pid, self._pipe = _start_guardian(folder)
                for known in (*self._folders, folder):
                    self._tell(f"+{known}")
            self._folders.add(folder)
            return self._pid

    def forget(self, folder: Path) -> None:
        with self._lock:
            self._folders.discard(folder)
            self._tell(f"-{folder}")

    def _tell(self, line: str) -> bool:
        if self._pipe is None:
            return False
        try:
            os.write(self._pipe, os.fsencode(line + "\n"))
        except BrokenPipeError:  # it was killed by hand
            self._hang_up()
            return False
        return True

    def _hang_up(self) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
        self._pipe = None


_GUARDIANS = _Guardians()


def _start_guardian(folder: Path) -> tuple[int, int]:
    """The guardian's process id, and the end of the pipe by which it knows its owner."""
    starting = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _GUARDIAN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert starting.stdin is not None
    assert starting.stdout is not None
    with starting.stdin as owners_end, starting.stdout as told:
        try:
            starting.wait(_START_TIMEOUT_S)
            is_ready, _, _ = select.select([told], [], [], _START_TIMEOUT_S)
            # A descriptor of its own is not closed by whatever order Python ends objects in.
            return int(told.readline() if is_ready else b""), os.dup(owners_end.fileno())
        except (subprocess.TimeoutExpired, ValueError) as error:
            starting.kill()
            raise OSError(f"{sys.executable} did not start to look after {folder}") from error


def _remove(folder: Path, owner_pid: int) -> None:
    if os.getpid() != owner_pid:
        return  # a forked child has a copy of the object, not the folder
    shutil.rmtree(folder, ignore_errors=True)
    _GUARDIANS.forget(folder)

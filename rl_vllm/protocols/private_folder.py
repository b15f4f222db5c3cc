"""A folder on this machine that goes with its owner, however that ends."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path
from typing import BinaryIO

MEMORY_FOLDER = Path("/dev/shm")
_START_TIMEOUT_S = 30.0

# Runs as a separate process that only waits for its owner to end, by whatever signal, and then removes the folder: the
# end of a pipe is the one message that even a killed process sends. A byte says that the owner has removed it. The
# process leaves its parent at once: Ray ends the children of a worker that it kills, before they could do anything.
_GUARDIAN = """
import os, shutil, signal, sys
if os.fork():
    os._exit(0)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
print(os.getpid(), flush=True)
os.close(1)
if not sys.stdin.buffer.read(1):
    shutil.rmtree(sys.argv[1], ignore_errors=True)
os._exit(0)
"""


class PrivateFolder:
    """Made when it is built; gone after :meth:`remove`, with this object, or with this process, even a killed one.

    Args:
        prefix: Its name begins with this.
        wanted_bytes: It lies in memory when that has more room than this, else in the temporary folder.

    Attributes:
        path: Where it is.
        guardian: Process id of who removes it after this process.

    Raises:
        OSError: It cannot be made.
    """

    def __init__(self, prefix: str, wanted_bytes: int) -> None:
        in_memory = MEMORY_FOLDER.is_dir() and shutil.disk_usage(MEMORY_FOLDER).free > wanted_bytes
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=MEMORY_FOLDER if in_memory else None))
        try:
            self.guardian, owners_end = _start_guardian(self.path)
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        self._remove = weakref.finalize(self, _remove, self.path, owners_end, os.getpid())

    def remove(self) -> None:
        """Remove it with all it holds; files that are mapped stay readable through their mappings. Idempotent."""
        self._remove()


def _start_guardian(folder: Path) -> tuple[int, BinaryIO]:
    """The guardian's process id, and the end of the pipe by which it knows its owner."""
    starting = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _GUARDIAN, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert starting.stdin is not None
    assert starting.stdout is not None
    owners_end: BinaryIO = starting.stdin  # type: ignore[assignment]
    with starting.stdout as told:
        try:
            starting.wait(_START_TIMEOUT_S)
            is_ready, _, _ = select.select([told], [], [], _START_TIMEOUT_S)
            return int(told.readline() if is_ready else b""), owners_end
        except (subprocess.TimeoutExpired, ValueError) as error:
            starting.kill()
            owners_end.close()
            raise OSError(f"{sys.executable} did not start to look after {folder}") from error


def _remove(folder: Path, owners_end: BinaryIO, owner_pid: int) -> None:
    if os.getpid() != owner_pid:
        return  # a forked child has a copy of the object, not the folder
    shutil.rmtree(folder, ignore_errors=True)
    # Its reader may have been killed by hand.
    try:
        os.write(owners_end.fileno(), b"x")
    except BrokenPipeError:
        return
    finally:
        owners_end.close()

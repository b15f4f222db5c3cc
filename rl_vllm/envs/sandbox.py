"""A tool that runs the model's Python code in a process of its own."""

from __future__ import annotations

import math
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rl_vllm.config import require_above_zero, require_at_least

# Sets limits and becomes the interpreter that runs the code, which inherits them. The alarm ends the code also when the
# process that waits for it has died. Only one's own process may be limited without a risk of deadlock: a function that
# runs between fork and exec of a program with threads may hang.
_LAUNCHER = """
import os, resource, signal, sys
seconds, memory, file_size = map(int, sys.argv[2:])
limits = {
    resource.RLIMIT_CPU: seconds, resource.RLIMIT_AS: memory, resource.RLIMIT_FSIZE: file_size,
    resource.RLIMIT_NPROC: 1, resource.RLIMIT_CORE: 0,
}
for kind, value in limits.items():
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))
signal.alarm(seconds)
os.execv(sys.executable, [sys.executable, "-I", sys.argv[1]])
"""
_LARGEST_FILE = 16 * 2**20
_SMALLEST_MEMORY = 64 * 2**20
# For output that is on its way when everything has been killed.
_DRAIN_S = 1.0


class PythonSandbox:
    """The tool ``run_python``: runs code in a fresh interpreter and returns what it printed.

    For Linux. This guards against accidents, not against attackers. The code has no input and a short environment,
    starts in an empty folder that is deleted afterwards, and is limited in time, memory, size of files and output;
    unless it runs as root, it can start no process and no thread. It is killed with its whole process group. But it
    runs as the same user on the same machine: it can read and delete that user's files, use the network, and leave its
    process group. Run code of a model that might mean harm in a container or a virtual machine.

    Args:
        timeout_s: Wall-clock time of one call; its processor time is limited to a second more.
        memory_bytes: Address space, at least 64 MiB.
        max_output_chars: Of longer output, the beginning and the end are returned.

    Raises:
        ConfigError: A limit is out of range.
    """

    def __init__(self, timeout_s: float = 10.0, memory_bytes: int = 1024 * 2**20, max_output_chars: int = 4096) -> None:
        require_above_zero("timeout_s", timeout_s)
        require_at_least("memory_bytes", memory_bytes, _SMALLEST_MEMORY)
        require_at_least("max_output_chars", max_output_chars, 1)
        self._timeout_s = float(timeout_s)
        self._memory_bytes = memory_bytes
        self._max_output_chars = max_output_chars
        # The name that the model knows.
        self.__name__ = "run_python"

    def __call__(self, code: str) -> str:
        """Run a Python program and return everything it prints. Nothing is kept between calls.

        Args:
            code: The program; it must print its results.
        """
        folder = Path(tempfile.mkdtemp(prefix="run_python-"))
        try:
            work = folder / "work"
            work.mkdir()
            program = folder / "main.py"
            program.write_text(code, encoding="utf-8", errors="replace")
            return self._run(program, work)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _run(self, program: Path, work: Path) -> str:
        seconds = math.ceil(self._timeout_s) + 1
        limits = [str(limit) for limit in (seconds, self._memory_bytes, _LARGEST_FILE)]
        deadline = time.monotonic() + self._timeout_s
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(program), *limits],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            cwd=work, env=_environment(work), start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        pidfd = os.pidfd_open(process.pid)
        output = _Output(process.stdout.fileno(), self._max_output_chars)
        try:
            in_time = output.read_until(pidfd, deadline)
        finally:
            # Not waited for yet, so that its number still is its own group's.
            os.killpg(process.pid, signal.SIGKILL)
            output.read_until(None, time.monotonic() + _DRAIN_S)
            process.stdout.close()
            os.close(pidfd)
            returncode = process.wait(timeout=_DRAIN_S)
        ending = self._ending(returncode, in_time=in_time)
        return "\n".join(part for part in (output.text(), ending) if part) or "[no output]"

    def _ending(self, returncode: int, *, in_time: bool) -> str:
        if not in_time or returncode == -signal.SIGALRM:
            return f"[stopped: it took longer than {self._timeout_s:g} s]"
        if returncode < 0:
            return f"[ended by {signal.Signals(-returncode).name}]"
        return f"[exit code {returncode}]" if returncode else ""


class _Output:
    """The beginning and the end of what comes out of a pipe; what is between is read and dropped."""

    def __init__(self, pipe: int, max_chars: int) -> None:
        os.set_blocking(pipe, False)
        self._pipe = pipe
        self._max_chars = max_chars
        # A character has at most four bytes.
        self._max_bytes = 4 * max_chars
        self._head = b""
        self._tail = b""
        self._num_bytes = 0

    def read_until(self, ending: int | None, deadline: float) -> bool:
        """Read until the pipe is closed, or another file becomes readable; whether that was before the deadline."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._pipe, selectors.EVENT_READ)
            if ending is not None:
                selector.register(ending, selectors.EVENT_READ)
            while (left := deadline - time.monotonic()) > 0:
                ready = {key.fd for key, _ in selector.select(left)}
                if self._pipe in ready and not self._read():
                    selector.unregister(self._pipe)
                    if ending is None:
                        return True
                elif ending is not None and ending in ready:
                    return True
        return False

    def text(self) -> str:
        head, tail = (part.decode(errors="replace") for part in (self._head, self._tail))
        if self._num_bytes == len(self._head) and len(head.rstrip()) <= self._max_chars:
            return head.rstrip()
        half = self._max_chars // 2
        cut = f"[cut: {self._max_chars} characters of {self._num_bytes} bytes]"
        return f"{head[:half]}\n{cut}\n{tail.rstrip()[half - self._max_chars :]}"

    def _read(self) -> bool:
        """Take what is there; False at the end."""
        chunk = os.read(self._pipe, 65536)
        self._num_bytes += len(chunk)
        self._head += chunk[: self._max_bytes - len(self._head)]
        self._tail = (self._tail + chunk)[-self._max_bytes :]
        return bool(chunk)


def _environment(work: Path) -> dict[str, str]:
    """Just what programs expect; no token, proxy or path of the trainer's."""
    return {
        "PATH": os.defpath, "HOME": str(work), "TMPDIR": str(work), "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
    }  # fmt: skip

"""What tests know of other processes."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def wait_for_the_end_of(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    # A process's descriptor is readable once it has ended.
    ended, _, _ = select.select([descriptor], [], [], 60.0)
    os.close(descriptor)
    assert ended, f"process {pid} is still there"


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def run_ranks(file: str, *arguments: str, num_ranks: int, limit_s: float) -> None:
    """Run a file of the tests as one process for each rank, which is its first argument; all must end well."""
    # The name under which pytest imports it is another.
    module = ".".join(Path(file).relative_to(ROOT).with_suffix("").parts)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        said = [process.communicate(timeout=limit_s)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * num_ranks, "\n".join(said)

"""What tests know of other processes."""

from __future__ import annotations

import os
import select
from pathlib import Path


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

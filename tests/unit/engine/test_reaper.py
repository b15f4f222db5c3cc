"""What a killed owner leaves behind is cleaned up: real processes, real shared memory."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest

from rl_vllm.engine import reaper

DEADLINE_S = 20.0

# Each process starts the next one, tells its own pid and stays; the last one maps a segment that its own tracker does
# not know, as an engine's is unknown to the tracker once that was killed with it.
TREE = """
import subprocess, sys
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
depth = int(sys.argv[1])
if depth:
    child = subprocess.Popen([sys.executable, "-c", sys.argv[2], str(depth - 1), sys.argv[2]], stdout=subprocess.PIPE)
    below = child.stdout.readline().decode()
else:
    segment = SharedMemory(create=True, size=4096)
    resource_tracker.unregister(segment._name, "shared_memory")
    below = segment._name
import os
print(os.getpid(), below.strip(), flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Family:
    """A running owner, its descendants from the nearest on, and the segment that the last of them maps."""

    owner: subprocess.Popen
    descendants: list[int]
    segment: Path


@pytest.fixture
def family() -> Iterator[Family]:
    owner = subprocess.Popen(
        [sys.executable, "-c", TREE, "2", TREE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    *pids, name = owner.stdout.readline().split()
    assert int(pids[0]) == owner.pid
    born = [psutil.Process(int(pid)) for pid in pids]
    found = Family(owner, [process.pid for process in born[1:]], Path("/dev/shm") / name.lstrip("/"))
    assert found.segment.exists()
    yield found
    for process in born:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    owner.wait(DEADLINE_S)
    owner.stdin.close()
    owner.stdout.close()
    found.segment.unlink(missing_ok=True)


def wait_until(condition, what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"still not {what}"
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    return reaper.start_time(pid) is None


def test_descendants_are_found_at_every_depth_and_told_from_later_processes(family):
    found = dict(reaper.descendants(family.owner.pid))
    assert set(family.descendants) <= set(found)
    assert set(found) == {child.pid for child in psutil.Process(family.owner.pid).children(recursive=True)}
    assert {pid: reaper.start_time(pid) for pid in found} == found


def test_the_segments_a_process_maps_are_found(family):
    assert reaper.mapped_segments(family.descendants[-1]) == {str(family.segment)}
    assert reaper.mapped_segments(family.descendants[0]) == set()
    assert reaper.mapped_segments(2**22 + 1) == set()


def test_a_semaphore_is_found_although_its_maker_maps_it_under_another_name():
    lock = multiprocessing.get_context("spawn").Lock()
    name = f"/dev/shm/sem.{lock._semlock.name.removeprefix('/')}"
    assert Path(name).exists()
    assert name in reaper.mapped_segments(os.getpid())


MARKED = """
import sys
from multiprocessing import get_context, resource_tracker
from multiprocessing.shared_memory import SharedMemory
from rl_vllm.engine.segment_names import name_after
name_after(int(sys.argv[1]))
segment = SharedMemory(create=True, size=4096)
lock = get_context("spawn").Lock()
resource_tracker.unregister(segment._name, "shared_memory")
resource_tracker.unregister(lock._semlock.name, "semaphore")
print(segment._name, lock._semlock.name, flush=True)
sys.stdin.readline()
"""


def test_what_was_made_between_two_looks_is_known_by_its_name_and_goes_even_if_mapped(family):
    maker = subprocess.Popen(
        [sys.executable, "-c", MARKED, str(family.owner.pid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    segment, lock = (name.removeprefix("/") for name in maker.stdout.readline().split())
    files = [Path(f"/dev/shm/{segment}"), Path(f"/dev/shm/sem.{lock}")]
    try:
        assert all(file.exists() for file in files)
        # Not a descendant of the owner: the reaper cannot have seen it map anything.
        reaper.start(family.owner.pid)
        family.owner.kill()
        for file in files:
            wait_until(lambda file=file: not file.exists(), f"removed: {file}")
        assert maker.poll() is None
    finally:
        maker.kill()
        maker.communicate()
        for file in files:
            file.unlink(missing_ok=True)


def test_a_file_is_removed_once_the_last_process_that_maps_it_has_ended(family):
    removal = threading.Thread(target=reaper.remove_when_unused, args=({str(family.segment)}, 60.0))
    removal.start()
    removal.join(0.2)
    assert family.segment.exists()
    reaper.kill_all(reaper.descendants(family.owner.pid))
    removal.join(60)
    assert not removal.is_alive()
    assert not family.segment.exists()
    # What stays in use is left alone in the end.
    reaper.remove_when_unused(reaper.mapped_segments(os.getpid()), 0.0)


def test_files_of_a_dead_engine_are_removed_by_name_with_its_owner(family):
    maker = subprocess.Popen(
        [sys.executable, "-c", MARKED, str(family.owner.pid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    maker.stdout.readline()
    maker.kill()
    maker.communicate()
    made = [name for name in reaper._segments() if reaper.owner_mark(family.owner.pid) in name]
    assert len(made) == 2
    assert reaper.owner_mark(family.owner.pid) != reaper.owner_mark(os.getpid())
    reaper.start(family.owner.pid)
    family.owner.kill()
    for name in made:
        wait_until(lambda name=name: not Path(name).exists(), f"removed: {name}")


def test_after_its_owner_was_killed_no_process_and_no_segment_is_left(family):
    reaper.start(family.owner.pid)
    os.kill(family.owner.pid, signal.SIGKILL)
    for pid in family.descendants:
        wait_until(lambda pid=pid: is_gone(pid), f"gone: {pid}")
    wait_until(lambda: not family.segment.exists(), f"removed: {family.segment}")


def test_nothing_is_touched_while_the_owner_lives(family):
    reaper.start(family.owner.pid)
    assert not any(is_gone(pid) for pid in family.descendants)
    assert family.segment.exists()


def test_a_segment_that_an_unrelated_process_maps_stays(family):
    mine = SharedMemory(family.segment.name)
    # Opening registers it with this process's tracker, which would remove it in the end.
    resource_tracker.unregister(mine._name, "shared_memory")
    seen = {str(family.segment)}
    reaper.kill_all(reaper.descendants(family.owner.pid))
    reaper.remove_unused(seen)
    assert family.segment.exists()
    mine.close()
    reaper.remove_unused(seen)
    assert not family.segment.exists()
    reaper.remove_unused(seen)


OWN_REAPER = """
import os, sys
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from rl_vllm.engine import reaper, segment_names
reaper.start(os.getpid())
segment_names.name_after(os.getpid())
segment = SharedMemory(create=True, size=4096)
resource_tracker.unregister(segment._name, "shared_memory")
print(segment._name, flush=True)
sys.stdin.read()
"""


def test_an_owner_that_started_its_own_reaper_is_cleaned_up_after():
    owner = subprocess.Popen(
        [sys.executable, "-c", OWN_REAPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    segment = Path("/dev/shm") / owner.stdout.readline().strip().lstrip("/")
    assert segment.exists()
    owner.kill()
    owner.communicate()
    wait_until(lambda: not segment.exists(), f"removed: {segment}")


def test_a_process_with_a_reused_number_is_not_killed(family):
    (_, pid) = family.descendants
    began = reaper.start_time(pid)
    reaper.kill_all({(pid, str(int(began) - 1))})
    assert not is_gone(pid)
    reaper.kill_all({(pid, began)})
    assert is_gone(pid)


def test_a_reaper_for_a_process_that_has_ended_ends_at_once():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(DEADLINE_S)
    reaper.start(ended.pid)


TWO_THREADS = """
import subprocess, sys, threading
over, pids = threading.Event(), {}
def own(name, over):
    pids[name] = subprocess.Popen([sys.executable, "-c", "print(); input()"], stdin=subprocess.PIPE,
                                  stdout=subprocess.PIPE)
    pids[name].stdout.readline()
    over.wait()
first = threading.Thread(target=own, args=("first", over))
other = threading.Thread(target=own, args=("other", threading.Event()), daemon=True)
for thread in (first, other):
    thread.start()
while len(pids) < 2 or first.native_id is None:
    pass
print(first.native_id, pids["first"].pid, pids["other"].pid, flush=True)
sys.stdin.readline()
over.set()
first.join()
print("ended", flush=True)
sys.stdin.readline()
"""


def test_a_threads_reaper_ends_what_that_thread_started_and_nothing_else():
    owner = subprocess.Popen(
        [sys.executable, "-c", TWO_THREADS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        thread, mine, other = map(int, owner.stdout.readline().split())
        assert {pid for pid, _ in reaper.descendants(owner.pid, thread)} == {mine}
        assert {pid for pid, _ in reaper.descendants(owner.pid)} >= {mine, other}
        reaper.start(owner.pid, thread)
        assert not is_gone(mine)
        print(file=owner.stdin, flush=True)
        assert owner.stdout.readline() == "ended\n"
        # The owner itself goes on.
        wait_until(lambda: is_gone(mine), f"gone: {mine}")
        assert not is_gone(other)
        assert owner.poll() is None
    finally:
        for pid, _ in reaper.descendants(owner.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        owner.kill()
        owner.communicate()


def test_a_threads_reaper_ends_its_children_when_the_owner_is_killed():
    owner = subprocess.Popen(
        [sys.executable, "-c", TWO_THREADS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    thread, mine, other = map(int, owner.stdout.readline().split())
    try:
        reaper.start(owner.pid, thread)
        owner.kill()
        wait_until(lambda: is_gone(mine), f"gone: {mine}")
    finally:
        owner.communicate()
        for pid in (mine, other):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

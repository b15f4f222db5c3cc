"""The leak check sees what a session leaves, and only that."""

import mmap
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from tests import leaks
from tests.leaks import MARKER, SHARED_MEMORY, Snapshot

REPOSITORY = Path(__file__).parents[2]
needs_proc = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="reads /proc and /dev/shm")


@contextmanager
def process_titled(title: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A living process whose command line starts with ``title``, as an engine names itself."""
    process = subprocess.Popen(
        [title, "-c", "print('up', flush=True); input()"],
        executable=sys.executable,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONHOME": sys.base_prefix, **environment},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def snapshot(monkeypatch) -> Snapshot:
    # Registered with monkeypatch first, so that the session's own marker returns afterwards.
    for name in (MARKER, "SPT_NOENV"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    return Snapshot.take()


@needs_proc
@pytest.mark.parametrize(
    "title", ["VLLM::EngineCore", "ray::IDLE", "/x/ray/core/src/ray/raylet/raylet", "/x/rl_vllm/engine/reaper.py"]
)
def test_a_living_engine_or_ray_process_is_a_leftover_until_it_ends(snapshot, title):
    with process_titled(title) as process:
        leftovers = snapshot.leftovers(within_s=0)
        assert len(leftovers) == 1
        assert leftovers[0].startswith(f"process {process.pid}: {title}")
    assert snapshot.leftovers(within_s=0) == []


@needs_proc
def test_an_ordinary_process_is_no_leftover(snapshot):
    with process_titled("python"):
        assert snapshot.leftovers(within_s=0) == []


@needs_proc
def test_an_engine_of_somebody_else_is_no_leftover(snapshot):
    with process_titled("VLLM::EngineCore", **{MARKER: "another session"}):
        assert snapshot.leftovers(within_s=0) == []


@needs_proc
def test_an_engine_from_before_the_session_is_no_leftover(monkeypatch):
    monkeypatch.setenv(MARKER, os.environ[MARKER])
    with process_titled("VLLM::EngineCore"):
        assert Snapshot.take().leftovers(within_s=0) == []


@needs_proc
def test_a_shared_memory_file_is_a_leftover_until_it_is_unlinked(snapshot):
    segment = shared_memory.SharedMemory(create=True, size=16)
    try:
        assert snapshot.leftovers(within_s=0) == [f"shared memory /dev/shm/{segment.name}"]
    finally:
        segment.close()
        segment.unlink()
    assert snapshot.leftovers(within_s=0) == []


@contextmanager
def shared_file(name: str, *, mapped: bool) -> Iterator[str]:
    """A file of our own in shared memory, as libraries make them under names of theirs."""
    path = SHARED_MEMORY / f"{name}{os.getpid()}"
    path.write_bytes(bytes(mmap.PAGESIZE))
    mapping = None
    try:
        if mapped:
            with path.open("r+b") as file:
                mapping = mmap.mmap(file.fileno(), 0)
        yield path.name
    finally:
        if mapping is not None:
            mapping.close()
        path.unlink()


@needs_proc
def test_a_file_that_the_session_mapped_is_a_leftover_under_any_name_and_whoever_else_runs(snapshot):
    snapshot.is_shared = True
    with shared_file("a-library-", mapped=True) as name:
        snapshot.look()
        assert f"shared memory {SHARED_MEMORY / name}" in snapshot.leftovers(within_s=0)
    assert snapshot.leftovers(within_s=0) == []


@needs_proc
def test_a_file_that_nobody_was_seen_to_map_is_a_leftover_unless_others_make_such_files(snapshot):
    with shared_file("psm_", mapped=False) as name:
        snapshot.is_shared = True
        assert snapshot.leftovers(within_s=0) == []
        # Nobody else here makes any.
        alone = Snapshot(snapshot.session, frozenset(), snapshot.segments)
        alone.look = lambda: None  # type: ignore[method-assign]
        assert f"shared memory {SHARED_MEMORY / name}" in list(alone._shared_memory())


@needs_proc
def test_somebody_elses_engine_shows_that_others_make_such_files(snapshot):
    with process_titled("VLLM::EngineCore", **{MARKER: "another session"}):
        snapshot.look()
        assert snapshot.is_shared


@needs_proc
def test_a_file_of_a_process_that_has_ended_was_seen_while_it_ran(snapshot):
    code = (
        "import mmap, sys; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0)\nprint('up', flush=True); input()"
    )
    with shared_file("a-library-", mapped=False) as name:
        path = str(SHARED_MEMORY / name)
        process = subprocess.Popen(
            [sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        snapshot.look()
        process.communicate("\n")
        assert f"shared memory {path}" in snapshot.leftovers(within_s=0)


@needs_proc
def test_what_a_session_maps_is_seen_while_it_is_watched(snapshot, monkeypatch):
    monkeypatch.setattr(leaks, "_WATCH_PERIOD_S", 0.01)
    with snapshot.watching(), shared_file("a-library-", mapped=True) as name:
        deadline = time.monotonic() + 60
        while leaks._segments()[name] not in snapshot.mapped:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@needs_proc
def test_a_lock_that_this_process_still_holds_is_no_leftover(snapshot):
    lock = multiprocessing.get_context("spawn").Lock()
    made = [name for name, inode in leaks._segments().items() if inode not in snapshot.segments]
    assert any(name.startswith("sem.mp-") for name in made)
    snapshot.look()
    assert set(map(leaks._segments().get, made)) & snapshot.mapped
    assert snapshot.leftovers(within_s=0) == []
    del lock


@needs_proc
def test_a_lock_that_a_killed_process_held_is_a_leftover(snapshot):
    code = (
        "import multiprocessing; from multiprocessing import resource_tracker\n"
        "lock = multiprocessing.get_context('spawn').Lock(); name = lock._semlock.name\n"
        "resource_tracker.unregister(name, 'semaphore')\n"
        "print(name, flush=True); input()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    path = SHARED_MEMORY / f"sem.{process.stdout.readline().strip().removeprefix('/')}"
    snapshot.look()
    process.kill()
    process.communicate()
    try:
        assert f"shared memory {path}" in snapshot.leftovers(within_s=0)
    finally:
        path.unlink()
    assert f"shared memory {path}" not in snapshot.leftovers(within_s=0)


LISTENER = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"


@needs_proc
@pytest.mark.parametrize(("marker", "found"), [(None, True), ("another session", False)], ids=["ours", "theirs"])
def test_a_port_of_any_process_that_the_session_started_is_a_leftover(snapshot, marker, found):
    environment = os.environ if marker is None else {**os.environ, MARKER: marker}
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        line = f"port 127.0.0.1:{int(process.stdout.readline())} of process {process.pid}: "
        assert any(each.startswith(line) for each in snapshot.leftovers(within_s=0)) == found
    finally:
        process.communicate("\n")


def test_a_port_from_before_the_session_is_no_leftover(monkeypatch):
    for name in (MARKER, "SPT_NOENV"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    with socket.create_server(("127.0.0.1", 0)):
        assert Snapshot.take().leftovers(within_s=0) == []


LEAKY_TEST = """
import subprocess, sys
def test_that_passes_and_leaks():
    code = "print('up', flush=True); input()"
    leak = subprocess.Popen(["VLLM::Forgotten", "-c", code], executable=sys.executable, text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**__import__("os").environ,
                            "PYTHONHOME": sys.base_prefix})
    assert leak.stdout.readline() == "up\\n"
"""


@needs_proc
@pytest.mark.parametrize(
    ("test", "code"), [("def test_clean(): assert True", 0), (LEAKY_TEST, 1)], ids=["clean", "leak"]
)
def test_a_session_fails_exactly_when_it_leaks(tmp_path, test, code):
    (tmp_path / "conftest.py").write_text(
        "import tests.conftest as ours\nours.LEFTOVERS_END_WITHIN_S = 0\n"
        "nothing_is_left_behind = ours.nothing_is_left_behind\n"
    )
    (tmp_path / "test_it.py").write_text(test)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir=.", "."],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == code, run.stdout + run.stderr
    assert ("VLLM::Forgotten" in run.stdout) == (code == 1)

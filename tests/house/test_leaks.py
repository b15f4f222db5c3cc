"""The leak check sees what a session leaves, and only that."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import shared_memory
from pathlib import Path

import pytest

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
@pytest.mark.parametrize("title", ["VLLM::EngineCore", "ray::IDLE", "/x/ray/core/src/ray/raylet/raylet"])
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

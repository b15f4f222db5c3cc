"""A folder that goes with its owner, however that ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl_vllm.protocols import private_folder
from rl_vllm.protocols.private_folder import PrivateFolder
from tests.unit.processes import parent_of, wait_for_the_end_of

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands for the machine's memory."""
    monkeypatch.setattr(private_folder, "MEMORY_FOLDER", tmp_path)
    return tmp_path


def test_it_is_in_memory_and_goes_with_its_files_when_it_is_removed(memory: Path) -> None:
    folder = PrivateFolder("some-", 1)
    assert folder.path.parent == memory
    assert folder.path.name.startswith("some-")
    (folder.path / "inner").mkdir()
    (folder.path / "inner" / "file").write_text("text")
    folder.remove()
    folder.remove()
    assert list(memory.iterdir()) == []


def test_one_process_looks_after_all_and_another_when_it_is_killed(memory: Path) -> None:
    script = (
        "import os, pathlib, signal, sys, time\n"
        "from rl_vllm.protocols import private_folder\n"
        "private_folder.MEMORY_FOLDER = pathlib.Path(sys.argv[1])\n"
        "first, second, removed = [private_folder.PrivateFolder('some-', 1) for _ in range(3)]\n"
        "assert first.guardian == second.guardian == removed.guardian\n"
        "os.kill(first.guardian, signal.SIGKILL)\n"
        "while pathlib.Path(f'/proc/{first.guardian}').exists():\n"
        "    time.sleep(0.01)\n"
        "removed.remove()\n"
        "third = private_folder.PrivateFolder('some-', 1)\n"
        "assert third.guardian != first.guardian\n"
        "print(third.guardian, len(list(pathlib.Path(sys.argv[1]).iterdir())), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    dead = subprocess.run(
        [sys.executable, "-c", script, str(memory)], timeout=60, check=False, stdout=subprocess.PIPE, text=True
    )
    guardian, number = map(int, dead.stdout.split())
    assert number == 3
    wait_for_the_end_of(guardian)
    assert list(memory.iterdir()) == []


def test_it_goes_with_the_object(memory: Path) -> None:
    PrivateFolder("some-", 1)
    assert list(memory.iterdir()) == []


def test_without_room_in_memory_it_is_in_the_temporary_folder(
    memory: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.setattr("tempfile.tempdir", str(elsewhere))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    folder = PrivateFolder("some-", 10)
    assert (folder.path.parent, list(memory.iterdir())) == (elsewhere, [])
    folder.remove()
    assert PrivateFolder("some-", 9).path.parent == memory


def test_who_looks_after_it_is_no_child_of_the_owner_whose_children_are_killed_with_it(memory: Path) -> None:
    folder = PrivateFolder("some-", 1)
    assert parent_of(folder.guardian) != os.getpid()
    folder.remove()


@pytest.mark.parametrize("with_children", [False, True])
def test_it_goes_with_an_owner_that_is_killed(memory: Path, with_children: bool) -> None:
    script = (
        "import os, pathlib, signal, sys\n"
        "from rl_vllm.protocols import private_folder\n"
        "private_folder.MEMORY_FOLDER = pathlib.Path(sys.argv[1])\n"
        "folder = private_folder.PrivateFolder('some-', 1)\n"
        "(folder.path / 'file').write_text('text')\n"
        "print(folder.guardian, folder.path, flush=True)\n"
        # As Ray does with a worker that it kills.
        "children = pathlib.Path(f'/proc/self/task/{os.getpid()}/children').read_text().split()\n"
        f"[os.kill(int(child), signal.SIGKILL) for child in children if {with_children}]\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    dead = subprocess.run(
        [sys.executable, "-c", script, str(memory)], timeout=60, check=False, stdout=subprocess.PIPE, text=True
    )
    assert dead.returncode == -signal.SIGKILL
    guardian, path = dead.stdout.split()
    assert Path(path).parent == memory
    wait_for_the_end_of(int(guardian))
    assert list(memory.iterdir()) == []


def test_a_forked_child_that_ends_leaves_it_alone(memory: Path) -> None:
    script = (
        "import os, pathlib, sys\n"
        "from rl_vllm.protocols import private_folder\n"
        "private_folder.MEMORY_FOLDER = pathlib.Path(sys.argv[1])\n"
        "folder = private_folder.PrivateFolder('some-', 1)\n"
        "if os.fork() == 0:\n"
        "    folder.remove()\n"
        "    sys.exit()\n"
        "os.wait()\n"
        "assert folder.path.is_dir()\n"
    )
    subprocess.run([sys.executable, "-c", script, str(memory)], timeout=60, check=True)
    assert list(memory.iterdir()) == []


def test_nothing_is_left_when_nobody_can_look_after_it(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_folder, "_GUARDIANS", private_folder._Guardians())
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with pytest.raises(OSError, match="/bin/true did not start to look after"):
        PrivateFolder("some-", 1)
    assert list(memory.iterdir()) == []

import os
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from rl_vllm.envs import PythonSandbox
from rl_vllm.errors import ConfigError

MARK = "rl-vllm-sandbox-test"


@pytest.fixture(autouse=True)
def nothing_left(tmp_path, monkeypatch):
    """No folder and no process outlives a call."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert list(tmp_path.iterdir()) == []
    # A killed process whose parent died before it is reaped by someone else, soon.
    deadline = time.monotonic() + 10
    while (left := marked()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left == []


def marked():
    return [
        process for process in psutil.process_iter(["cmdline", "status"])
        if MARK in (process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("print(6 * 7)", "42"),
        ("print('ä😀')", "ä😀"),
        ("import sys; print('out', flush=True); print('err', file=sys.stderr)", "out\nerr"),
        ("", "[no output]"),
        ("print('bye'); raise SystemExit(3)", "bye\n[exit code 3]"),
        ("import os; os.kill(os.getpid(), 9)", "[ended by SIGKILL]"),
        ("import os; print(os.listdir('.'))", "[]"),
        ("import sys; print(sys.flags.isolated)", "1"),
    ],
)
def test_what_a_program_prints_is_returned(code, output):
    assert PythonSandbox(timeout_s=30)(code) == output


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("1 / 0", "line 1, in <module>"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def f(:", "SyntaxError"),
        ("input()", "EOFError"),
        ("bytearray(2**33)", "MemoryError"),
        ("open('large', 'wb').write(bytes(2**25))", "File too large"),
    ],
)
def test_what_goes_wrong_is_part_of_the_output(code, complaint):
    output = PythonSandbox(timeout_s=30)(code)
    assert complaint in output
    assert output.endswith("[exit code 1]")


def test_a_program_that_takes_too_long_is_stopped_with_what_it_has_printed():
    started = time.monotonic()
    output = PythonSandbox(timeout_s=0.5)("print('begun', flush=True)\nimport time; time.sleep(60)")
    assert output == "begun\n[stopped: it took longer than 0.5 s]"
    assert time.monotonic() - started < 30


def test_a_program_that_never_stops_printing_is_stopped_and_cut():
    output = PythonSandbox(timeout_s=0.5, max_output_chars=8)("while True: print('abc')")
    assert output.startswith("abc\n\n[cut: 8 characters of ")
    assert output.endswith("[stopped: it took longer than 0.5 s]")


def test_of_long_output_beginning_and_end_are_returned():
    output = PythonSandbox(timeout_s=30, max_output_chars=10)("print('a' * 1000 + 'ä' * 1000)")
    assert output == "aaaaa\n[cut: 10 characters of 3001 bytes]\näääää"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's programs may start processes")
@pytest.mark.parametrize("ending", ["", "\nimport time; time.sleep(60)"])
def test_what_a_program_has_started_is_killed_with_it(ending):
    code = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)', {MARK!r}])"
    PythonSandbox(timeout_s=1)(code + ending)


def test_a_program_does_not_see_the_environment(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    names = PythonSandbox(timeout_s=30)("import os; print(*sorted(os.environ))").split()
    assert set(names) <= {
        "HOME", "LANG", "LC_CTYPE", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PATH", "TMPDIR",
    }  # fmt: skip


def test_its_folder_is_its_home_and_is_gone_afterwards():
    home = PythonSandbox(timeout_s=30)("import os; open('note', 'w').close(); print(os.environ['HOME'])")
    assert not Path(home).exists()


@pytest.mark.parametrize("settings", [{"timeout_s": 0}, {"memory_bytes": 1024}, {"max_output_chars": 0}])
def test_limits_out_of_range_are_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        PythonSandbox(**settings)

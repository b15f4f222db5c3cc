"""Why an engine did not start, found in what its processes printed."""

import os
import subprocess
import sys

import pytest

from rl_vllm.engine.start_error import root_cause

HEARSAY = RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")

# Two workers fail, their engine core only knows that they did, and the parent that the core did.
PRINTED = """\
INFO 07-01 10:00:00 [model.py:550] Resolved architecture: Qwen3ForCausalLM
(Worker_TP0 pid=21) INFO 07-01 10:00:03 [backends.py:12] Error handling: strict
(Worker_TP0 pid=21) ERROR 07-01 10:00:05 [multiproc_executor.py:953] WorkerProc failed to start.
(Worker_TP0 pid=21) ERROR 07-01 10:00:05 [multiproc_executor.py:953] Traceback (most recent call last):
(Worker_TP0 pid=21) ERROR 07-01 10:00:05 [multiproc_executor.py:953]     raise ValueError(
(Worker_TP0 pid=21) ERROR 07-01 10:00:05 [multiproc_executor.py:953] ValueError: 3 heads cannot be split over 2 workers
(EngineCore pid=20) INFO 07-01 10:00:05 [multiproc_executor.py:479] [shutdown] Executor: waiting for worker exit count=2
(Worker_TP1 pid=22) ERROR 07-01 10:00:05 [multiproc_executor.py:953] OSError: the other worker is gone
(EngineCore pid=20) ERROR 07-01 10:00:07 [core.py:1510] EngineCore failed to start.
(EngineCore pid=20) ERROR 07-01 10:00:07 [core.py:1] Exception: WorkerProc initialization failed due to an exception \
in a background process. See stack trace for root cause.
Process EngineCore:
Traceback (most recent call last):
    raise e from None
Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace for root cause.
"""


def test_the_workers_own_error_is_found_behind_two_layers_of_hearsay():
    assert root_cause(HEARSAY, PRINTED) == "ValueError: 3 heads cannot be split over 2 workers"


def test_hearsay_that_is_printed_first_is_passed_over():
    printed = (
        "(EngineCore pid=20) ERROR 07-01 10:00:05 [core.py:1] Exception: WorkerProc initialization failed due to an "
        "exception in a background process. See stack trace for root cause.\n"
        "(Worker_TP0 pid=21) ERROR 07-01 10:00:05 [multiproc_executor.py:953] ValueError: 3 heads for 2 workers\n"
    )
    assert root_cause(HEARSAY, printed) == "ValueError: 3 heads for 2 workers"


def test_a_module_path_before_the_class_is_left_out():
    printed = (
        "(EngineCore pid=9) ERROR 07-01 10:00:05 [core.py:1] torch.cuda.OutOfMemoryError: Tried to allocate 2 GiB\n"
    )
    assert root_cause(HEARSAY, printed) == "OutOfMemoryError: Tried to allocate 2 GiB"


def test_an_error_of_the_parent_itself_is_told_as_it_is():
    assert root_cause(ValueError("max_model_len is too long"), PRINTED) == "ValueError: max_model_len is too long"


def test_without_an_exception_the_last_lines_are_told():
    printed = "\n".join(["one", "two", "three", "", "four", "five", "Killed"])
    assert root_cause(HEARSAY, printed) == f"RuntimeError: {HEARSAY}. Last lines printed: " + (
        "two | three | four | five | Killed"
    )
    assert root_cause(HEARSAY, "") == f"RuntimeError: {HEARSAY}"


@pytest.mark.parametrize("to_file", [True, False], ids=["file", "pipe"])
def test_only_what_is_printed_after_the_mark_is_read_and_nothing_from_a_pipe(tmp_path, to_file):
    script = (
        "import os, sys\n"
        "from rl_vllm.engine.start_error import OutputMark\n"
        "os.write(1, b'before\\n')\n"
        "mark = OutputMark()\n"
        "os.write(1, b'after\\n')\n"
        "open(sys.argv[1], 'w').write(mark.printed_since())\n"
    )
    seen, output = tmp_path / "seen", tmp_path / "output"
    with output.open("w") as file:
        subprocess.run(
            [sys.executable, "-c", script, str(seen)],
            check=True,
            timeout=60,
            stdout=file if to_file else subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ,
        )
    assert seen.read_text().strip() == ("after" if to_file else "")

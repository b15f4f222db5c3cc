"""A script that launches whenever it is imported is told so, before it starts processes that import it."""

import subprocess
import sys
import textwrap

import pytest

SCRIPTS = {
    "bare": ("launch()", False),
    "guarded": (
        """
        def main():
            launch()

        if __name__ == "__main__":
            main()
        """,
        True,
    ),
    "guarded, not in a function": (
        """
        import sys
        if "x" in sys.argv or __name__ == "__main__":
            for _ in range(1):
                launch()
        """,
        True,
    ),
    "after the guard": (
        """
        if __name__ == "__main__":
            print("only here")

        launch()
        """,
        False,
    ),
    "in a function that the module calls": (
        """
        def main():
            launch()

        if sys is not None:
            main()
        """,
        False,
    ),
    "from another thread": (
        """
        import threading
        thread = threading.Thread(target=launch)
        thread.start()
        thread.join()
        """,
        True,
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_that_every_spawned_process_would_run_again_is_told_what_to_do(tmp_path, name):
    body, passes = SCRIPTS[name]
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom rl_vllm.engine.main_guard import check_main_is_guarded as launch\n"
        + textwrap.dedent(body)
        + "\nprint('went on')\n"
    )
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert ("went on" in run.stdout) == passes
    assert ("launch below if __name__" in run.stderr) == (not passes)


def test_a_console_has_no_main_module_to_guard():
    code = "from rl_vllm.engine.main_guard import check_main_is_guarded as launch; launch(); print('went on')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout == "went on\n"


def test_a_spawned_process_that_imports_such_a_script_is_told_too(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, threading\n"
        "from rl_vllm.engine.main_guard import check_main_is_guarded as launch\n"
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('spawn').Process(target=print)\n"
        "    child.start()\n"
        "    child.join(100)\n"
        "    print(child.exitcode)\n"
        "else:\n"
        "    launch()\n"
    )
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert run.stdout == "1\n"
    assert "launched while the main module was being imported" in run.stderr

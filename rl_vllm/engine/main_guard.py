"""Whether the program's main module may be imported again by the processes that an engine spawns."""

from __future__ import annotations

import ast
import inspect
import sys
from multiprocessing import process
from pathlib import Path

from rl_vllm.errors import ConfigError


def check_main_is_guarded() -> None:
    """Raise :class:`ConfigError` when the main script would run again in each process that vLLM spawns.

    That is seen when the caller's stack begins in the script outside ``if __name__ == "__main__":``, or when this is
    such a process, about to spawn its own.
    """
    remedy = (
        'vLLM starts processes that import the main module again: launch below if __name__ == "__main__":, in a '
        "function that only it calls"
    )
    if vars(process.current_process()).get("_inheriting"):
        raise ConfigError(f"a service was launched while the main module was being imported: {remedy}")
    # A notebook, a console or ``python -c`` has no file to import again.
    path = vars(sys.modules["__main__"]).get("__file__")
    frame = inspect.currentframe()
    while path is not None and frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename == path:
            if not _is_guarded(Path(path).read_text(), frame.f_lineno):
                raise ConfigError(f"{path}, line {frame.f_lineno}, launches whenever the file is imported: {remedy}")
            return
        frame = frame.f_back


def _is_guarded(source: str, line: int) -> bool:
    """Whether a line stands in a top-level ``if`` that compares ``__name__``."""
    return any(
        isinstance(statement, ast.If)
        and any(isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(statement.test))
        and statement.lineno <= line <= (statement.end_lineno or statement.lineno)
        for statement in ast.parse(source).body
    )

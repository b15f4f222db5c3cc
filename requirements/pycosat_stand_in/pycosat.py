"""Stands in for pycosat, a SAT solver that is published as C source only.

``import reasoning_gym`` imports pycosat, and only its zebra puzzles call it. On a machine without a C compiler this
module is installed instead, so that every other task works.
"""

from typing import NoReturn


def itersolve(_clauses: object) -> NoReturn:
    """Say that there is no solver here.

    Raises:
        RuntimeError: Always.
    """
    raise RuntimeError(
        "zebra puzzles need pycosat, which could not be compiled when .venv was made: "
        "install a C compiler and Python's headers, then run pip install --force-reinstall pycosat==0.6.6"
    )

"""Loops over arrays as machine code: numba behind one typed decorator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

P = ParamSpec("P")
R = TypeVar("R")
Number = TypeVar("Number", np.int32, np.int64, np.uint64)


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function when it is first called with arguments of some types, and keep the result on disk.

    It is kept beside the module or, where that cannot be written, in the user's cache folder; where neither can, each
    process compiles anew. Several threads may call at once: one compiles, the others wait.

    A compiled function may use only what its own module defines, because what is kept is renewed when that file changes
    and no other.
    """
    compile_ = functools.partial(numba.njit, error_model="numpy")
    try:
        made: Callable[P, R] = compile_(cache=True)(function)
    except RuntimeError:
        # No folder for the result. Anything else that is wrong with the function shows here again.
        made = compile_()(function)
    return made


def as_input(values: NDArray[Any], dtype: type[Number]) -> NDArray[Number]:
    """The same values as an array of the one kind that compiled functions are made for: contiguous and read-only.

    Without it a function would be compiled once more for whoever brings a writable array, or one with gaps.
    """
    view = np.ascontiguousarray(values, dtype).view()
    view.flags.writeable = False
    return view

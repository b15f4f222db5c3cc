"""Loops over arrays as machine code: numba behind one typed decorator."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

P = ParamSpec("P")
R = TypeVar("R")
Number = TypeVar("Number", np.int32, np.int64, np.uint64)

# Two threads that need one another's functions would wait for ever with a lock for each.
_making = threading.RLock()


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function when it is first called with arguments of some types, and keep the result on disk.

    It is kept beside the module or, where that cannot be written, in the user's cache folder; where neither can, each
    process compiles anew. Several threads may call at once: one compiles, the others wait.

    A compiled function may use only what its own module defines, because what is kept is renewed when that file changes
    and no other.
    """
    return cast("Callable[P, R]", functools.update_wrapper(_Compiled(function), function))


class _Compiled:
    """Stands for a function until it is called.

    numba is not imported before: vLLM 0.32 looks at all that is imported when a CPU worker starts, and ends with an
    error at an object of numba's. A worker that is spawned imports the program's main module, and with it this one.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._made: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        made = self._made
        return (self._make() if made is None else made)(*arguments)

    def _make(self) -> Callable[..., Any]:
        with _making:
            if self._made is None:
                names = self._function.__globals__
                for name in self._function.__code__.co_names:
                    used = names.get(name)
                    if isinstance(used, _Compiled):
                        # numba looks a name up when it compiles, and knows functions of its own making only.
                        names[name] = used._make()
                self._made = _jit(self._function)
            return self._made


def _jit(function: Callable[..., Any]) -> Callable[..., Any]:
    import numba

    compile_ = functools.partial(numba.njit, error_model="numpy")
    try:
        made: Callable[..., Any] = compile_(cache=True)(function)
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

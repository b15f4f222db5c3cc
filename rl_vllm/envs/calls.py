"""Calls of functions that others wrote: in a thread or as a coroutine, with a deadline, and never an exception."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rl_vllm.errors import DeadlineError


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a call.

    Attributes:
        value: What it returned, or None.
        error: What it raised, or a :class:`DeadlineError`; None when it returned.
    """

    value: Any = None
    error: BaseException | None = None


async def call(function: Callable[..., Any], *arguments: Any, timeout_s: float, **keywords: Any) -> Outcome:
    """Call a function and wait for at most ``timeout_s`` seconds.

    A coroutine function runs on the event loop and is cancelled when its time is over. Any other runs in a daemon
    thread of its own. No thread can be stopped from outside: one that hangs goes on, and holds what it holds, until the
    program ends, which it does not delay.
    """
    deadline = time.monotonic() + timeout_s
    if _is_coroutine_function(function):
        return await _finish(function(*arguments, **keywords), function, deadline, timeout_s)
    outcome = await _in_thread(functools.partial(function, *arguments, **keywords), timeout_s)
    if outcome is None:
        return Outcome(error=DeadlineError(function_name(function), timeout_s))
    if inspect.isawaitable(outcome.value):
        return await _finish(outcome.value, function, deadline, timeout_s)
    return outcome


def function_name(function: Callable[..., Any]) -> str:
    """What to call a function in messages."""
    if isinstance(function, functools.partial):
        return function_name(function.func)
    try:
        return str(function.__name__)
    except AttributeError:
        return type(function).__name__


def _is_coroutine_function(function: Callable[..., Any]) -> bool:
    if isinstance(function, functools.partial):
        return _is_coroutine_function(function.func)
    if inspect.isroutine(function) or inspect.isclass(function):
        return inspect.iscoroutinefunction(function)
    return inspect.iscoroutinefunction(type(function).__call__)


async def _finish(
    awaitable: Awaitable[Any], function: Callable[..., Any], deadline: float, timeout_s: float
) -> Outcome:
    task = asyncio.ensure_future(awaitable)
    try:
        done, _ = await asyncio.wait({task}, timeout=max(0.0, deadline - time.monotonic()))
    finally:
        task.cancel()
    if not done:
        # What it raises on its way out is of no interest any more, but asyncio logs what nobody has read.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return Outcome(error=DeadlineError(function_name(function), timeout_s))
    if task.cancelled():
        return Outcome(error=asyncio.CancelledError("it cancelled itself"))
    error = task.exception()
    return Outcome(error=error) if error is not None else Outcome(task.result())


async def _in_thread(work: Callable[[], Any], timeout_s: float) -> Outcome | None:
    """The outcome, or None when there is none in time."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    result: Future[Any] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            result.set_result(context.run(work))
        except BaseException as error:  # noqa: BLE001
            result.set_exception(error)
        # The loop may be closed by the time that a late function returns.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=run, name="rl_vllm-call", daemon=True).start()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(ended.wait(), timeout_s)
    if not result.done():
        return None
    error = result.exception(timeout=0)
    return Outcome(error=error) if error is not None else Outcome(result.result(timeout=0))

"""One event loop in a thread of its own, on which everything that talks to engines runs.

Callers may be in any thread, with or without a loop of theirs; hopping onto one loop is what makes that safe.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from rl_vllm.errors import DeadlineError, ServiceNotRunningError

T = TypeVar("T")
logger = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 10.0


class LoopThread:
    """Runs coroutines for callers of other threads. Start it by building it; stop it with :meth:`close`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        # Re-entrant: a finaliser that submits may run in the middle of anything, also of a submit.
        self._lock = threading.RLock()
        self._closed = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine; cancelling the returned future cancels it.

        Raises:
            CancelledError: The loop has been closed.
            ServiceNotRunningError: This process is a fork of the one that built the loop.
        """
        # Work that came after :meth:`close` looked for it would be waited for in vain.
        if os.getpid() != self._pid:
            # The thread did not come along: a result would never arrive.
            work.close()
            raise ServiceNotRunningError(f"running in process {self._pid}, of which this one is a fork", "it")
        with self._lock:
            if self._closed:
                work.close()
                raise concurrent.futures.CancelledError("the loop has been closed")
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Callable[[], Awaitable[T]], *, timeout_s: float | None, waited_for: str) -> T:
        """Call ``work`` on the loop and block for the result of what it returns.

        Raises:
            DeadlineError: ``timeout_s`` passed; the work has been cancelled and has cleaned up.
            CancelledError: The loop was closed first.
            RuntimeError: The caller runs on this very loop.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError(f"{waited_for}: a blocking call on the service's own loop would wait for itself")
        future = self.submit(with_deadline(work, timeout_s, waited_for))
        try:
            return future.result()
        except BaseException:
            # An interrupt ends the caller's wait alone: what it waited for must end too.
            future.cancel()
            raise

    async def await_from_anywhere(
        self, work: Callable[[], Awaitable[T]], *, timeout_s: float | None, waited_for: str
    ) -> T:
        """As :meth:`run`, for a caller on any event loop; cancelling the caller cancels the work.

        Raises:
            DeadlineError: ``timeout_s`` passed; the work has been cancelled and has cleaned up.
            CancelledError: This loop was closed first: ``concurrent.futures``' one, not asyncio's.
        """
        if asyncio.get_running_loop() is self._loop:
            return await with_deadline(work, timeout_s, waited_for)
        return await across(self.submit(with_deadline(work, timeout_s, waited_for)))

    def close(self) -> None:
        """Cancel what still runs and end the thread. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        ended = asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop)
        try:
            ended.result(_JOIN_TIMEOUT_S)
        except TimeoutError:
            logger.warning("the service's loop is ended with work on it that did not end within %g s", _JOIN_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_JOIN_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()


async def across(future: concurrent.futures.Future[T]) -> T:
    """Await on the running loop what another thread sets; cancelling the caller cancels ``future``."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def wake(_future: concurrent.futures.Future[T]) -> None:
        # The caller's loop may have been closed without cancelling its tasks: then nobody waits.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(wake)
    try:
        await done.wait()
    except BaseException:
        future.cancel()
        raise
    return future.result()


async def with_deadline(work: Callable[[], Awaitable[T]], timeout_s: float | None, waited_for: str) -> T:
    """Await what ``work`` returns; None leaves the deadline to ``work`` itself.

    Raises:
        DeadlineError: ``timeout_s`` passed; the work has been cancelled and has cleaned up.
    """
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            return await work()
    except TimeoutError:
        # A deadline error from inside says more than ours would.
        if timeout_s is not None and deadline.expired():
            raise DeadlineError(waited_for, timeout_s) from None
        raise


async def _cancel_all() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)

"""Values from work on the service's loop to one reader on any event loop, without a thread of their own."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Generic, TypeVar

from rl_vllm.errors import ServiceNotRunningError
from rl_vllm.service.loop import LoopThread, across
from rl_vllm.service.outbox import Outbox

T = TypeVar("T")


class Hop(Generic[T]):
    """One producer's way to one reader. The reader is woken once for each wait, however many values came meanwhile.

    Args:
        loop: Where the work runs.
        stop_timeout_s: How long :meth:`close` waits for work that it stops.
    """

    def __init__(self, loop: LoopThread, *, stop_timeout_s: float) -> None:
        self._loop = loop
        self._stop_timeout_s = stop_timeout_s
        self._outbox: Outbox[T] = Outbox()
        self._task: asyncio.Task[None] | None = None
        self._finished = False

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin ``work`` on the loop; its error is the reader's, after the last value.

        Raises:
            CancelledError: The loop has been closed: ``concurrent.futures``' one.
            ServiceNotRunningError: This process is a fork of the one that built the loop.
        """

        async def begin() -> None:
            self._task = asyncio.create_task(work(), name="hop")
            self._task.add_done_callback(self._finish)

        def begun(future: concurrent.futures.Future[None]) -> None:
            if future.cancelled():
                self._outbox.end(_loop_closed())

        self._loop.submit(begin()).add_done_callback(begun)

    def put(self, value: T) -> None:
        """Hand a value over; never waits."""
        self._outbox.put(value)

    async def next(self) -> T | None:
        """The next value, or None after the last one; raises what the work ended with.

        Raises:
            CancelledError: The loop was closed first: ``concurrent.futures``' one, not asyncio's.
        """
        await across(self._outbox.ready())
        return self._outbox.take()

    async def close(self) -> None:
        """Stop the work, and wait until it has cleaned up. Idempotent."""
        if self._finished:
            return
        # A loop that has been closed has stopped it; a fork has no part in it.
        with suppress(concurrent.futures.CancelledError, ServiceNotRunningError):
            await across(self._loop.submit(self._stop()))

    def _finish(self, task: asyncio.Task[None]) -> None:
        self._finished = True
        # In the reader's task asyncio's own would say that the reader was cancelled.
        self._outbox.end(_loop_closed() if task.cancelled() else task.exception())

    async def _stop(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task], timeout=self._stop_timeout_s)


def _loop_closed() -> concurrent.futures.CancelledError:
    return concurrent.futures.CancelledError("the loop has been closed")

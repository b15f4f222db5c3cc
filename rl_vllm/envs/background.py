"""One event loop in a thread of its own, for rollouts that wait for many things at once."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rl_vllm.errors import DeadlineError

T = TypeVar("T")

_JOIN_TIMEOUT_S = 10.0


class Background:
    """Runs coroutines for the thread that owns it. Start it by building it; stop it with :meth:`close`.

    Users' coroutines run here and may block the loop: unlike with the service's loop, which keeps the deadlines, the
    caller keeps them itself.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T], *, timeout_s: float | None, waited_for: str) -> T:
        """Run a coroutine and block for its result; None leaves the deadline to the work itself.

        Raises:
            DeadlineError: ``timeout_s`` passed; the work has been cancelled.
        """
        future = self.submit(work)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            raise DeadlineError(waited_for, timeout_s or 0.0) from None
        finally:
            # Also when an interrupt ended the wait.
            future.cancel()

    def call_soon(self, function: Callable[[], object]) -> None:
        """Call on the loop, without waiting."""
        self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """Cancel what still runs and end the thread. Idempotent."""
        if self._loop.is_closed():
            return
        if self._thread.is_alive():
            ended = asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop)
            concurrent.futures.wait([ended], _JOIN_TIMEOUT_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_JOIN_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)

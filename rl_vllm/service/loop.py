"""One event loop in a thread of its own, on which everything that talks to engines runs.

Callers may be in any thread, with or without a loop of theirs; hopping onto one loop is what makes that safe.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from rl_vllm.errors import DeadlineError

T = TypeVar("T")

_JOIN_TIMEOUT_S = 10.0


class LoopThread:
    """Runs coroutines for callers of other threads. Start it by building it; stop it with :meth:`close`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine; cancelling the returned future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T], *, timeout_s: float, waited_for: str) -> T:
        """Run a coroutine and block for its result.

        Raises:
            DeadlineError: ``timeout_s`` passed; the coroutine has been cancelled and has cleaned up.
        """
        return self.submit(self._with_deadline(work, timeout_s, waited_for)).result()

    @staticmethod
    async def _with_deadline(work: Coroutine[Any, Any, T], timeout_s: float, waited_for: str) -> T:
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                return await work
        except TimeoutError:
            # A deadline error from inside says more than ours would.
            if deadline.expired():
                raise DeadlineError(waited_for, timeout_s) from None
            raise

    def close(self) -> None:
        """Cancel what still runs and end the thread. Idempotent."""
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result(_JOIN_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_JOIN_TIMEOUT_S)
        self._loop.close()

    @staticmethod
    async def _cancel_all() -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

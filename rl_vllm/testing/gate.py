"""A door at which a fake waits until a test opens it."""

from __future__ import annotations

import asyncio
import threading

from rl_vllm.errors import DeadlineError


class Gate:
    """A door at which a fake waits until a test opens it; every method may be called from any thread.

    Args:
        is_open: Whether it lets everyone through from the start.
    """

    def __init__(self, *, is_open: bool = False) -> None:
        self._is_open = is_open
        self._changed = threading.Condition()
        self._held: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}

    def open(self) -> None:
        """Let through everyone who waits and everyone who comes."""
        with self._changed:
            self._is_open = True
            for future, loop in self._held.items():
                loop.call_soon_threadsafe(_release, future)
            self._held.clear()

    def close(self) -> None:
        """Hold everyone who comes from now on."""
        with self._changed:
            self._is_open = False

    async def passed(self) -> None:
        """Wait until the gate is open."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._changed:
            if self._is_open:
                return
            self._held[future] = loop
            self._changed.notify_all()
        try:
            await future
        finally:
            with self._changed:
                self._held.pop(future, None)

    def wait_until_held(self, count: int = 1, *, timeout_s: float = 10.0) -> None:
        """Block until ``count`` wait at the gate; inside an event loop use ``asyncio.to_thread``.

        Raises:
            DeadlineError: Fewer came within ``timeout_s`` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._held) >= count, timeout_s):
                raise DeadlineError(f"{count} to wait at a gate where {len(self._held)} do", timeout_s)


def _release(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)

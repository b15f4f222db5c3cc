"""Values on their way from the service's loop to one reader, who may be in any thread or on any event loop."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    """A queue with an end, for one reader; writing never waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: deque[T] = deque()
        self._ended = False
        self._error: BaseException | None = None
        self._waiting: Future[None] | None = None

    def put(self, value: T) -> None:
        with self._lock:
            self._values.append(value)
        self._wake()

    def end(self, error: BaseException | None = None) -> None:
        """Nothing more comes; the reader gets ``error`` after the last value."""
        with self._lock:
            self._ended = True
            self._error = error
        self._wake()

    def ready(self) -> Future[None]:
        """Done when :meth:`take` has something to say."""
        with self._lock:
            ready: Future[None] = Future()
            if self._values or self._ended:
                ready.set_result(None)
            else:
                self._waiting = ready
            return ready

    def take(self) -> T | None:
        """The next value, or None when nothing more comes; raises the error it ended with. Only when ready."""
        with self._lock:
            if self._values:
                return self._values.popleft()
            assert self._ended, "take() is for those who waited"
            error, self._error = self._error, None
        if error is not None:
            raise error
        return None

    def _wake(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, None
        if waiting is not None:
            # A reader that was cancelled waits no longer.
            with suppress(InvalidStateError):
                waiting.set_result(None)

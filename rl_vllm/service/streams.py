"""One request's outputs on their way to one reader, in a thread or on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as WaitTimeoutError
from typing import Any, Self

from rl_vllm.errors import DeadlineError, ServiceNotRunningError
from rl_vllm.service.calls import GRACE_S
from rl_vllm.service.loop import across
from rl_vllm.service.outputs import RequestOutput
from rl_vllm.service.pieces import PieceReader
from rl_vllm.service.requests import LiveRequest

Start = Callable[[], tuple[LiveRequest, PieceReader]]
GiveUp = Callable[[LiveRequest], "Future[None]"]


class _Stream:
    """One request's outputs on their way to one reader; closing it aborts the request in its engine."""

    def __init__(self, request_id: str, start: Start, give_up: GiveUp) -> None:
        self.request_id = request_id
        self._start = start
        self._stop = give_up
        self._live: LiveRequest | None = None
        self._reader: PieceReader | None = None

    def begin(self) -> None:
        """Send the request; the first time only."""
        if self._live is None:
            self._live, self._reader = self._start()

    def _next(self) -> RequestOutput | None:
        assert self._live is not None
        assert self._reader is not None
        piece = self._live.outbox.take()
        return None if piece is None else self._reader.read(piece)

    def _give_up(self) -> Future[None] | None:
        if self._live is None or self._live.done.done():
            return None
        try:
            return self._stop(self._live)
        except (CancelledError, ServiceNotRunningError):
            # The service has been shut down, or this process is a fork of its own: there is nothing to stop.
            return None

    def __del__(self) -> None:
        self._give_up()


class OutputStream(_Stream, Iterator[RequestOutput]):
    """Iterates over outputs in any thread; a context manager."""

    def __next__(self) -> RequestOutput:
        assert self._live is not None
        limit_s = self._live.work.job.limit_s + GRACE_S
        try:
            self._live.outbox.ready().result(limit_s)
        except WaitTimeoutError:
            raise DeadlineError(f"request {self.request_id}", limit_s) from None
        output = self._next()
        if output is None:
            raise StopIteration
        return output

    def close(self) -> None:
        """Stop reading; what the engine still does for the request is aborted. Idempotent."""
        stopping = self._give_up()
        if stopping is not None and self._live is not None:
            stopping.result(self._live.work.job.limit_s + GRACE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class AsyncOutputStream(_Stream, AsyncIterator[RequestOutput]):
    """Iterates over outputs on any event loop; an async context manager.

    The request begins with the first output that is asked for, or with ``await`` on the stream, which gives the stream.
    Cancelling the reader aborts the request.
    """

    async def __anext__(self) -> RequestOutput:
        live = await self._begun()
        try:
            await across(live.outbox.ready())
        except asyncio.CancelledError:
            self._give_up()
            raise
        output = self._next()
        if output is None:
            raise StopAsyncIteration
        return output

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    async def aclose(self) -> None:
        """Stop reading; what the engine still does for the request is aborted. Idempotent."""
        stopping = self._give_up()
        if stopping is not None:
            await across(stopping)

    async def __aenter__(self) -> Self:
        await self._begun()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    async def _begun(self) -> LiveRequest:
        if self._live is None:
            # Tokenizers work for as long as their texts are: the caller's loop goes on meanwhile.
            await asyncio.to_thread(self.begin)
        assert self._live is not None
        return self._live

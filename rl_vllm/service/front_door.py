"""Where other processes ask a service: opened when it is first pickled, closed when it is shut down."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import secrets
import socket
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Coroutine
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import answer_challenge, deliver_challenge
from typing import Any, Protocol

from rl_vllm.errors import ConfigError, ServiceNotRunningError
from rl_vllm.protocols import AsyncGenerationService
from rl_vllm.protocols.address import routable_address
from rl_vllm.service.line import ATTRIBUTES, BATCH, CALLS, NEXT, STREAM, Hello, Pipe, Ticket, pipe_over, readable
from rl_vllm.service.remote import RemoteService
from rl_vllm.types import CompletionBatch

logger = logging.getLogger(__name__)

# How long a door that closes waits for calls under way to say how they ended.
CLOSE_TIMEOUT_S = 5.0
_POLL_S = 0.5


class Portable(AsyncGenerationService, Protocol):
    """A service with a door."""

    @property
    def door(self) -> FrontDoor: ...


class FrontDoor:
    """Answers other processes for one service, each of their connections in a thread of its own.

    Args:
        service: Who is asked.
        name: Its name, the same for all who were given it.
        hello: What every guest is told first.
    """

    def __init__(self, service: Portable, name: str, hello: Hello) -> None:
        self.name = name
        self.service = weakref.ref(service)
        self._hello = hello
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._ticket: Ticket | None = None
        self._guests: set[threading.Thread] = set()
        self.is_closed = False

    def ticket(self) -> Ticket:
        """What the service is pickled as; the first call opens the door.

        Raises:
            ServiceNotRunningError: The door has been closed, or is another process's and was not open yet.
            ConfigError: Another service of this process has the name.
        """
        with self._lock:
            if self.is_closed:
                raise ServiceNotRunningError("shut down", "pickling it")
            if self._ticket is not None:
                return self._ticket
            if os.getpid() != self._pid:
                raise ServiceNotRunningError(f"running in process {self._pid}, of which this one is a fork", "it")
            other = _doors.get(self.name)
            if other is not None and other is not self and not other.is_closed:
                raise ConfigError(f"two services of this process are called {self.name!r}: give one another name")
            host = routable_address()
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, 0), family=family)
            listener.settimeout(_POLL_S)
            self._ticket = Ticket(self.name, host, listener.getsockname()[1], secrets.token_bytes(32))
            _doors[self.name] = self
            threading.Thread(target=self._admit, args=(listener,), name="rl_vllm-door", daemon=True).start()
            return self._ticket

    def is_of(self, ticket: Ticket) -> bool:
        """Whether this is the door of a ticket, in the process that owns it."""
        return os.getpid() == self._pid and self._ticket == ticket

    def close(self) -> None:
        """Let nobody in any more, and end all connections once calls under way have been answered. Idempotent."""
        with self._lock:
            if self.is_closed or os.getpid() != self._pid:
                return
            self.is_closed = True
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in list(self._guests):
            thread.join(max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():
                logger.warning("a call from another process did not end within %g s", CLOSE_TIMEOUT_S)

    def _admit(self, listener: socket.socket) -> None:
        with listener:
            while not self.is_closed:
                # Nobody came, or who came has gone again.
                with suppress(OSError):
                    end, _ = listener.accept()
                    pipe = pipe_over(end)
                    guest = threading.Thread(target=self._serve, args=(pipe,), name="rl_vllm-guest", daemon=True)
                    self._guests.add(guest)
                    guest.start()

    def _serve(self, pipe: Pipe) -> None:
        assert self._ticket is not None
        try:
            with pipe, suppress(EOFError, OSError):
                deliver_challenge(pipe, self._ticket.authkey)
                answer_challenge(pipe, self._ticket.authkey)
                pipe.send(self._hello)
                asyncio.run(_Guest(self, pipe).attend())
        except AuthenticationError as error:
            logger.warning("service %s was asked by somebody without its key: %s", self.name, error)
        finally:
            self._guests.discard(threading.current_thread())


class _Guest:
    """One connection from another process: its calls, one after the other, and the stream it reads."""

    def __init__(self, door: FrontDoor, pipe: Pipe) -> None:
        self._door = door
        self._pipe = pipe
        self._stream: AsyncGenerator[CompletionBatch, None] | None = None

    async def attend(self) -> None:
        """Answer until the guest goes, or the door is closed."""
        try:
            while not self._door.is_closed:
                if await _within(_POLL_S, readable(self._pipe)):
                    work = asyncio.create_task(self._call(*self._pipe.recv()))
                    if not await _while_there(self._pipe, work):
                        return
                    _reply(self._pipe, work)
        finally:
            if self._stream is not None:
                await self._stream.aclose()

    async def _call(self, call: str, args: tuple[Any, ...], options: dict[str, Any]) -> object:
        if call not in CALLS:
            raise ConfigError(f"{call!r} is not for other processes: they may ask {', '.join(sorted(CALLS - {NEXT}))}")
        service = self._door.service()
        if service is None:
            raise ServiceNotRunningError("gone", f"{call}()")
        if call in ATTRIBUTES:
            return getattr(service, call)
        if call == STREAM:
            self._stream = service.stream_batch(*args, **options)
            return None
        if call == NEXT:
            return None if self._stream is None else await anext(self._stream, None)
        if call == BATCH:
            # Unlike its blocking twin, it can be stopped when the guest goes.
            return await service.agenerate_batch(*args, **options)
        return await asyncio.to_thread(getattr(service, call), *args, **options)


async def _within(seconds: float, wait: Coroutine[Any, Any, None]) -> bool:
    """Whether a wait ended in time."""
    task = asyncio.ensure_future(wait)
    done, _ = await asyncio.wait({task}, timeout=seconds)
    if not done:
        task.cancel()
        await asyncio.wait({task})
    return bool(done)


async def _while_there(pipe: Pipe, work: asyncio.Task[Any]) -> bool:
    """Wait for work; when the guest goes first it is stopped, and the answer is False."""
    gone = asyncio.ensure_future(readable(pipe))
    await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
    finished = work.done()
    for task in (work, gone):
        task.cancel()
    await asyncio.wait({work, gone})
    return finished


def _reply(pipe: Pipe, work: asyncio.Task[Any]) -> None:
    error = work.exception()
    if error is None:
        pipe.send((True, work.result()))
        return
    pipe.send((False, error if _travels(error) else RuntimeError(f"{type(error).__name__}: {error}")))


def _travels(error: BaseException) -> bool:
    """Whether an error can be pickled and read again: some of foreign libraries cannot."""
    try:
        pickle.loads(pickle.dumps(error))
    except (pickle.PickleError, TypeError, AttributeError, ValueError, LookupError, ImportError, RuntimeError):
        return False
    return True


_doors: weakref.WeakValueDictionary[str, FrontDoor] = weakref.WeakValueDictionary()


def attach(ticket: Ticket) -> AsyncGenerationService:
    """What a pickled service becomes: itself in the process that owns it, in any other a :class:`RemoteService`."""
    door = _doors.get(ticket.name)
    service = door.service() if door is not None and door.is_of(ticket) else None
    return RemoteService(ticket, attach) if service is None else service

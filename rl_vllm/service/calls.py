"""How a call gets from any thread or event loop onto the service's own."""

from __future__ import annotations

import functools
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any, Concatenate, ParamSpec, TypeVar

from rl_vllm.config import ServiceConfig, start_timeout_s
from rl_vllm.errors import EngineDiedError, ServiceNotRunningError
from rl_vllm.service.core import Core
from rl_vllm.service.loop import LoopThread

P = ParamSpec("P")
S = TypeVar("S", bound="Calls")
T = TypeVar("T")
Limit = Callable[[ServiceConfig], float | None]

# Beyond the deadlines of the work itself, so that the work's own error is the one that is seen.
GRACE_S = 10.0


class Calls:
    """What every part of a service's front needs: its state, and the way onto its loop."""

    def __init__(self, config: ServiceConfig) -> None:
        self.config = config
        self._lock = threading.Lock()
        self._state = "not launched"
        self._loop: LoopThread | None = None
        self._core: Core | None = None

    def _running(self, call: str) -> Core:
        if self._state != "running":
            raise ServiceNotRunningError(self._state, call)
        assert self._core is not None
        return self._core

    def _block(
        self, call: str, work: Callable[[], Awaitable[T]], *, timeout_s: float | None, waited_for: str = ""
    ) -> T:
        """Run ``work`` on the service's loop and wait for it in this thread."""
        self._running(call)
        assert self._loop is not None
        try:
            return self._loop.run(work, timeout_s=timeout_s, waited_for=waited_for or call)
        except CancelledError:
            raise ServiceNotRunningError("shut down", call) from None
        except EngineDiedError as error:
            # A shutdown ends the engines under the calls that use them.
            if self._state == "shut down":
                raise ServiceNotRunningError("shut down", call) from error
            raise

    async def _wait(
        self, call: str, work: Callable[[], Awaitable[T]], *, timeout_s: float | None, waited_for: str = ""
    ) -> T:
        """Run ``work`` on the service's loop and await it on the caller's."""
        self._running(call)
        assert self._loop is not None
        try:
            return await self._loop.await_from_anywhere(work, timeout_s=timeout_s, waited_for=waited_for or call)
        except CancelledError:
            raise ServiceNotRunningError("shut down", call) from None
        except EngineDiedError as error:
            # A shutdown ends the engines under the calls that use them.
            if self._state == "shut down":
                raise ServiceNotRunningError("shut down", call) from error
            raise


def rpc_limit(config: ServiceConfig) -> float:
    """The deadline of a call to replicas that moves no weights; each replica has its own, which says more."""
    return config.rpc_timeout_s + GRACE_S


def long_limit(config: ServiceConfig) -> float:
    """The deadline of a call that starts an engine or moves its memory."""
    return (config.launch_timeout_s or start_timeout_s()) + GRACE_S


def own_limit(_config: ServiceConfig) -> None:
    """The body keeps its own deadline."""
    return


def on_loop(
    limit: Limit = rpc_limit,
) -> Callable[
    [Callable[Concatenate[S, P], Coroutine[Any, Any, T]]], Callable[Concatenate[S, P], Coroutine[Any, Any, T]]
]:
    """Make a coroutine method run on the service's loop, within a deadline, whatever loop awaits it.

    Its blocking twin is ``blocking(method)``; the body is written once.
    """

    def decorate(
        work: Callable[Concatenate[S, P], Coroutine[Any, Any, T]],
    ) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
        call = f"{work.__name__}()"

        @functools.wraps(work)
        async def twin(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
            return await self._wait(call, lambda: work(self, *args, **kwargs), timeout_s=limit(self.config))

        twin.__dict__["limit"] = limit
        return twin

    return decorate


def blocking(twin: Callable[Concatenate[S, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[S, P], T]:
    """The blocking twin of a method made by :func:`on_loop`: its name without the leading ``a``."""
    work: Callable[Concatenate[S, P], Coroutine[Any, Any, T]] = twin.__dict__["__wrapped__"]
    limit: Limit = twin.__dict__["limit"]
    name = work.__name__.removeprefix("a")

    def front(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._block(f"{name}()", lambda: work(self, *args, **kwargs), timeout_s=limit(self.config))

    functools.update_wrapper(front, work)
    front.__name__ = name
    front.__qualname__ = work.__qualname__.replace(work.__name__, name)
    return front

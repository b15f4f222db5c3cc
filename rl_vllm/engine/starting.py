"""An engine in this process, beside the program's own threads and environment."""

from __future__ import annotations

import asyncio
import multiprocessing.resource_tracker
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from rl_vllm.config import EngineConfig
from rl_vllm.engine import reaper
from rl_vllm.engine.cpu_cores import CoreLease
from rl_vllm.engine.plugin import DIE_WITH_PARENT, OWNER_THREAD
from rl_vllm.engine.start_error import OutputMark, start_error
from rl_vllm.errors import EngineStartError

if TYPE_CHECKING:
    from rl_vllm.engine.vllm_engine import VLLMEngine

_POLL_S = 0.05
# Loading vLLM cannot be interrupted; a thread that is at it ends when it has.
_THREAD_TIMEOUT_S = 15.0
# One engine at a time: what its processes inherit is the environment of the whole program.
_ENVIRONMENT = threading.Lock()


@contextmanager
def environment(**values: str | None) -> Iterator[None]:
    """Have these variables set, None meaning unset, and everything as it was afterwards, whoever changed it."""
    with _ENVIRONMENT:
        before = dict(os.environ)
        try:
            for name, value in values.items():
                set_variable(name, value)
            yield
        finally:
            for name in os.environ.keys() | before.keys():
                set_variable(name, before.get(name))


def set_variable(name: str, value: str | None) -> None:
    """Set a variable of this process's environment, or unset it with None."""
    if value is None:
        os.environ.pop(name, None)
    elif os.environ.get(name) != value:
        os.environ[name] = value


class EngineHost:
    """Builds an engine without blocking the event loop, and ends whatever it started.

    vLLM's constructor blocks until its processes serve, and the kernel ends those processes with the *thread* that
    started them. So it runs in a thread of its own, which lives until :meth:`stop`. A reaper watches that thread and
    removes what it leaves, also when this process is killed; other children of the program are not touched.

    Args:
        config: The engine's settings.
        replica: Index of the replica it serves.
        on_cpu: Whether vLLM runs on CPUs here.
    """

    def __init__(self, config: EngineConfig, replica: int, *, on_cpu: bool) -> None:
        self._config = config
        self._replica = replica
        self._on_cpu = on_cpu
        self._lease: CoreLease | None = None
        self._engine: VLLMEngine | None = None
        self._error: BaseException | None = None
        self._built = threading.Event()
        self._over = threading.Event()
        # Shared by all of the program: it must not be a child of a thread whose children are ended.
        multiprocessing.resource_tracker.ensure_running()
        self._thread = threading.Thread(target=self._run, name=f"rl_vllm-engine-{replica}", daemon=True)

    async def start(self) -> VLLMEngine:
        """Load the model and make a first token; cancelling it needs a :meth:`stop`, as a failure does.

        Raises:
            EngineStartError: With the reason that the failing process gave.
        """
        mark = OutputMark()
        self._thread.start()
        try:
            while not self._built.is_set():  # noqa: ASYNC110 (a thread sets it)
                await asyncio.sleep(_POLL_S)
            if self._error is not None:
                raise self._error
            assert self._engine is not None
            await self._engine.start()
        except Exception as error:
            raise start_error(error, mark, self._config, self._replica, on_cpu=self._on_cpu) from error
        return self._engine

    async def stop(self, timeout_s: float) -> bool:
        """End the engine and its processes, those that do not answer within ``timeout_s`` by force. Idempotent.

        Returns:
            Whether it ended by itself.
        """
        gently = self._engine is None
        family = self._family()
        try:
            if self._engine is not None:
                async with asyncio.timeout(timeout_s):
                    await self._engine.shutdown()
                gently = True
        except TimeoutError:
            gently = False
        finally:
            # Also when this wait is cancelled.
            family |= self._family()
            self._over.set()
            _kill(family)
        # A constructor that is still at work may start more before it learns that its processes are gone.
        deadline = time.monotonic() + _THREAD_TIMEOUT_S
        while (self._thread.is_alive() or _living(family)) and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
            family |= self._family()
            _kill(family)
        if self._lease is not None:
            self._lease.release()
        return gently

    def _family(self) -> set[reaper.Process]:
        """What the thread has started. Once it has ended, the kernel ends them and its number may be another's."""
        if not self._thread.is_alive() or self._thread.native_id is None:
            return set()
        return reaper.descendants(os.getpid(), self._thread.native_id)

    def _run(self) -> None:
        try:
            reaper.start(os.getpid(), threading.get_native_id())
            self._engine = self._build()
        except BaseException as error:
            self._error = error
            if not isinstance(error, Exception):
                raise
        finally:
            self._built.set()
        self._over.wait()

    def _build(self) -> VLLMEngine:
        values: dict[str, str | None] = {
            # The plugin reads it in every process the engine starts; this one's pid tells the owner from them.
            DIE_WITH_PARENT: str(os.getpid()),
            OWNER_THREAD: str(threading.get_native_id()),
            # A program with threads must not be forked.
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        }
        if self._on_cpu:
            self._lease = CoreLease(num_workers=self._config.num_workers, cores_per_worker=self._config.cpu_cores)
            values |= self._lease.environment
        with environment(**values):
            from rl_vllm.engine.vllm_engine import VLLMEngine

            if self._over.is_set():
                raise EngineStartError(self._replica, "it was stopped before it started")
            return VLLMEngine(self._config, replica=self._replica, on_cpu=self._on_cpu)


def _living(processes: set[reaper.Process]) -> set[reaper.Process]:
    return {(pid, began) for pid, began in processes if reaper.start_time(pid) == began}


def _kill(processes: set[reaper.Process]) -> None:
    for pid, _ in _living(processes):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

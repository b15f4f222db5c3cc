"""The Ray of this process: joined when there is one, else started here and stopped with its last user."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import ray

from rl_vllm.config import ray_address
from rl_vllm.engine import reaper
from rl_vllm.errors import DeadlineError
from rl_vllm.service.preflight import check_ray_address

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 60.0


def is_up() -> bool:
    """Whether this process has a Ray, whoever started it."""
    return bool(ray.is_initialized())


class RayCluster:
    """Counts its users; safe from any thread.

    The kernel ends Ray's processes together with the *thread* that started them, so Ray is started in a thread of its
    own, which lives until the last user has left. No signal handler is installed: what the program does on a signal
    stays its own affair, and when it is killed a reaper ends what the kernel does not.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._host: _Host | None = None

    def join(self) -> None:
        """Have Ray running until :meth:`leave`.

        Raises:
            ConfigError: ``RAY_ADDRESS`` names a cluster that does not answer.
            DeadlineError: Ray did not start.
        """
        with self._lock:
            if not ray.is_initialized():
                check_ray_address(ray_address())
                # The program itself may have stopped the Ray that was started here.
                self._stop_host()
                host = _Host()
                try:
                    host.wait_until_up()
                except BaseException:
                    # An interrupt ends this wait alone: Ray would go on starting.
                    host.stop()
                    raise
                self._host = host
            self._users += 1

    def leave(self) -> None:
        """Undo one :meth:`join`; the last one stops the Ray that was started here."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._stop_host()

    def _stop_host(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            host.stop()


class _Host:
    """The thread that starts Ray, waits, and stops it."""

    def __init__(self) -> None:
        self._up = threading.Event()
        self._leave = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rl_vllm-ray", daemon=True)
        self._thread.start()

    def wait_until_up(self) -> None:
        if not self._up.wait(_START_TIMEOUT_S):
            raise DeadlineError("Ray to start", _START_TIMEOUT_S)
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self._leave.set()
        self._thread.join(_STOP_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("Ray did not stop within %.0f s", _STOP_TIMEOUT_S)

    def _run(self) -> None:
        try:
            with _without_its_advice_on_signals(), _with_workers_at_full_priority():
                # Workers' output stays in Ray's log files: what matters of it comes back in errors.
                ray.init(log_to_driver=False, include_dashboard=False, logging_level=logging.WARNING)
            _reap_with_raylet()
        except BaseException as error:
            self._error = error
            ray.shutdown()
            self._up.set()
            if not isinstance(error, Exception):
                raise
            return
        self._up.set()
        self._leave.wait()
        ray.shutdown()


def _reap_with_raylet() -> None:
    """End the raylet's children with it: when this process is killed the kernel ends the raylet, but not its agents."""
    for pid, _ in reaper.descendants(os.getpid()):
        name = ""
        # Another child of the program may just have ended.
        with suppress(OSError):
            name = Path(f"/proc/{pid}/comm").read_text().strip()
        if name == "raylet":
            reaper.start(pid)


@contextmanager
def _without_its_advice_on_signals() -> Iterator[None]:
    """Keep Ray from warning that it could not replace the program's handler of SIGTERM."""

    def is_other(record: logging.LogRecord) -> bool:
        return "SIGTERM handler is not set" not in record.getMessage()

    log = logging.getLogger("ray._private.worker")
    log.addFilter(is_other)
    try:
        yield
    finally:
        log.removeFilter(is_other)


@contextmanager
def _with_workers_at_full_priority() -> Iterator[None]:
    """Ray starts its workers at nice 15: beside a trainer on the same cores an engine would hardly run."""
    name = "RAY_worker_niceness"
    if name in os.environ:
        yield
        return
    os.environ[name] = "0"
    try:
        yield
    finally:
        os.environ.pop(name, None)


cluster = RayCluster()

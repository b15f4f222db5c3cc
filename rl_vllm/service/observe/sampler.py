"""Asks every engine for its own counts at a fixed pace and keeps the answers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from rl_vllm.errors import EngineDiedError, ReplicaCallError
from rl_vllm.protocols import Engine
from rl_vllm.service.replicas import Replica, ReplicaSet
from rl_vllm.types import EngineMetrics, ReplicaSample

SampleLogger = Callable[[ReplicaSample], None]

# Engines report whole steps: a rate over less time than this says more about the moment of asking than about them.
_SHORTEST_WINDOW_S = 0.2
# About 25 MB; 2 replicas fill it in 7 hours at two samples a second.
_LONGEST_TIMELINE = 100_000


@dataclass(frozen=True, slots=True)
class Sampled:
    """An engine's last answer.

    Attributes:
        engine: Whose answer it is; a restarted replica has another.
        metrics: The answer.
        sample: The same as a point of the time line.
        answered_s: When it came, by the sampler's clock.
        base_tokens: Generated tokens at the start of the window that the next rate is taken over.
        base_s: Start of that window, by the sampler's clock.
    """

    engine: Engine
    metrics: EngineMetrics
    sample: ReplicaSample
    answered_s: float
    base_tokens: int
    base_s: float


class Sampler:
    """Keeps ``Replica.metrics`` and a time line; judges nobody's health.

    Each replica is asked by itself, one call at a time: one that is slow or gone delays no other. What a replica said
    is forgotten when it does not answer in time, and when its engine is no longer up.

    Args:
        replicas: Whom to ask.
        period_s: Seconds between two samples, or None to ask only in :meth:`sample`.
        timeout_s: Limit for one answer, in seconds.
        length: Samples kept in the time line, of all replicas together; the oldest leave first.
        clock: Seconds that never go back.

    Runs on the service's loop; the time line and the loggers may be used from any thread.
    """

    def __init__(
        self,
        replicas: ReplicaSet,
        *,
        period_s: float | None,
        timeout_s: float,
        length: int = _LONGEST_TIMELINE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replicas = replicas
        self._period_s = period_s
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._timeline: deque[ReplicaSample] = deque(maxlen=length)
        self._loggers: list[SampleLogger] = []
        self._latest: dict[int, Sampled] = {}
        self._calls: dict[int, tuple[Engine, asyncio.Task[None]]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to sample, if there is a period."""
        if self._period_s is not None and self._task is None:
            self._task = asyncio.create_task(self._sample_for_ever(self._period_s), name="sampler")

    async def close(self) -> None:
        """Stop, and give up the calls under way. Idempotent; what was sampled stays."""
        tasks = [task for _, task in self._calls.values()]
        if self._task is not None:
            tasks.append(self._task)
            self._task = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def sample(self, *, within_s: float) -> None:
        """Ask every replica now; return when all have answered, or after ``within_s`` without those that are late."""
        self._ask_all()
        tasks = [task for _, task in self._calls.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=within_s)

    def latest(self) -> dict[int, Sampled]:
        """Last answer of each replica that is up and has answered, by index."""
        up = {replica.index: replica.engine for replica in self._replicas.living()}
        return {index: sampled for index, sampled in self._latest.items() if up.get(index) is sampled.engine}

    def age_s(self, sampled: Sampled) -> float:
        """Seconds since an answer."""
        return self._clock() - sampled.answered_s

    def timeline(self) -> list[ReplicaSample]:
        """The samples kept, oldest first."""
        with self._lock:
            return list(self._timeline)

    def clear(self) -> None:
        """Forget the time line."""
        with self._lock:
            self._timeline.clear()

    def add_logger(self, log: SampleLogger) -> None:
        """Call ``log`` with every sample, on the service's loop: it must be quick. What it raises is logged."""
        with self._lock:
            self._loggers.append(log)

    def remove_logger(self, log: SampleLogger) -> None:
        """Stop calling ``log``.

        Raises:
            ValueError: It was not added.
        """
        with self._lock:
            self._loggers.remove(log)

    async def _sample_for_ever(self, period_s: float) -> None:
        while True:
            self._ask_all()
            await asyncio.sleep(period_s)

    def _ask_all(self) -> None:
        up = {replica.index: replica for replica in self._replicas.living()}
        for replica in self._replicas.all:
            if replica.index not in up:
                replica.metrics = None
        for index in self._latest.keys() - up.keys():
            del self._latest[index]
        for index, (engine, task) in list(self._calls.items()):
            if index not in up or up[index].engine is not engine:
                task.cancel()
                del self._calls[index]
        for index, replica in up.items():
            if index not in self._calls:
                task = asyncio.create_task(self._ask(replica), name=f"sample-replica-{index}")
                self._calls[index] = (replica.engine, task)

    async def _ask(self, replica: Replica) -> None:
        engine = replica.engine
        metrics = None
        try:
            # Unknown until it answers again: what to do about its silence is the heartbeat's business.
            with contextlib.suppress(EngineDiedError, ReplicaCallError, TimeoutError):
                async with asyncio.timeout(self._timeout_s):
                    metrics = await engine.metrics()
        finally:
            call = self._calls.get(replica.index)
            if call is not None and call[1] is asyncio.current_task():
                del self._calls[replica.index]
            if replica.engine is engine:
                replica.metrics = metrics if replica.state.is_up else None
                if replica.metrics is None:
                    self._latest.pop(replica.index, None)
                else:
                    self._record(replica, replica.metrics)

    def _record(self, replica: Replica, metrics: EngineMetrics) -> None:
        now_s = self._clock()
        rate, base_tokens, base_s = self._rate(replica, metrics, now_s)
        sample = ReplicaSample(
            time_s=time.time(),
            replica=replica.index,
            running=metrics.num_running,
            waiting=metrics.num_waiting,
            kv_usage=metrics.kv_cache_usage,
            generated_tokens=metrics.generated_tokens,
            tokens_per_s=rate,
        )
        self._latest[replica.index] = Sampled(replica.engine, metrics, sample, now_s, base_tokens, base_s)
        with self._lock:
            self._timeline.append(sample)
            loggers = tuple(self._loggers)
        for log in loggers:
            # As a callback of its own: an error in it is reported and harms neither the sampler nor the next.
            asyncio.get_running_loop().call_soon(log, sample)

    def _rate(self, replica: Replica, metrics: EngineMetrics, now_s: float) -> tuple[float | None, int, float]:
        """Tokens per second, and the tokens and the time that the next rate starts from."""
        last = self._latest.get(replica.index)
        if last is None or last.engine is not replica.engine:
            return None, metrics.generated_tokens, now_s
        seconds = now_s - last.base_s
        if seconds < _SHORTEST_WINDOW_S:
            return last.sample.tokens_per_s, last.base_tokens, last.base_s
        return (metrics.generated_tokens - last.base_tokens) / seconds, metrics.generated_tokens, now_s

"""Whether replicas answer: one heartbeat per replica, and what its silence means."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rl_vllm.config import HealthConfig
from rl_vllm.errors import DeadlineError, EngineDiedError
from rl_vllm.protocols import Engine
from rl_vllm.service.replicas import Replica, ReplicaSet
from rl_vllm.types import ReplicaState


@dataclass(slots=True)
class _Pulse:
    """What the checks of one replica have shown.

    Attributes:
        task: The heartbeat.
        failures: Failed checks in a row.
        num_quiet: Long calls that are under way.
        last_quiet: How many have begun: a check that one of them overlapped proves nothing by failing.
    """

    task: asyncio.Task[None] | None = None
    failures: int = 0
    num_quiet: int = 0
    last_quiet: int = 0


class Heartbeats:
    """Checks every replica whose engine runs; used on the service's loop only.

    A failed check makes a serving replica suspect, which still serves; ``max_failures`` in a row, or an engine that
    says so itself, make it dead. A check that succeeds makes a suspect one healthy, and no other.

    Args:
        replicas: Where states are kept.
        config: Period, limit, and how many failures are too many.
    """

    def __init__(self, replicas: ReplicaSet, config: HealthConfig) -> None:
        self._replicas = replicas
        self._config = config
        self._pulses: dict[Replica, _Pulse] = {}

    def watch(self, replica: Replica) -> None:
        """Begin the heartbeat of a replica; it lasts until :meth:`forget` or :meth:`close`."""
        pulse = self._pulse(replica)
        if pulse.task is None:
            pulse.task = asyncio.create_task(self._beat(replica, pulse), name=f"replica-{replica.index}-heartbeat")

    async def forget(self, replica: Replica) -> None:
        """End the heartbeat of a replica."""
        pulse = self._pulses.pop(replica, None)
        if pulse is not None and pulse.task is not None:
            pulse.task.cancel()
            await asyncio.gather(pulse.task, return_exceptions=True)

    async def close(self) -> None:
        """End every heartbeat. Idempotent."""
        for replica in list(self._pulses):
            await self.forget(replica)

    @contextmanager
    def quiet(self, replica: Replica) -> Iterator[None]:
        """Suspend the heartbeat of a replica during a call that may keep its engine from answering."""
        pulse = self._pulse(replica)
        pulse.num_quiet += 1
        pulse.last_quiet += 1
        try:
            yield
        finally:
            pulse.num_quiet -= 1
            pulse.failures = 0

    def _pulse(self, replica: Replica) -> _Pulse:
        return self._pulses.setdefault(replica, _Pulse())

    async def _beat(self, replica: Replica, pulse: _Pulse) -> None:
        while True:
            await asyncio.sleep(self._config.heartbeat_period_s)
            if not replica.state.is_up:
                pulse.failures = 0
            elif not pulse.num_quiet:
                await self._check(replica, pulse)

    async def _check(self, replica: Replica, pulse: _Pulse) -> None:
        engine, last_quiet = replica.engine, pulse.last_quiet
        # Gathered, because whatever a check runs into is a failed check.
        (result,) = await asyncio.gather(self._answer(replica, engine), return_exceptions=True)
        if not replica.state.is_up or replica.engine is not engine:
            return
        if isinstance(result, EngineDiedError):
            self._replicas.died(replica, engine, result.reason)
        elif result is None:
            pulse.failures = 0
            if replica.state is ReplicaState.SUSPECT:
                self._replicas.set_state(replica, ReplicaState.HEALTHY, "it answers health checks again")
        elif pulse.last_quiet == last_quiet:
            pulse.failures += 1
            self._judge(replica, engine, pulse.failures, str(result) or type(result).__name__)

    def _judge(self, replica: Replica, engine: Engine, failures: int, reason: str) -> None:
        limit = self._config.max_failures
        if failures >= limit:
            self._replicas.died(replica, engine, f"{failures} health checks in a row failed: {reason}")
        elif replica.state is ReplicaState.HEALTHY:
            self._replicas.set_state(
                replica, ReplicaState.SUSPECT, f"health check {failures} of {limit} failed: {reason}"
            )

    async def _answer(self, replica: Replica, engine: Engine) -> None:
        limit_s = self._config.heartbeat_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await engine.check_health()
        except TimeoutError as error:
            if isinstance(error, DeadlineError):
                raise
            raise DeadlineError(f"replica {replica.index} to answer a health check", limit_s) from error

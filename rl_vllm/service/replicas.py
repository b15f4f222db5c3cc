"""The replicas of a service and what the driver knows of each without asking it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl_vllm.errors import NoReplicaServesError
from rl_vllm.protocols import Engine
from rl_vllm.types import ReplicaState

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Replica:
    """One engine and its counters.

    Attributes:
        index: Position in the service.
        engine: How to reach it.
        state: Only ``SERVING`` replicas receive requests; changed by :meth:`ReplicaSet.set_state`.
        version: The weight version it committed last.
        outstanding_requests: Requests sent and not yet answered.
        outstanding_tokens: Tokens those may still cost.
        reason: Why it is in its state.
    """

    index: int
    engine: Engine
    state: ReplicaState = ReplicaState.SERVING
    version: int = 0
    outstanding_requests: int = 0
    outstanding_tokens: int = 0
    reason: str = ""

    def acquire(self, cost: int) -> None:
        self.outstanding_requests += 1
        self.outstanding_tokens += cost

    def release(self, cost: int) -> None:
        self.outstanding_requests -= 1
        self.outstanding_tokens -= cost


class ReplicaSet:
    """All replicas of a service; used on the service's loop only."""

    def __init__(self, engines: list[Engine]) -> None:
        self.all = [Replica(index, engine) for index, engine in enumerate(engines)]
        self._watchers: set[Callable[[Replica], None]] = set()

    def set_state(self, replica: Replica, state: ReplicaState, reason: str) -> None:
        """Change a replica's state and tell all who watch."""
        if state is replica.state:
            return
        # Less capacity than was asked for is what a person must know; the rest is for those who look.
        level = logging.WARNING if state in (ReplicaState.DEAD, ReplicaState.STALE) else logging.INFO
        logger.log(level, "replica %d: %s -> %s (%s)", replica.index, replica.state.value, state.value, reason)
        replica.state = state
        replica.reason = reason
        for watcher in tuple(self._watchers):
            watcher(replica)

    def watch(self, watcher: Callable[[Replica], None]) -> None:
        """Call ``watcher`` with every replica whose state has changed, until :meth:`unwatch`."""
        self._watchers.add(watcher)

    def unwatch(self, watcher: Callable[[Replica], None]) -> None:
        self._watchers.remove(watcher)

    def serving(self) -> list[Replica]:
        """Replicas that may be given requests.

        Raises:
            NoReplicaServesError: There is none; says what became of them.
        """
        found = [replica for replica in self.all if replica.state is ReplicaState.SERVING]
        if not found:
            states = ", ".join(
                f"replica {replica.index} is {replica.state.value} ({replica.reason})" for replica in self.all
            )
            remedy = "complete a refit" if self.living() else "launch a new service"
            raise NoReplicaServesError(self.all[0].index, f"{states}; {remedy}")
        return found

    @property
    def version(self) -> int:
        """The newest version that all serving replicas have; when none serves, the newest that any replica has."""
        serving = [replica.version for replica in self.all if replica.state is ReplicaState.SERVING]
        return min(serving) if serving else max(replica.version for replica in self.all)

    def living(self) -> list[Replica]:
        """Replicas whose engine runs, whether or not they serve."""
        return [r for r in self.all if r.state in (ReplicaState.SERVING, ReplicaState.STALE)]


def loads(replicas: list[Replica]) -> NDArray[np.int64]:
    """Outstanding tokens of each replica, int64 [R]."""
    return np.array([replica.outstanding_tokens for replica in replicas], np.int64)


def _in_words(replica: Replica) -> str:
    why = f" ({replica.reason})" if replica.reason else ""
    return f"replica {replica.index} is {replica.state.value}{why}"

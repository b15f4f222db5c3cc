"""The replicas of a service and what the driver knows of each without asking it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl_vllm.errors import EngineDiedError
from rl_vllm.protocols import Engine
from rl_vllm.types import ReplicaState

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Replica:
    """One engine and its counters.

    Attributes:
        index: Position in the service.
        engine: How to reach it.
        state: Only ``SERVING`` replicas receive requests.
        version: The weight version it committed last.
        outstanding_requests: Requests sent and not yet answered.
        outstanding_tokens: Tokens those may still cost.
    """

    index: int
    engine: Engine
    state: ReplicaState = ReplicaState.SERVING
    version: int = 0
    outstanding_requests: int = 0
    outstanding_tokens: int = 0

    def set_state(self, state: ReplicaState, reason: str) -> None:
        if state is not self.state:
            logger.info("replica %d: %s -> %s (%s)", self.index, self.state.value, state.value, reason)
            self.state = state

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

    def serving(self) -> list[Replica]:
        """Replicas that may be given requests.

        Raises:
            EngineDiedError: There is none; says what became of them.
        """
        found = [replica for replica in self.all if replica.state is ReplicaState.SERVING]
        if not found:
            states = ", ".join(f"replica {replica.index} is {replica.state.value}" for replica in self.all)
            raise EngineDiedError(self.all[0].index, f"no replica serves: {states}")
        return found

    @property
    def version(self) -> int:
        """The newest version that all serving replicas have."""
        return min(replica.version for replica in self.serving())

    def living(self) -> list[Replica]:
        """Replicas whose engine runs, whether or not they serve."""
        return [r for r in self.all if r.state in (ReplicaState.SERVING, ReplicaState.STALE)]


def loads(replicas: list[Replica]) -> NDArray[np.int64]:
    """Outstanding tokens of each replica, int64 [R]."""
    return np.array([replica.outstanding_tokens for replica in replicas], np.int64)

"""The replicas of a service and what the driver knows of each without asking it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from rl_vllm.errors import EngineDiedError, NoReplicaServesError, ReplicaIndexError
from rl_vllm.protocols import Engine
from rl_vllm.types import EngineMetrics, ReplicaState

logger = logging.getLogger(__name__)

# Less capacity than was asked for is what a person must know; the rest is for those who look.
_LOUD: Final = frozenset({ReplicaState.DEAD, ReplicaState.STALE})


class Replica:
    """One engine, the counters of what it was given, and its place in the state machine.

    Args:
        index: Its number in the service, never given to another one.
        engine: How to reach it, or None while it starts for the first time.
        state: Where it begins.

    Attributes:
        state: Says whether it receives requests; changed by :meth:`ReplicaSet.set_state`.
        reason: Why it is in its state.
        version: The weight version it committed last.
        awaited: Its engine is on its way: what finds no other replica waits for it.
        outstanding_requests: Requests sent and not yet answered.
        outstanding_tokens: Tokens those may still cost.
        restarts: Times it was started again, whether or not it came up.
        metrics: What its engine last said of itself; None when unknown.
        idle: Set while nothing is outstanding.
    """

    __slots__ = (
        "_engine",
        "awaited",
        "idle",
        "index",
        "metrics",
        "outstanding_requests",
        "outstanding_tokens",
        "reason",
        "restarts",
        "state",
        "version",
    )

    def __init__(self, index: int, engine: Engine | None, state: ReplicaState = ReplicaState.HEALTHY) -> None:
        self.index = index
        self.state = state
        self.reason = ""
        self.version = 0
        self.awaited = False
        self.outstanding_requests = 0
        self.outstanding_tokens = 0
        self.restarts = 0
        self.metrics: EngineMetrics | None = None
        self.idle = asyncio.Event()
        self.idle.set()
        self._engine = engine

    @property
    def engine(self) -> Engine:
        """How to reach it: the newest engine it had, alive or not.

        Raises:
            EngineDiedError: It has not had one yet.
        """
        if self._engine is None:
            raise EngineDiedError(self.index, f"it is {self.state.value} and has no engine yet")
        return self._engine

    def acquire(self, cost: int, *, requests: int = 1) -> None:
        """Count requests as sent, that may cost ``cost`` tokens together."""
        self.outstanding_requests += requests
        self.outstanding_tokens += cost
        self.idle.clear()

    def release(self, cost: int, *, requests: int = 1) -> None:
        """Undo one :meth:`acquire`, or a part of it."""
        self.outstanding_requests -= requests
        self.outstanding_tokens -= cost
        if not self.outstanding_requests:
            self.idle.set()

    def __repr__(self) -> str:
        return f"Replica({_in_words(self)})"


class ReplicaSet:
    """All replicas of a service; used on the service's loop only.

    Args:
        engines: One for each of the first replicas, which serve from the start.
        min_serving: Calls raise when fewer replicas than this serve or are on their way.

    Attributes:
        all: Every replica by age; one that was removed is no longer listed.
        epoch: Grows whenever a replica joins or leaves those that serve.
    """

    def __init__(self, engines: list[Engine], *, min_serving: int = 1) -> None:
        self.all = [Replica(index, engine) for index, engine in enumerate(engines)]
        self.min_serving = min_serving
        self.epoch = 0
        self._next_index = len(engines)
        self._newest = 0
        self._watchers: dict[Callable[[Replica], None], None] = {}

    def set_state(self, replica: Replica, state: ReplicaState, reason: str) -> None:
        """Change a replica's state and tell all who watch; ``RETIRED`` is final and stays.

        For an engine that a call found dead use :meth:`died`, which knows whether that is news.
        """
        if state is replica.state or replica.state is ReplicaState.RETIRED:
            return
        given_up = state is ReplicaState.RETIRED and replica.state is ReplicaState.DEAD
        level = logging.WARNING if state in _LOUD or given_up else logging.INFO
        logger.log(level, "replica %d: %s -> %s (%s)", replica.index, replica.state.value, state.value, reason)
        self.epoch += replica.state.serves != state.serves
        replica.state = state
        replica.reason = reason
        if not state.is_up:
            replica.metrics = None
        self._tell(replica)

    def died(self, replica: Replica, engine: Engine, reason: str) -> None:
        """An engine was found dead: its replica is dead from now on, unless that is known or it has another by now."""
        if replica.state.is_up and replica.engine is engine:
            self.set_state(replica, ReplicaState.DEAD, reason)

    def renew(self, replica: Replica, engine: Engine) -> None:
        """Give a replica a new engine, which has the weights loaded at launch."""
        self._newest = max(self._newest, replica.version)
        replica._engine = engine
        replica.version = 0

    def enlist(self) -> Replica:
        """A further replica, ``STARTING``, with an index that none had before."""
        replica = Replica(self._next_index, None, ReplicaState.STARTING)
        self._next_index += 1
        self.all.append(replica)
        return replica

    def dismiss(self, replica: Replica) -> None:
        """List a retired replica no longer."""
        self._newest = max(self._newest, replica.version)
        self.all.remove(replica)
        self._tell(replica)

    def watch(self, watcher: Callable[[Replica], None]) -> None:
        """Call ``watcher`` with every replica whose state has changed, until :meth:`unwatch`."""
        self._watchers[watcher] = None

    def unwatch(self, watcher: Callable[[Replica], None]) -> None:
        """Call it no longer. Idempotent."""
        self._watchers.pop(watcher, None)

    def by_index(self, index: int) -> Replica:
        """The replica with this index.

        Raises:
            ReplicaIndexError: There is none; says which there are.
        """
        if not isinstance(index, bool):
            for replica in self.all:
                if replica.index == index:
                    return replica
        raise ReplicaIndexError(index, tuple(replica.index for replica in self.all))

    def serving(self) -> list[Replica]:
        """Replicas that may be given requests.

        Raises:
            NoReplicaServesError: There is none; says what became of them.
        """
        found = self.serving_now()
        if not found:
            raise self.too_few()
        return found

    def serving_now(self) -> list[Replica]:
        """Replicas that may be given requests; empty when there is none."""
        return [replica for replica in self.all if replica.state.serves]

    def too_few(self) -> NoReplicaServesError:
        """What to raise when replicas are missing: says what became of each, and what to do."""
        remedy = "complete a refit" if self.living() else "launch a new service"
        states = ", ".join(_in_words(replica) for replica in self.all)
        first = self.all[0].index if self.all else 0
        return NoReplicaServesError(first, f"{states}; {remedy}")

    @property
    def below_floor(self) -> bool:
        """Whether fewer replicas than ``min_serving`` serve or are on their way."""
        return sum(replica.state.serves or replica.awaited for replica in self.all) < self.min_serving

    @property
    def version(self) -> int:
        """The newest version that all serving replicas have; when none serves, the newest that any replica had."""
        serving = [replica.version for replica in self.all if replica.state.serves]
        return min(serving) if serving else max([self._newest, *(replica.version for replica in self.all)])

    def living(self) -> list[Replica]:
        """Replicas whose engine runs, whether or not they serve."""
        return [replica for replica in self.all if replica.state.is_up]

    def _tell(self, replica: Replica) -> None:
        for watcher in tuple(self._watchers):
            watcher(replica)


def _in_words(replica: Replica) -> str:
    why = f" ({replica.reason})" if replica.reason else ""
    return f"replica {replica.index} is {replica.state.value}{why}"

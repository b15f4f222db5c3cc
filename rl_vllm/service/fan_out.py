"""The same call on every replica: it succeeds on all, or says on which it failed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from rl_vllm.errors import ConfigError, DeadlineError, EngineDiedError, ReplicaCallError, UnsupportedByEngineError
from rl_vllm.protocols import Engine
from rl_vllm.service.replicas import Replica, ReplicaSet

T = TypeVar("T")


class FanOut:
    """Calls to many replicas at once; used on the service's loop only.

    Args:
        replicas: All replicas.
        quiet: Suspends a replica's heartbeat while a long call runs.
        limit_s: Limit for each replica's answer, in seconds; None leaves it to the caller.
        long_limit_s: The same for long calls.
    """

    def __init__(
        self,
        replicas: ReplicaSet,
        quiet: Callable[[Replica], AbstractContextManager[None]],
        *,
        limit_s: float | None = None,
        long_limit_s: float | None = None,
    ) -> None:
        self._replicas = replicas
        self._quiet = quiet
        self._limit_s = limit_s
        self._long_limit_s = long_limit_s

    def targets(self, only: int | None = None) -> list[Replica]:
        """The replicas that a call goes to: one, whose engine must run, or every one whose engine does.

        Raises:
            ReplicaIndexError: No replica has the index ``only``.
            EngineDiedError: Its engine does not run.
            NoReplicaServesError: No engine runs at all.
        """
        if only is None:
            # serving() says what became of each when there is none.
            return self._replicas.living() or self._replicas.serving()
        replica = self._replicas.by_index(only)
        if not replica.state.is_up:
            raise EngineDiedError(replica.index, f"it is {replica.state.value} ({replica.reason or 'no reason known'})")
        return [replica]

    async def __call__(
        self,
        call: str,
        work: Callable[[Engine], Awaitable[T]],
        *,
        only: int | None = None,
        long: bool = False,
        within_s: float | None = None,
    ) -> list[tuple[Replica, T]]:
        """Do ``work`` on every replica whose engine runs, or on one; all at the same time.

        Args:
            call: Named in errors.
            work: What to do with each engine.
            only: Index of the one replica, or None for all.
            long: The call may take longer than a heartbeat's patience.
            within_s: Limit for each answer, in seconds; None means the one for such calls.

        Raises:
            ReplicaCallError: It failed on some, or they did not answer in time; names each with its reason.
            DeadlineError: None answered in time.
            ConfigError: It failed on all, because of what was asked.
            UnsupportedByEngineError: It failed on all, because the engine cannot do it.
        """
        targets = self.targets(only)
        results = await self.gather(targets, work, long=long, within_s=within_s)
        self.raise_failures(call, targets, results)
        return [(replica, r) for replica, r in zip(targets, results, strict=True) if not isinstance(r, BaseException)]

    async def gather(
        self,
        targets: list[Replica],
        work: Callable[[Engine], Awaitable[T]],
        *,
        long: bool = False,
        within_s: float | None = None,
    ) -> list[T | BaseException]:
        """What each answered, or the error it ended in, in the order of ``targets``; who died is marked dead."""
        # A replica may have another engine by the time this one's answer comes.
        engines = [replica.engine for replica in targets]
        limit_s = within_s if within_s is not None else self._long_limit_s if long else self._limit_s

        async def one(replica: Replica, engine: Engine) -> T:
            with self._quiet(replica) if long else nullcontext():
                return await _in_time(work(engine), replica, limit_s)

        calls = (one(replica, engine) for replica, engine in zip(targets, engines, strict=True))
        results = await asyncio.gather(*calls, return_exceptions=True)
        for replica, engine, result in zip(targets, engines, results, strict=True):
            if isinstance(result, EngineDiedError):
                self._replicas.died(replica, engine, result.reason)
        return results

    @staticmethod
    def raise_failures(call: str, targets: list[Replica], results: list[T | BaseException]) -> None:
        """Raise unless every result is an answer; see :meth:`__call__`."""
        failed = [(replica, r) for replica, r in zip(targets, results, strict=True) if isinstance(r, BaseException)]
        if not failed:
            return
        first = failed[0][1]
        refused = [error for _, error in failed if isinstance(error, ConfigError | UnsupportedByEngineError)]
        if len(refused) == len(targets):
            raise first
        late = [error for _, error in failed if isinstance(error, DeadlineError)]
        if len(late) == len(targets):
            names = ", ".join(str(replica.index) for replica in targets)
            raise DeadlineError(f"replica {names} to answer {call}", late[0].timeout_s) from first
        each = tuple((replica.index, str(error) or type(error).__name__) for replica, error in failed)
        raise ReplicaCallError(call, each) from first


async def _in_time(answer: Awaitable[T], replica: Replica, limit_s: float | None) -> T:
    try:
        async with asyncio.timeout(limit_s) as limit:
            return await answer
    except TimeoutError:
        if limit_s is None or not limit.expired():
            # The engine's own.
            raise
        raise DeadlineError(f"replica {replica.index}", limit_s) from None

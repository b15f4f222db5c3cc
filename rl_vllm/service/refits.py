"""A refit as the service carries it out: the same call on every replica, and what a failure makes of each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from rl_vllm.errors import DeadlineError, EngineDiedError, RefitError
from rl_vllm.protocols import Engine
from rl_vllm.service.observe.counters import ServiceCounters
from rl_vllm.service.replicas import Replica, ReplicaSet
from rl_vllm.service.router import Router
from rl_vllm.types import CommitReport, InFlight, KVCache, ReplicaState, TensorSpec, WeightUpdate

T = TypeVar("T")


@dataclass(slots=True)
class _Staging:
    """The update that was staged last, and the engines that have it."""

    update: WeightUpdate
    timeout_s: float
    engines: list[Engine]

    def is_on(self, engine: Engine) -> bool:
        return any(each is engine for each in self.engines)


@dataclass(frozen=True, slots=True)
class _Committed:
    """The update that serving replicas have, and the limits its refit had."""

    update: WeightUpdate
    stage_timeout_s: float
    commit_timeout_s: float


class WeightsControl:
    """Weights of all replicas; used on the service's loop only.

    Args:
        replicas: Whom to refit.
        router: Told that cached prefixes are gone; None when there is none.
        counters: Where refits are counted; None when nobody asks.
        quiet: Suspends a replica's heartbeat while it loads; None when it has none.
    """

    def __init__(
        self,
        replicas: ReplicaSet,
        *,
        router: Router | None = None,
        counters: ServiceCounters | None = None,
        quiet: Callable[[Replica], AbstractContextManager[None]] | None = None,
    ) -> None:
        self._replicas = replicas
        self.router = router
        self._counters = counters if counters is not None else ServiceCounters()
        self._quiet = quiet if quiet is not None else lambda _replica: nullcontext()
        self._specs: tuple[TensorSpec, ...] | None = None
        self._staging: _Staging | None = None
        self._committed: _Committed | None = None
        self._num_committing = 0
        self._commit_ended = asyncio.Event()

    @property
    def committed(self) -> WeightUpdate | None:
        """The update that was committed last on any replica; None while all serve what was loaded at launch."""
        return None if self._committed is None else self._committed.update

    async def specs(self) -> tuple[TensorSpec, ...]:
        if self._specs is None:
            # A stale replica knows them as well; serving() says what is wrong when there is none of either.
            replica = (self._replicas.living() or self._replicas.serving())[0]
            self._specs = await replica.engine.weight_specs()
        return self._specs

    async def stage(self, update: WeightUpdate, timeout_s: float) -> None:
        """Stage everywhere or raise; no replica's weights have changed either way.

        A replica that turns out to be dead fails this update; the next one goes on without it.
        """
        targets = self._targets(update, "stage")

        async def one(replica: Replica, engine: Engine) -> None:
            await engine.stage_weights(update.addressed_to(replica.index), timeout_s=timeout_s)

        results = await self._on_all(targets, one, timeout_s)
        self._note_deaths(targets, results)
        self._raise_failures(update, "stage", targets, results)
        self._staging = _Staging(update, timeout_s, [engine for _, engine in targets])

    async def commit(
        self, update: WeightUpdate, *, in_flight: InFlight, kv: KVCache, timeout_s: float
    ) -> tuple[CommitReport, ...]:
        """Commit everywhere; a replica on which it failed is stale and serves nothing, the others serve the update.

        A stale replica's engine stays paused: whoever watches the replicas must take its unfinished requests elsewhere.
        A replica that came up since the update was staged stages it now.
        """
        targets = self._targets(update, "commit")

        async def one(replica: Replica, engine: Engine) -> CommitReport:
            await self._stage_late(replica, engine, update)
            return await engine.commit_weights(update.addressed_to(replica.index), in_flight=in_flight, kv=kv)

        self._num_committing += 1
        try:
            with ExitStack() as quiet:
                for replica, _ in targets:
                    quiet.enter_context(self._quiet(replica))
                results = await self._on_all(targets, one, timeout_s)
            self._settle(update, targets, results, timeout_s)
        except asyncio.CancelledError:
            # Whether an engine took it, or waits paused in the middle of it, is unknown.
            for replica, engine in targets:
                if replica.state.is_up and replica.engine is engine:
                    self._replicas.set_state(
                        replica, ReplicaState.STALE, f"commit of version {update.version} was interrupted"
                    )
            raise
        finally:
            self._num_committing -= 1
            self._commit_ended.set()
            self._commit_ended = asyncio.Event()
        reports = tuple(result for result in results if isinstance(result, CommitReport))
        if self.router is not None and any(report.prefix_cache_reset for report in reports):
            self.router.forget_prefixes()
        self._raise_failures(update, "commit", targets, results)
        self._counters.refits += 1
        return reports

    async def restore(self, replica: Replica) -> None:
        """Give a replica that is not serving yet the update that was committed last.

        Call it last before the replica serves: it returns in a moment in which the replica has the newest version and
        no commit is under way, and until the caller awaits anything else that stays so.

        Raises:
            RefitError: The replica cannot have it: the staged bytes are gone or cannot be read any more.
            EngineDiedError: The engine is dead.
        """
        while True:
            if self._num_committing:
                # The commit has its own deadline.
                await self._commit_ended.wait()
                continue
            committed = self._committed
            if committed is None or replica.version == committed.update.version:
                return
            await self._restore_one(replica, committed)

    async def _restore_one(self, replica: Replica, committed: _Committed) -> None:
        update, engine = committed.update, replica.engine
        addressed = update.addressed_to(replica.index)
        phase = "stage"
        if not update.is_kept:
            reason = f"transport {update.transport!r} keeps no version for a late replica: the next refit reaches it"
            raise RefitError(update.version, phase, (replica.index,), reason)
        try:
            async with asyncio.timeout(committed.stage_timeout_s):
                await engine.stage_weights(addressed, timeout_s=committed.stage_timeout_s)
            phase = "commit"
            async with asyncio.timeout(committed.commit_timeout_s):
                report = await engine.commit_weights(addressed, in_flight=InFlight.KEEP, kv=KVCache.RECOMPUTE)
            if report.version != update.version:
                raise RefitError(update.version, phase, (), f"it reports version {report.version}")
        except EngineDiedError:
            raise
        except Exception as error:
            reason = error.reason if isinstance(error, RefitError) else str(error) or type(error).__name__
            raise RefitError(update.version, phase, (replica.index,), reason) from error
        replica.version = update.version

    async def _stage_late(self, replica: Replica, engine: Engine, update: WeightUpdate) -> None:
        staging = self._staging
        if staging is not None and staging.update == update and not staging.is_on(engine):
            await engine.stage_weights(update.addressed_to(replica.index), timeout_s=staging.timeout_s)

    def _settle(
        self,
        update: WeightUpdate,
        targets: list[tuple[Replica, Engine]],
        results: list[CommitReport | BaseException],
        timeout_s: float,
    ) -> None:
        """Put every replica in the state that its result means."""
        if any(isinstance(result, CommitReport) for result in results):
            stage_s = timeout_s if self._staging is None else self._staging.timeout_s
            self._committed = _Committed(update, stage_s, timeout_s)
        self._note_deaths(targets, results)
        for (replica, engine), result in zip(targets, results, strict=True):
            if not replica.state.is_up or replica.engine is not engine:
                continue
            if not isinstance(result, CommitReport):
                self._replicas.set_state(replica, ReplicaState.STALE, f"commit of version {update.version} failed")
                continue
            replica.version = result.version
            if replica.state is not ReplicaState.DRAINING:
                self._replicas.set_state(replica, ReplicaState.HEALTHY, f"version {result.version} committed")

    def _note_deaths(self, targets: list[tuple[Replica, Engine]], results: list[T | BaseException]) -> None:
        for (replica, engine), result in zip(targets, results, strict=True):
            if isinstance(result, EngineDiedError):
                self._replicas.died(replica, engine, result.reason)

    def _targets(self, update: WeightUpdate, phase: str) -> list[tuple[Replica, Engine]]:
        """Replicas that are up, with the engine each has now: it may have another when a call returns."""
        replicas = self._replicas.living()
        if not replicas:
            indices = tuple(replica.index for replica in self._replicas.all)
            raise RefitError(update.version, phase, indices, "no replica is alive")
        return [(replica, replica.engine) for replica in replicas]

    @staticmethod
    async def _on_all(
        targets: list[tuple[Replica, Engine]],
        call: Callable[[Replica, Engine], Coroutine[Any, Any, T]],
        timeout_s: float,
    ) -> list[T | BaseException]:
        async def one(replica: Replica, engine: Engine) -> T:
            try:
                async with asyncio.timeout(timeout_s):
                    return await call(replica, engine)
            except TimeoutError as error:
                if isinstance(error, DeadlineError):
                    raise
                raise DeadlineError(f"replica {replica.index}", timeout_s) from error

        return await asyncio.gather(*(one(*target) for target in targets), return_exceptions=True)

    def _raise_failures(
        self,
        update: WeightUpdate,
        phase: str,
        targets: list[tuple[Replica, Engine]],
        results: list[T | BaseException],
    ) -> None:
        failed = [(r.index, e) for (r, _), e in zip(targets, results, strict=True) if isinstance(e, BaseException)]
        if not failed:
            return
        self._counters.refits_failed += 1
        # A death explains what the others say: they waited for the same bytes as the dead one.
        index, first = next((one for one in failed if isinstance(one[1], EngineDiedError)), failed[0])
        reason = first.reason if isinstance(first, RefitError) else str(first)
        raise RefitError(update.version, phase, tuple(i for i, _ in failed), f"replica {index}: {reason}") from first

"""Sends batches to replicas and gathers their answers, whatever becomes of a replica in between."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Generic

import numpy as np

from rl_vllm.config import ServiceConfig
from rl_vllm.errors import EngineDiedError
from rl_vllm.service.admission import Admission
from rl_vllm.service.observe.counters import ServiceCounters
from rl_vllm.service.replicas import Replica, ReplicaSet
from rl_vllm.service.router import Router, Snapshot
from rl_vllm.service.table import Chunk, Embed, Generate, Int64, Pieces, Shipment, Work
from rl_vllm.types import (
    CompletionBatch,
    EmbeddingBatch,
    FinishReason,
    PoolingConfig,
    PromptBatch,
    ReplicaState,
    SamplingConfig,
)

logger = logging.getLogger(__name__)

_AnyBatch = CompletionBatch | EmbeddingBatch


class Dispatcher:
    """One code path for all that is sent to engines; used on the service's loop only.

    Every request is answered once. A replica that dies, hangs or goes stale gives its unfinished requests to the
    others; when none serves but one is on its way, they wait for it. Closing an iterator aborts what is pending.

    Args:
        replicas: Where to send.
        router: Which of them answers which prompt.
        counters: What has been done.
        config: The service's settings: the bound on outstanding prompts, and the limit for giving one up.
    """

    def __init__(self, replicas: ReplicaSet, router: Router, counters: ServiceCounters, config: ServiceConfig) -> None:
        self.replicas = replicas
        self.router = router
        self.counters = counters
        self.admission = Admission(config.max_outstanding_requests, config.on_overload, counters)
        self.give_up_timeout_s = config.rpc_timeout_s
        self._next_number = 0
        self._calls: weakref.WeakKeyDictionary[object, _Call[CompletionBatch] | _Call[EmbeddingBatch]]
        self._calls = weakref.WeakKeyDictionary()
        self._ending: set[asyncio.Task[None]] = set()
        replicas.watch(self._replica_changed)

    def stream(
        self,
        prompts: PromptBatch,
        rows: Sequence[int],
        sampling: Sequence[SamplingConfig],
        *,
        only: int | None = None,
    ) -> AsyncGenerator[CompletionBatch, None]:
        """Generate for ``rows`` of a batch, yielding columns as requests finish, ``numbers_N`` being rows.

        Args:
            prompts: The batch.
            rows: Rows to answer.
            sampling: One setting per entry of ``rows``.
            only: Index of the one replica that may answer; None means any.

        Raises:
            NoReplicaServesError: Fewer replicas than the floor are left to send them to, or on their way.
            EngineDiedError: The replica ``only`` does not serve, or left before all was answered.
            ReplicaIndexError: There is no replica ``only``.
            ServiceOverloadedError: The bound on outstanding prompts would be passed, and the service refuses more.
        """
        return self._start(Generate(prompts, rows, sampling), only)

    def stream_pieces(
        self,
        prompts: PromptBatch,
        rows: Sequence[int],
        sampling: Sequence[SamplingConfig],
        *,
        only: int | None = None,
    ) -> AsyncGenerator[CompletionBatch, None]:
        """As :meth:`stream`, but yielding every sample's new tokens as they are made.

        A chunk holds at most one piece of a sample, whose ``finish_N`` is ``UNFINISHED`` until its last. What has been
        delivered of a sample is not delivered again when its replica leaves: the sample is continued elsewhere.
        """
        return self._start(Pieces(prompts, rows, sampling), only)

    def embed(
        self, prompts: PromptBatch, rows: Sequence[int], pooling: PoolingConfig, *, only: int | None = None
    ) -> AsyncGenerator[EmbeddingBatch, None]:
        """As :meth:`stream`, for one pooled vector per prompt."""
        return self._start(Embed(prompts, rows, pooling), only)

    async def abort(self, stream: AsyncGenerator[_AnyBatch, None]) -> None:
        """Stop all work for an iterator of this dispatcher, which then yields what its engines had made, and ends.

        The samples end with the reason ``ABORT``. An iterator that has ended, or has not begun, is left alone.
        """
        call = self._calls.get(stream)
        if call is not None:
            await call.abort()

    def take_numbers(self, count: int) -> int:
        """The first of ``count`` numbers in a row that no request had before."""
        first = self._next_number
        self._next_number += count
        return first

    def let_end(self, task: asyncio.Task[None]) -> None:
        """Keep a stream that has answered everything until its engine has closed it."""
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _start(self, work: Work[Chunk], only: int | None) -> AsyncGenerator[Chunk, None]:
        call = _Call(self, work, None if only is None else self.replicas.by_index(only))
        answers = call.answers()
        self._calls[answers] = call
        return answers

    def _replica_changed(self, replica: Replica) -> None:
        if not replica.state.serves:
            self.router.forget(replica.index)


class _Call(Generic[Chunk]):
    """One call on its way: its units are unsent, homeless (without a replica), in a shipment, or answered."""

    def __init__(self, desk: Dispatcher, work: Work[Chunk], pinned: Replica | None) -> None:
        self._desk = desk
        self._replicas = desk.replicas
        self._work: Work[Chunk] = work
        self._pinned = pinned
        self._num_sent = 0
        self._num_places = 0
        self._num_done = 0
        self._unanswered = len(work.rows_U)
        self._homeless: list[Int64] = []
        self._shipments: dict[asyncio.Task[None], Shipment] = {}
        self._feeder: asyncio.Task[None] | None = None
        self._is_aborted = False
        self._is_closed = False
        self._move_is_due = False
        # None: everything has been answered.
        self._events: asyncio.Queue[Chunk | BaseException | None] = asyncio.Queue()

    async def answers(self) -> AsyncGenerator[Chunk, None]:
        if not self._unanswered:
            return
        self._replicas.watch(self._replica_changed)
        try:
            self._send(self._desk.admission.try_acquire(self._work.num_slots))
            if self._num_sent < self._work.num_slots:
                self._feeder = asyncio.create_task(self._feed(), name="admission")
                self._feeder.add_done_callback(self._report)
            while (event := await self._events.get()) is not None:
                if isinstance(event, BaseException):
                    raise event
                yield event
        finally:
            await self._close()

    async def abort(self) -> None:
        """End everything that is not answered, here and in the engines."""
        if self._is_aborted or self._is_closed:
            return
        self._is_aborted = True
        if self._feeder is not None:
            self._feeder.cancel()
        unsent = np.arange(self._work.first_unit_S1[self._num_sent], len(self._work.rows_U))
        self._desk.counters.requests += self._work.num_slots - self._num_sent
        self._num_sent = self._work.num_slots
        self._homeless.append(unsent)
        self._move()
        async with asyncio.timeout(self._desk.give_up_timeout_s):
            results = await asyncio.gather(
                *(
                    shipment.engine.abort(shipment.numbers_B[shipment.left].tolist())
                    for shipment in self._shipments.values()
                    if len(shipment.left)
                ),
                return_exceptions=True,
            )
        # What a dead engine had, its replica's death moves, and moving ends it.
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, EngineDiedError):
                raise result

    async def _feed(self) -> None:
        """Send the rest in portions, as places become free."""
        while self._num_sent < self._work.num_slots:
            self._send(await self._desk.admission.acquire(self._work.num_slots - self._num_sent))

    def _send(self, count: int) -> None:
        """Send the next prompts, for which there are places."""
        first_unit = self._work.first_unit_S1[self._num_sent]
        self._num_sent += count
        self._num_places += count
        self._desk.counters.requests += count
        self._homeless.append(np.arange(first_unit, self._work.first_unit_S1[self._num_sent]))
        self._move()

    def _move_now(self) -> None:
        try:
            self._move()
        except BaseException as error:
            # Nobody awaits a callback: without this the caller would wait for ever.
            self._events.put_nowait(error)
            raise

    def _move(self) -> None:
        """Give homeless units to replicas that serve; leave them when there is none, but one is on its way."""
        self._move_is_due = False
        if not self._homeless or self._is_closed:
            return
        units = np.concatenate(self._homeless)
        complete = np.ones(len(units), bool) if self._is_aborted else self._work.complete(units)
        if complete.any():
            finish = FinishReason.ABORT if self._is_aborted else FinishReason.LENGTH
            self._conclude(units[complete], self._work.end(units[complete], finish))
            units = units[~complete]
        self._homeless = [units] if len(units) else []
        if not self._homeless:
            return
        try:
            candidates = self._candidates()
        except EngineDiedError as error:
            self._events.put_nowait(error)
            return
        if candidates:
            self._homeless = []
            self._ship(units, candidates)

    def _candidates(self) -> list[Replica]:
        if self._pinned is not None:
            if not self._pinned.state.serves:
                raise EngineDiedError(self._pinned.index, f"it is {self._pinned.state.value} ({self._pinned.reason})")
            return [self._pinned]
        if self._replicas.below_floor:
            raise self._replicas.too_few()
        return self._replicas.serving_now()

    def _ship(self, units: Int64, candidates: list[Replica]) -> None:
        """Assign units in one pass and start one stream per chosen replica."""
        costs = self._work.costs_U[units]
        if self._pinned is None:
            rows = self._work.rows_U[units]
            chosen = self._desk.router.assign(self._work.prompts, rows, costs, _snapshot(candidates))
        else:
            chosen = np.zeros(len(units), np.int64)
        first = self._desk.take_numbers(len(units))
        for position in np.unique(chosen).tolist():
            mine = np.flatnonzero(chosen == position)
            replica = candidates[position]
            pending = np.ones(len(mine), bool)
            shipment = Shipment(replica, replica.engine, first + mine, units[mine], pending, costs[mine])
            shipment.acquire()
            task = asyncio.create_task(self._follow(shipment), name=f"replica-{replica.index}-stream")
            self._shipments[task] = shipment
            task.add_done_callback(self._report)

    async def _follow(self, shipment: Shipment) -> None:
        """Read one stream to its end."""
        numbers, units = shipment.numbers_B, shipment.units_B
        try:
            async with aclosing(self._work.open(shipment.engine, numbers, units)) as chunks:
                async for chunk in chunks:
                    self._accept(shipment, chunk)
        except EngineDiedError as error:
            # Its replica leaves, and what it holds of every call is taken back; or that has been done already.
            self._replicas.died(shipment.replica, shipment.engine, error.reason)
            return
        # What the engine did not answer would be waited for in vain.
        lost = shipment.settle(shipment.left)
        if len(lost):
            self._conclude(lost, self._work.fail(lost, "the engine ended without an answer"), failed=lost)

    def _accept(self, shipment: Shipment, chunk: Chunk) -> None:
        accepted = self._work.accept(shipment, chunk)
        if len(accepted.chunk) or len(accepted.ended):
            failed = shipment.units_B[accepted.failed]
            self._conclude(shipment.settle(accepted.ended), accepted.chunk, failed=failed)

    def _conclude(self, units: Int64, chunk: Chunk, *, failed: Int64 | None = None) -> None:
        """Hand a chunk to the caller, with which these units have their answer."""
        desk = self._desk
        completed, num_failed = self._work.close(units, units[:0] if failed is None else failed)
        desk.counters.completed += completed
        desk.counters.failed += num_failed
        if isinstance(chunk, CompletionBatch):
            desk.counters.tokens += len(chunk.tokens_T)
        # An aborted call also ends prompts that never had a place.
        freed = min(completed + num_failed, self._num_places)
        self._num_places -= freed
        desk.admission.release(freed)
        self._num_done += completed + num_failed
        self._unanswered -= len(units)
        if len(chunk) or chunk.failures:
            self._events.put_nowait(chunk)
        if not self._unanswered:
            self._events.put_nowait(None)

    def _recall(self, shipment: Shipment) -> None:
        """Take back what a replica that has left did not answer, and send it again soon."""
        units = shipment.settle(shipment.left)
        if len(units):
            self._homeless.append(units)
            self._desk.counters.rerouted += len(np.unique(self._work.slot_U[units]))
        self._move_soon()

    def _move_soon(self) -> None:
        # Not at once: when several replicas leave together, all are marked before requests move.
        if self._homeless and not self._move_is_due:
            self._move_is_due = True
            asyncio.get_running_loop().call_soon(self._move_now)

    def _replica_changed(self, replica: Replica) -> None:
        if not replica.state.serves and replica.state is not ReplicaState.DRAINING:
            for task, shipment in self._shipments.items():
                if shipment.replica is replica:
                    task.cancel()
                    self._recall(shipment)
        self._move_soon()

    def _report(self, task: asyncio.Task[None]) -> None:
        """Forget a task that has ended; what it ran into, the caller must know."""
        shipment = self._shipments.pop(task, None)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            if shipment is not None:
                shipment.settle(shipment.left)
            self._events.put_nowait(error)

    async def _close(self) -> None:
        """Abort what is pending and give everything back."""
        self._is_closed = True
        self._replicas.unwatch(self._replica_changed)
        self._desk.counters.cancelled += self._num_sent - self._num_done
        self._desk.admission.release(self._num_places)
        pending = [] if self._feeder is None or self._feeder.done() else [self._feeder]
        for task, shipment in self._shipments.items():
            if len(shipment.settle(shipment.left)):
                pending.append(task)
            elif not task.done():
                self._desk.let_end(task)
        for task in pending:
            task.cancel()
        if pending:
            _, stuck = await asyncio.wait(pending, timeout=self._desk.give_up_timeout_s)
            if stuck:
                logger.warning("%d streams did not end within %.0f s", len(stuck), self._desk.give_up_timeout_s)


def _snapshot(replicas: list[Replica]) -> Snapshot:
    usage = [np.nan if replica.metrics is None else replica.metrics.kv_cache_usage for replica in replicas]
    return Snapshot(
        indices_R=np.array([replica.index for replica in replicas], np.int64),
        requests_R=np.array([replica.outstanding_requests for replica in replicas], np.int64),
        tokens_R=np.array([replica.outstanding_tokens for replica in replicas], np.int64),
        kv_usage_R=np.array(usage, np.float64),
    )

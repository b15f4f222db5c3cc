"""The request table: every request stands in it until its answer is accepted, exactly once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np

from rl_vllm.errors import EngineDiedError
from rl_vllm.service.replicas import Replica, ReplicaSet, loads
from rl_vllm.service.routing import assign_least_outstanding
from rl_vllm.types import CompletionBatch, PromptBatch, ReplicaState, RequestBatch, RequestFailure, SamplingConfig


@dataclass(frozen=True, slots=True)
class _Entry:
    """One unanswered request."""

    row: int
    sampling: SamplingConfig
    cost: int
    replica: Replica


@dataclass(frozen=True, slots=True)
class _ReplicaLeft:
    """Posted when a replica no longer serves: it died, or a refit failed on it and left its engine paused."""

    replica: Replica


@dataclass(frozen=True, slots=True)
class _StreamFailed:
    """Posted when a stream ended in an error that is no replica's death."""

    error: BaseException


_Event = CompletionBatch | _ReplicaLeft | _StreamFailed


class Dispatcher:
    """Sends batches to replicas and gathers their answers; used on the service's loop only."""

    def __init__(self, replicas: ReplicaSet) -> None:
        self._replicas = replicas
        self._numbers = itertools.count()
        self._batches = itertools.count()

    async def stream(
        self, prompts: PromptBatch, rows: Sequence[int], sampling: Sequence[SamplingConfig]
    ) -> AsyncGenerator[CompletionBatch, None]:
        """Generate for ``rows`` of a batch, yielding columns as requests finish, ``numbers_N`` being rows.

        A replica that dies or goes stale gives its unfinished requests to the others. Closing the iterator aborts what
        is pending.

        Args:
            prompts: The batch.
            rows: Rows to answer.
            sampling: One setting per entry of ``rows``.

        Raises:
            NoReplicaServesError: No replica is left to send them to.
        """
        batch = _Batch(self._replicas, prompts, self._numbers, first=next(self._batches))
        try:
            batch.submit(rows, sampling)
            async for chunk in batch.answers():
                yield chunk
        finally:
            await batch.close()


class _Batch:
    """One batch on its way.

    Args:
        replicas: Where to send it.
        prompts: The batch.
        numbers: Gives every request its number, and a new one when it is sent again: what its first replica may still
            say of it is then no answer any more.
        first: Replica to try first among equally loaded ones.
    """

    def __init__(self, replicas: ReplicaSet, prompts: PromptBatch, numbers: Iterator[int], *, first: int) -> None:
        self._replicas = replicas
        self._prompts = prompts
        self._numbers = numbers
        self._first = first
        self._table: dict[int, _Entry] = {}
        self._events: asyncio.Queue[_Event] = asyncio.Queue()
        self._streams: dict[asyncio.Task[None], Replica] = {}
        replicas.watch(self._replica_changed)

    def submit(self, rows: Sequence[int], sampling: Sequence[SamplingConfig]) -> None:
        """Assign requests in one pass and start one stream per chosen replica."""
        serving = self._replicas.serving()
        numbers = list(itertools.islice(self._numbers, len(rows)))
        costs = [_cost(len(self._prompts.row(row)), setting) for row, setting in zip(rows, sampling, strict=True)]
        chosen = assign_least_outstanding(np.array(costs, np.int64), loads(serving), first=self._first)
        for position, replica in enumerate(serving):
            mine = np.flatnonzero(chosen == position).tolist()
            if not mine:
                continue
            for i in mine:
                replica.acquire(costs[i])
                self._table[numbers[i]] = _Entry(rows[i], sampling[i], costs[i], replica)
            request = RequestBatch(
                numbers_B=np.array([numbers[i] for i in mine], np.int64),
                prompts=PromptBatch.from_rows([self._prompts.row(rows[i]) for i in mine]),
                sampling_B=tuple(sampling[i] for i in mine),
            )
            task = asyncio.create_task(self._follow(replica, request), name=f"replica-{replica.index}-stream")
            self._streams[task] = replica
            task.add_done_callback(self._ended)

    async def answers(self) -> AsyncGenerator[CompletionBatch, None]:
        while self._table:
            event = await self._events.get()
            if isinstance(event, _StreamFailed):
                raise event.error
            if isinstance(event, _ReplicaLeft):
                self._reroute(event.replica)
                continue
            accepted = self._accept(event)
            if len(accepted) or accepted.failures:
                yield accepted

    async def close(self) -> None:
        """Abort what is pending and give the counters back."""
        self._replicas.unwatch(self._replica_changed)
        tasks = list(self._streams)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for number in list(self._table):
            self._remove(number)

    async def _follow(self, replica: Replica, request: RequestBatch) -> None:
        try:
            async with aclosing(replica.engine.stream(request)) as chunks:
                async for chunk in chunks:
                    self._events.put_nowait(chunk)
        except EngineDiedError as error:
            self._replicas.set_state(replica, ReplicaState.DEAD, str(error))
            return
        # What the engine did not answer would be waited for in vain; answered numbers are no longer in the table.
        lost = tuple(
            RequestFailure(number, "the engine ended without an answer") for number in request.numbers_B.tolist()
        )
        self._events.put_nowait(replace(CompletionBatch.empty(), failures=lost))

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._streams[task]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._events.put_nowait(_StreamFailed(error))

    def _replica_changed(self, replica: Replica) -> None:
        # Posted, not done at once: when several replicas leave together, all are marked before requests move.
        if replica.state is not ReplicaState.SERVING:
            self._events.put_nowait(_ReplicaLeft(replica))

    def _accept(self, chunk: CompletionBatch) -> CompletionBatch:
        """Keep the answers still waited for, and turn request numbers into rows."""
        wanted = np.array([number in self._table for number in chunk.numbers_N.tolist()], bool)
        if not wanted.all():
            chunk = chunk.take(np.flatnonzero(wanted))
        numbers = chunk.numbers_N.tolist()
        rows = np.array([self._table[number].row for number in numbers], np.int64)
        failures = tuple(
            RequestFailure(self._table[failure.number].row, failure.reason)
            for failure in chunk.failures
            if failure.number in self._table
        )
        for number in {*numbers, *(failure.number for failure in chunk.failures)}:
            if number in self._table:
                self._remove(number)
        return replace(chunk, numbers_N=rows, failures=failures)

    def _reroute(self, left: Replica) -> None:
        """Send the unfinished requests of a replica again, to those that serve, and close its streams."""
        for task, replica in self._streams.items():
            if replica is left:
                task.cancel()
        numbers = [number for number, entry in self._table.items() if entry.replica is left]
        entries = [self._remove(number) for number in numbers]
        if entries:
            self.submit([entry.row for entry in entries], [entry.sampling for entry in entries])

    def _remove(self, number: int) -> _Entry:
        entry = self._table.pop(number)
        entry.replica.release(entry.cost)
        return entry


def _cost(prompt_length: int, sampling: SamplingConfig) -> int:
    """Tokens a request may cost: its prompt once, and the longest response of every sample."""
    return prompt_length + sampling.n * (sampling.max_tokens or 0)

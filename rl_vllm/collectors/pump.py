"""Keeps a number of groups in flight, on one event loop, until the prompts are exhausted."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable

from rl_vllm.collectors.config import CollectorConfig
from rl_vllm.collectors.delivery import EQUAL_REWARDS
from rl_vllm.collectors.groups import Group, GroupFailedError, GroupRunner
from rl_vllm.collectors.ledger import Draw, Ledger
from rl_vllm.collectors.stats import CollectorStats
from rl_vllm.errors import OverSamplingError

logger = logging.getLogger(__name__)

# Prompts are not burned while everything fails: after k failures in a row the next draw waits 2**k of these.
_FIRST_WAIT_S = 0.05
_LONGEST_WAIT_S = 5.0


class Pump:
    """Draws prompts and runs their groups; whoever delivers them says when a slot is free again.

    Attributes:
        changed: Guards what is below, and is notified when it changes.
        ready: Groups that are finished and not delivered, oldest first.
        error: What ended the pump before its time, or None.
        exhausted: Nothing is in flight and there are no more prompts.
        last_failure: The newest failed group's words, or None.
        last_progress: ``time.monotonic()`` of the newest group that was finished and accepted.
    """

    def __init__(
        self,
        config: CollectorConfig,
        ledger: Ledger,
        runner: GroupRunner,
        accepts: Callable[[Group], bool],
        stats: CollectorStats,
    ) -> None:
        self.changed = threading.Condition()
        self.ready: deque[Group] = deque()
        self.error: BaseException | None = None
        self.exhausted = False
        self.last_failure: str | None = None
        self.last_progress = time.monotonic()
        self._config = config
        self._ledger = ledger
        self._runner = runner
        self._accepts = accepts
        self._stats = stats
        self._slots = asyncio.Semaphore(config.in_flight)
        self._refused: Counter[str] = Counter()
        self._failures_in_a_row = 0
        self._num_running = 0
        self._task: asyncio.Task[None] | None = None

    def describe(self) -> str:
        """What is in flight, for an error."""
        return f"{self._num_running} groups in flight of {self._config.group_size} rollouts each"

    def stop(self) -> None:
        """Abort what is in flight; for the loop's own thread."""
        if self._task is not None:
            self._task.cancel()

    async def run(self) -> None:
        """Run until the prompts are exhausted or something fatal happens; cancelling it aborts what is in flight."""
        self._task = asyncio.current_task()
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    await self._slots.acquire()
                    if self._failures_in_a_row:
                        wait_s = _FIRST_WAIT_S * 2 ** min(self._failures_in_a_row - 1, 10)
                        await asyncio.sleep(min(wait_s, _LONGEST_WAIT_S))
                    draw = await asyncio.to_thread(self._ledger.draw)
                    if draw is None:
                        break
                    self._stats.groups_begun += 1
                    self._num_running += 1
                    tasks.create_task(self._group(draw), name=f"group-{draw.position}")
        except BaseExceptionGroup as errors:
            self._end(errors.exceptions[0])
        except asyncio.CancelledError:
            self._end(None)
            raise
        else:
            self._end(None)

    async def free(self, count: int) -> None:
        """Let ``count`` more groups begin."""
        for _ in range(count):
            self._slots.release()

    async def refuse(self, position: int, reason: str) -> None:
        """A finished group is not delivered: another one takes its place, unless too many were refused."""
        self._ledger.settle(position)
        self._refused[reason] += 1
        await self.free(1)
        if self._refused.total() > (self._config.max_oversampling - 1) * self._config.groups_per_batch:
            cap = int(self._config.max_oversampling * self._config.groups_per_batch)
            accepted = min(len(self.ready), self._config.groups_per_batch)
            reasons = tuple(self._refused.most_common())
            # Who goes on after the error begins another batch.
            self._refused.clear()
            raise OverSamplingError(cap, accepted, self._config.groups_per_batch, reasons)

    async def batch_is_full(self) -> None:
        """Count refusals anew."""
        self._refused.clear()

    async def _group(self, draw: Draw) -> None:
        try:
            group = await self._runner.run(draw)
        except GroupFailedError as error:
            self._stats.groups_failed += 1
            self._failures_in_a_row += 1
            self.last_failure = str(error)
            logger.warning("a group is dropped: %s", error)
            self._ledger.settle(draw.position)
            await self.free(1)
            return
        finally:
            self._num_running -= 1
        self._failures_in_a_row = 0
        if not self._accepts(group):
            self._stats.groups_rejected += 1
            await self.refuse(draw.position, EQUAL_REWARDS)
            return
        with self.changed:
            self.ready.append(group)
            self.last_progress = time.monotonic()
            self.changed.notify_all()

    def _end(self, error: BaseException | None) -> None:
        with self.changed:
            # Who delivers the groups may have failed before.
            if self.error is None:
                self.error = error
            self.exhausted = self.error is None
            self.changed.notify_all()

"""Back-pressure: how many prompts all callers together may have outstanding."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from rl_vllm.errors import ServiceOverloadedError
from rl_vllm.service.observe.counters import ServiceCounters
from rl_vllm.types import Overload

# A caller that waits is given at least this part of the bound, or all it wants: portions of one prompt each would cost
# a call to a replica each.
_PORTIONS = 16


@dataclass(slots=True, eq=False)
class _Waiter:
    """Someone who waits for places."""

    wanted: int
    granted: asyncio.Future[int]


class Admission:
    """Hands out places to prompts, first come, first served; used on the service's loop only.

    Args:
        limit: Places there are; None means any number.
        policy: What happens when they do not suffice.
        counters: Where refused prompts are counted.

    Attributes:
        outstanding: Places that are taken.
    """

    def __init__(self, limit: int | None, policy: Overload, counters: ServiceCounters) -> None:
        self.outstanding = 0
        self._limit = limit
        self._policy = policy
        self._counters = counters
        self._portion = 1 if limit is None else max(1, limit // _PORTIONS)
        self._waiters: deque[_Waiter] = deque()

    def try_acquire(self, wanted: int) -> int:
        """Take as many of ``wanted`` places as can be had at once: none while others wait.

        Raises:
            ServiceOverloadedError: They are not all to be had, and the policy is to refuse; none has been taken.
        """
        free = wanted if self._limit is None else self._limit - self.outstanding
        if wanted > free and self._policy is Overload.RAISE:
            assert self._limit is not None, "without a limit there is room for all"
            self._counters.refused += wanted
            raise ServiceOverloadedError(self.outstanding, self._limit, wanted)
        granted = 0 if self._waiters else min(wanted, free)
        self.outstanding += granted
        return granted

    async def acquire(self, wanted: int) -> int:
        """Wait behind those who wait already for one or more places, at most ``wanted``; how many they are.

        A caller that wants more comes again, behind the others. When cancelled, nothing has been taken.
        """
        waiter = _Waiter(wanted, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self._grant()
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            elif not waiter.granted.cancelled():
                # Granted in the moment of the cancellation.
                self.outstanding -= waiter.granted.result()
            self._grant()
            raise

    def release(self, count: int) -> None:
        """Give places back."""
        self.outstanding -= count
        if self._waiters:
            self._grant()

    def _grant(self) -> None:
        while self._waiters:
            first = self._waiters[0]
            free = first.wanted if self._limit is None else self._limit - self.outstanding
            if free < min(first.wanted, self._portion):
                return
            self._waiters.popleft()
            if first.granted.cancelled():
                continue
            granted = min(first.wanted, free)
            self.outstanding += granted
            first.granted.set_result(granted)

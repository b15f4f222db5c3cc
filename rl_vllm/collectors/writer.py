"""Finished groups into a replay buffer, as soon as they are finished."""

from __future__ import annotations

import asyncio

from torchrl.data import ReplayBuffer

from rl_vllm.collectors.delivery import Delivery, Parcel, Refusal
from rl_vllm.collectors.ledger import Ledger
from rl_vllm.collectors.pump import Pump

_POLL_S = 0.02


class BufferWriter:
    """Takes groups from a pump and writes them, one after the other, in a thread: buffers block.

    Args:
        buffer: Where they go.
        pump: Where they come from.
        delivery: Makes rows of them.
        ledger: Where a written prompt is settled.
        frees_slots: A written group makes room for another at once; otherwise whoever counts ``num_waiting`` down does.
        total: Write this many and stop; None means all.

    Attributes:
        num_waiting: Groups written since they were last counted down; guarded by ``pump.changed``.
        frees_slots: As given.
        is_done: Nothing will be written any more.
    """

    def __init__(
        self,
        buffer: ReplayBuffer,
        pump: Pump,
        delivery: Delivery,
        ledger: Ledger,
        *,
        frees_slots: bool,
        total: int | None,
    ) -> None:
        self.num_waiting = 0
        self.is_done = False
        self._buffer = buffer
        self._pump = pump
        self._delivery = delivery
        self._ledger = ledger
        self.frees_slots = frees_slots
        self._left = total

    async def run(self) -> None:
        """Write until the pump ends or the total is reached; what fails ends the pump with its error."""
        (failure,) = await asyncio.gather(self._write_all(), return_exceptions=True)
        with self._pump.changed:
            self.is_done = True
            if isinstance(failure, Exception):
                self._pump.error = failure
            self._pump.changed.notify_all()
        # Nobody would take what it still makes.
        self._pump.stop()

    def _store(self, parcel: Parcel, position: int) -> None:
        """Both in one thread: no cancellation comes between a group in the buffer and its prompt being done with."""
        self._buffer.extend(parcel.rows)
        with self._pump.changed:
            self._ledger.settle(position)
            self.num_waiting += 1
            self._pump.changed.notify_all()

    async def _write_all(self) -> None:
        while self._left is None or self._left > 0:
            with self._pump.changed:
                group = self._pump.ready.popleft() if self._pump.ready else None
                ended = self._pump.exhausted or self._pump.error is not None
            if group is None:
                if ended:
                    return
                await asyncio.sleep(_POLL_S)
                continue
            outcome = await asyncio.to_thread(self._delivery.parcel, group)
            self._delivery.count(outcome)
            if isinstance(outcome, Refusal):
                await self._pump.refuse(group.draw.position, outcome.reason)
                continue
            await asyncio.to_thread(self._store, outcome, group.draw.position)
            if self._left is not None:
                self._left -= 1
            if self.frees_slots:
                await self._pump.free(1)

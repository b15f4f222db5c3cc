"""The trainer's side of a refit that its workers attend: the store they meet in, who has come, who gave up.

See :mod:`rl_vllm.protocols.wire` for the keys.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import NoReturn

from rl_vllm.errors import RefitError
from rl_vllm.protocols import wire
from rl_vllm.protocols.address import routable_address
from rl_vllm.types import TensorSpec, WeightReceiver, WeightUpdate

# The trainer's own connection to its own store.
STORE_TIMEOUT_S = 30.0


def require_both(
    version: int, specs: tuple[TensorSpec, ...], receivers: tuple[WeightReceiver, ...], *, doing: str
) -> None:
    """Refuse, before anything is prepared, a version without weights or without a replica to receive them."""
    if not specs or not receivers:
        reason = "the source has no weights" if not specs else "no replica receives"
        raise RefitError(version, "stage", (), f"{reason}: there is nothing to {doing}")


class Rendezvous:
    """The trainer's store, opened once, and the refit that is announced in it.

    Args:
        transport: Whose updates these are.
        address: Where workers reach this process; None means the address that its packets leave from.
    """

    def __init__(self, transport: str, address: str | None) -> None:
        self._transport = transport
        self._address = address
        self._store: wire.Store | None = None
        self._host = ""
        self.meeting: wire.Meeting | None = None

    def invite(
        self,
        version: int,
        specs: tuple[TensorSpec, ...],
        receivers: tuple[WeightReceiver, ...],
        *,
        backend: str,
        bucket_bytes: int,
        hold: wire.Hold,
        timeout_s: float,
        checksum: bool,
    ) -> WeightUpdate:
        """Lay out the specs under a new name, in place of what was announced before.

        See :class:`~rl_vllm.protocols.wire.Invitation` for the settings.

        Returns:
            The update, with the invitation for its payload.

        Raises:
            RefitError: The store cannot listen.
        """
        port, group = self._open(version, specs)
        first_ranks, world_size = wire.ranks_of(receivers)
        invitation = wire.Invitation(
            host=self._host,
            port=port,
            group=group,
            first_ranks=first_ranks,
            world_size=world_size,
            backend=backend,
            bucket_bytes=bucket_bytes,
            hold=hold,
            timeout_s=timeout_s,
            checksum=checksum,
        )
        return WeightUpdate(
            version=version,
            transport=self._transport,
            payload=invitation.to_payload(),
            num_tensors=len(specs),
            num_bytes=sum(map(wire.size_bytes, specs)),
            checksum=None,
            is_kept=False,
        )

    def _open(self, version: int, specs: tuple[TensorSpec, ...]) -> tuple[int, str]:
        self.forget()
        self._host = self._address or routable_address()
        if self._store is None:
            try:
                self._store = wire.Store(
                    self._host, 0, is_master=True, timeout=timedelta(seconds=STORE_TIMEOUT_S), wait_for_workers=False
                )
            except RuntimeError as error:
                reason = f"no store can listen for workers at {self._host}: pass another address ({error})"
                raise RefitError(version, "stage", (), reason) from error
        group = f"v{version}-{uuid.uuid4().hex[:12]}"
        self.meeting = wire.Meeting(self._store, group)
        self.meeting.put(wire.SPECS, wire.specs_to_json(specs))
        return self._store.port, group

    def give_up(self) -> None:
        """Tell workers that still wait that no bytes will come."""
        if self.meeting is not None:
            self.meeting.put(wire.CANCEL, "the trainer gave this version up")
        self.forget()

    def forget(self) -> None:
        """Drop what was announced; nobody is told."""
        if self.meeting is not None:
            self.meeting.forget()
            self.meeting = None

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self.meeting = None
        self._store = None


class RollCall:
    """Who of one update's workers has come, is done, or gave up.

    Args:
        meeting: The update's.
        update: Its payload is the invitation.
        stop: Ends every wait.
        deadline: Limit for every wait.
        phase: What errors say went wrong.
    """

    def __init__(
        self, meeting: wire.Meeting, update: WeightUpdate, stop: threading.Event, deadline: wire.Deadline, phase: str
    ) -> None:
        self._meeting = meeting
        self._version = update.version
        self._invitation = wire.Invitation.from_payload(update.payload)
        self._is_cancelled = threading.Event()
        self.enter(phase, stop, deadline)

    def enter(self, phase: str, stop: threading.Event, deadline: wire.Deadline) -> None:
        """Go on with another phase's limits."""
        self.phase = phase
        self._stop = stop
        self.deadline = deadline

    @property
    def workers(self) -> range:
        """The workers' ranks."""
        return range(1, self._invitation.world_size)

    def call(self) -> None:
        """Wait until every worker has said that it comes.

        Raises:
            RefitError: Names the replicas of which a worker refused or did not come.
            ConnectionError: ``stop`` was set, or the update was cancelled.
        """
        missing = set(self.workers)
        refusals: dict[int, str] = {}

        def all_answered() -> bool:
            for rank in sorted(missing):
                reason = self._meeting.read(wire.refused(rank))
                if reason is not None:
                    refusals[rank] = reason
                if reason is not None or self._meeting.read(wire.here(rank)) is not None:
                    missing.discard(rank)
            return bool(refusals) or not missing

        wire.wait_until(all_answered, self._check_stop, self.deadline)
        if refusals:
            reasons = "; ".join(f"{self.name(rank)}: {why}" for rank, why in sorted(refusals.items()))
            self.fail(refusals, reasons)
        if missing:
            self._fail_late(missing, "come")

    def wait_for(self, key: Callable[[int], str], doing: str) -> None:
        """Wait until every worker has put its key.

        Args:
            key: By rank.
            doing: What the key says, for the error: "they did not ... within".

        Raises:
            RefitError: Names the replicas that did not within the deadline.
            ConnectionError: A worker gave up, ``stop`` was set, or the update was cancelled.
        """
        waiting = set(self.workers)

        def all_have() -> bool:
            waiting.difference_update([rank for rank in waiting if self._meeting.read(key(rank)) is not None])
            return not waiting

        if not wire.wait_until(all_have, self.check, self.deadline):
            self._fail_late(waiting, doing)

    def check(self) -> None:
        """Raise ConnectionError when a worker gave up, ``stop`` was set, or the update was cancelled."""
        self._check_stop()
        reason = self._meeting.read(wire.FAILED)
        if reason is not None:
            raise ConnectionError(reason)

    def cancel(self, reason: str) -> None:
        """Tell the workers that no more will come, and end every wait of this side; the first reason stays."""
        if not self._is_cancelled.is_set():
            self._is_cancelled.set()
            with contextlib.suppress(ConnectionError):
                self._meeting.put(wire.CANCEL, reason)

    def fail(self, ranks: Collection[int], reason: str) -> NoReturn:
        """Cancel, and raise an error that names the replicas of these ranks."""
        self.cancel(reason)
        replicas = tuple(sorted({self._place(rank)[0] for rank in ranks}))
        raise RefitError(self._version, self.phase, replicas, reason)

    def name(self, rank: int) -> str:
        return "replica {}, worker {}".format(*self._place(rank))

    def _fail_late(self, ranks: set[int], doing: str) -> NoReturn:
        names = ", ".join(map(self.name, sorted(ranks)))
        self.fail(ranks, f"{names} did not {doing} within {self.deadline.timeout_s:g} s")

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise ConnectionError("the engines' call ended before the bytes were through")
        if self._is_cancelled.is_set():
            raise ConnectionError("the trainer gave this version up")

    def _place(self, rank: int) -> tuple[int, int]:
        """Replica and worker of a rank."""
        firsts = self._invitation.first_ranks.items()
        first, replica = max((first, replica) for replica, first in firsts if first <= rank)
        return int(replica), rank - first

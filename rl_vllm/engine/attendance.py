"""One worker's part in a refit that the trainer leads over its store: find it, compare specs, report, give up.

Nothing here knows vLLM. See :mod:`rl_vllm.protocols.wire` for what both ends agree on.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from datetime import timedelta

from rl_vllm.engine.weight_specs import disagreement
from rl_vllm.errors import RefitError
from rl_vllm.protocols import wire
from rl_vllm.types import TensorSpec, WeightUpdate, weights_digest

CONNECTING_S = 30.0


class Attendance:
    """A worker that was invited.

    Args:
        update: Its payload is the trainer's invitation, with this replica's index.
        worker_rank: This worker's, over tensor, pipeline and data parallel ranks.

    Raises:
        RefitError: The replica is not among those that the trainer counts on, or the trainer cannot be reached.
    """

    def __init__(self, update: WeightUpdate, worker_rank: int) -> None:
        self._version = update.version
        self._invitation = invitation = wire.Invitation.from_payload(update.payload)
        # What errors say went wrong.
        self._phase = "stage"
        replica = str(update.payload["replica"])
        if replica not in invitation.first_ranks:
            raise self._error(f"replica {replica} came after the announcement: the next refit reaches it")
        self._rank = invitation.first_ranks[replica] + worker_rank
        self._name = f"replica {replica}, worker {worker_rank}"
        self._deadline = wire.Deadline(invitation.timeout_s)
        self._cancelled = threading.Event()
        self._closed = threading.Event()
        self._specs: tuple[TensorSpec, ...] = ()
        limit = timedelta(seconds=min(invitation.timeout_s, CONNECTING_S))
        try:
            store = wire.Store(invitation.host, invitation.port, is_master=False, timeout=limit, wait_for_workers=False)
        except RuntimeError as error:
            where = f"{invitation.host}:{invitation.port}"
            raise self._error(f"the trainer is not to be reached at {where}: give it another address") from error
        self._meeting: wire.Meeting | None = wire.Meeting(store, invitation.group)

    def _answer_the_roll(self, expected: Sequence[TensorSpec], cancelled: threading.Event, *, facts: str = "") -> None:
        """Compare the trainer's specs with the model's, and report.

        Args:
            expected: The model's.
            cancelled: Ends every wait from here on.
            facts: Goes with the report.

        Raises:
            RefitError: The weights are not the model's (all differences), or the trainer is gone.
        """
        self._cancelled = cancelled
        meeting = self._open_meeting()
        try:
            self._specs = wire.specs_from_json(meeting.read(wire.SPECS) or "[]")
            reason = disagreement(self._specs, expected)
            if reason is not None:
                meeting.put(wire.refused(self._rank), reason)
                raise self._error(reason)
            meeting.put(wire.here(self._rank), facts)
        except ConnectionError as error:
            raise self._error(str(error)) from error

    def _await_the_word(self, meeting: wire.Meeting) -> str:
        """What the trainer says once all are here.

        Raises:
            RefitError: It gave up.
            TimeoutError: It says nothing.
        """
        if not wire.wait_until(lambda: meeting.read(wire.GO) is not None, self._check, self._deadline):
            raise TimeoutError(f"the trainer did not begin within {self._deadline.timeout_s:g} s")
        return meeting.read(wire.GO) or ""

    def _digest(self, hashes: Sequence[int], sent: Sequence[int]) -> str:
        """The digest of what came, whose hashes are those that the trainer sent.

        Raises:
            RefitError: One differs.
        """
        for spec, found, wanted in zip(self._specs, hashes, sent, strict=True):
            if found != wanted:
                raise self._error(f"{spec.name} arrived damaged: checksum {found:x}, the trainer sent {wanted:x}")
        return weights_digest(zip(self._specs, hashes, strict=True))

    def _release(self) -> None:
        """Free the connection; whoever waits in another thread ends with an error."""
        self._closed.set()
        self._meeting = None

    def _say_when_unfinished(self, meeting: wire.Meeting) -> None:
        """Also when the consumer stops in the middle, because loading failed: the trainer must not wait for it."""
        with contextlib.suppress(ConnectionError):
            if meeting.read(wire.done(self._rank)) is None and meeting.read(wire.FAILED) is None:
                meeting.put(wire.FAILED, f"{self._name} stopped before it had everything")

    def _tell(self, reason: str) -> None:
        """Let the trainer know, if it is there to hear it."""
        if self._meeting is not None:
            with contextlib.suppress(ConnectionError):
                self._meeting.put(wire.FAILED, f"{self._name}: {reason}")

    def _explained(self, error: OSError) -> RefitError:
        """The trainer's own reason when it gave one, because the lost connection is only what followed."""
        reason: str | None = None
        if self._meeting is not None:
            with contextlib.suppress(ConnectionError):
                reason = self._meeting.read(wire.CANCEL)
        if reason is None:
            reason = f"the trainer or another worker went away: {error}"
            self._tell(reason)
        return self._error(reason)

    def _check(self) -> None:
        if self._cancelled.is_set() or self._closed.is_set():
            raise self._error("staging was given up")
        reason = self._open_meeting().read(wire.CANCEL)
        if reason is not None:
            raise self._error(reason)

    def _open_meeting(self) -> wire.Meeting:
        meeting = self._meeting
        if meeting is None:
            raise self._error("staging was given up")
        return meeting

    def _error(self, reason: str) -> RefitError:
        return RefitError(self._version, self._phase, (), reason)

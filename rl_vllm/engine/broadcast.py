"""Receive a version that the trainer broadcasts: into host memory beside generation, or bucket by bucket while loading.

Nothing here knows vLLM. See :mod:`rl_vllm.protocols.wire` for what both ends agree on.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import zlib
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch

from rl_vllm.errors import RefitError
from rl_vllm.protocols import wire
from rl_vllm.protocols.address import address_towards
from rl_vllm.types import TensorSpec, WeightUpdate, weights_digest

CONNECTING_S = 30.0


class ReceivedWeights:
    """One worker's end of a broadcast.

    Args:
        update: Its payload is the trainer's invitation, with this replica's index.
        worker_rank: This worker's, over tensor, pipeline and data parallel ranks.

    Raises:
        RefitError: The replica is not among those that the trainer counts on, or the trainer cannot be reached.
    """

    def __init__(self, update: WeightUpdate, worker_rank: int) -> None:
        self._version = update.version
        self._invitation = invitation = wire.Invitation.from_payload(update.payload)
        replica = str(update.payload["replica"])
        if replica not in invitation.first_ranks:
            raise self._error(f"replica {replica} came after the announcement: the next refit reaches it")
        self._rank = invitation.first_ranks[replica] + worker_rank
        self._name = f"replica {replica}, worker {worker_rank}"
        self._deadline = wire.Deadline(invitation.timeout_s)
        self._cancelled = threading.Event()
        self._closed = threading.Event()
        self._held: list[tuple[str, torch.Tensor]] = []
        self._specs: tuple[TensorSpec, ...] = ()
        self._checksum = ""
        limit = timedelta(seconds=min(invitation.timeout_s, CONNECTING_S))
        try:
            store = wire.Store(invitation.host, invitation.port, is_master=False, timeout=limit, wait_for_workers=False)
        except RuntimeError as error:
            where = f"{invitation.host}:{invitation.port}"
            raise self._error(f"the trainer is not to be reached at {where}: give it another address") from error
        self._meeting: wire.Meeting | None = wire.Meeting(store, invitation.group)

    @property
    def checksum(self) -> str:
        """Digest of the tensors that came, or "" before the last has or when the trainer sends no checksums."""
        return self._checksum

    def verify(self, expected: Sequence[TensorSpec], cancelled: threading.Event) -> None:
        """Compare the trainer's specs with the model's and report to the roll-call; with ``host``, receive everything.

        Raises:
            RefitError: The weights are not the model's (all differences), the trainer gave up or died, bytes are
                damaged, time ran out, or ``cancelled`` was set.
        """
        self._cancelled = cancelled
        meeting = self._open_meeting()
        try:
            self._specs = wire.specs_from_json(meeting.read(wire.SPECS) or "[]")
            wrong = _differences(self._specs, expected)
            if wrong:
                reason = f"{len(wrong)} tensors are not the model's: {'; '.join(wrong)}"
                meeting.put(wire.refused(self._rank), reason)
                raise self._error(reason)
            meeting.put(wire.here(self._rank), "")
        except ConnectionError as error:
            raise self._error(str(error)) from error
        if self._invitation.hold == "host":
            self._held = list(self._receive())

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors; with ``none`` as they come, each in new memory on the group's device.

        Raises:
            RefitError: See :meth:`verify`; with ``none`` it may come after some tensors.
        """
        if self._invitation.hold == "host":
            yield from self._held
        else:
            self._deadline = wire.Deadline(self._invitation.timeout_s)
            yield from self._receive()

    def close(self) -> None:
        """Free the memory and the connection; a receiver in another thread ends with an error. Idempotent."""
        self._closed.set()
        self._held = []
        self._meeting = None

    def _receive(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Wait for the trainer's word, join the group, and hand out tensors as their last bytes come."""
        meeting = self._open_meeting()
        group: wire.Group | None = None
        try:
            if not wire.wait_until(lambda: meeting.read(wire.GO) is not None, self._check, self._deadline):
                raise TimeoutError(f"the trainer did not begin within {self._deadline.timeout_s:g} s")
            group = self._join(meeting)
            crcs: list[int] = []
            for name, tensor in self._tensors(group):
                if self._invitation.checksum:
                    crcs.append(zlib.crc32(wire.flat_bytes(tensor).cpu().numpy().data))
                yield name, tensor
            if self._invitation.checksum:
                self._compare(group, crcs)
            meeting.put(wire.done(self._rank), "")
        except (ConnectionError, TimeoutError) as error:
            raise self._explained(error) from error
        except RefitError as error:
            self._tell(error.reason)
            raise
        finally:
            # Also when the consumer stops in the middle, because loading failed: the trainer must not wait for it.
            if group is not None and meeting is not None:
                self._leave(meeting, group)

    def _tensors(self, group: wire.Group) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors as their last bytes come."""
        starts = wire.starts_of(self._specs)
        lengths = wire.bucket_lengths(starts[-1], self._invitation.bucket_bytes)
        stream: _Whole | _Stream
        if self._invitation.hold == "host":
            stream = _Whole(group, lengths, self._check)
        else:
            stream = _Stream(group, lengths, self._check)
        for spec, start, following in zip(self._specs, starts, starts[1:], strict=False):
            data = stream.read(following - start)[: wire.size_bytes(spec)]
            yield spec.name, data.view(wire.dtype_of(spec)).view(spec.shape)

    def _join(self, meeting: wire.Meeting) -> wire.Group:
        return wire.Group(
            meeting,
            backend=self._invitation.backend,
            rank=self._rank,
            world_size=self._invitation.world_size,
            address=address_towards(self._invitation.host),
            deadline=self._deadline,
        )

    def _compare(self, group: wire.Group, crcs: list[int]) -> None:
        sent = torch.empty(len(crcs), dtype=torch.int64, device=group.device)
        group.broadcast(sent.view(torch.uint8))
        group.finish_oldest(self._check)
        for spec, crc, wanted in zip(self._specs, crcs, sent.tolist(), strict=True):
            if crc != wanted:
                raise self._error(f"{spec.name} arrived damaged: checksum {crc:08x}, the trainer sent {wanted:08x}")
        self._checksum = weights_digest(zip(self._specs, crcs, strict=True))

    def _leave(self, meeting: wire.Meeting, group: wire.Group) -> None:
        with contextlib.suppress(ConnectionError):
            if meeting.read(wire.done(self._rank)) is None and meeting.read(wire.FAILED) is None:
                meeting.put(wire.FAILED, f"{self._name} stopped before it had everything")
        group.close()

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
        return RefitError(self._version, "stage" if self._invitation.hold == "host" else "commit", (), reason)


class _Whole:
    """All bytes in one piece of memory, into which they come directly."""

    def __init__(self, group: wire.Group, lengths: list[int], check: wire.Check) -> None:
        self._group = group
        self._check = check
        self._data = torch.empty(sum(lengths), dtype=torch.uint8, device=group.device)
        ends = itertools.accumulate(lengths)
        self._buckets = iter([self._data[end - length : end] for end, length in zip(ends, lengths, strict=True)])
        self._coming: list[int] = []
        self._arrived = 0
        self._read = 0
        for _ in range(wire.BUCKETS_IN_FLIGHT):
            self._ask()

    def read(self, num_bytes: int) -> torch.Tensor:
        """The next bytes, uint8, where they lie."""
        start, self._read = self._read, self._read + num_bytes
        while self._arrived < self._read:
            self._group.finish_oldest(self._check)
            self._arrived += self._coming.pop(0)
            self._ask()
        return self._data[start : self._read]

    def _ask(self) -> None:
        bucket = next(self._buckets, None)
        if bucket is not None:
            self._group.broadcast(bucket)
            self._coming.append(len(bucket))


class _Stream:
    """Bytes out of two buckets in turn: one is read while another is under way."""

    def __init__(self, group: wire.Group, lengths: list[int], check: wire.Check) -> None:
        self._group = group
        self._check = check
        self._lengths = iter(lengths)
        longest = max(lengths, default=0)
        self._free = [
            torch.empty(longest, dtype=torch.uint8, device=group.device) for _ in range(wire.BUCKETS_IN_FLIGHT)
        ]
        self._coming: list[torch.Tensor] = []
        self._unread = self._free[0][:0]
        self._current: torch.Tensor | None = None
        for _ in range(wire.BUCKETS_IN_FLIGHT):
            self._ask()

    def read(self, num_bytes: int) -> torch.Tensor:
        """The next bytes, uint8, in new memory."""
        data = rest = torch.empty(num_bytes, dtype=torch.uint8, device=self._group.device)
        while rest.numel():
            if not self._unread.numel():
                self._next_bucket()
            num = min(rest.numel(), self._unread.numel())
            rest[:num].copy_(self._unread[:num])
            rest, self._unread = rest[num:], self._unread[num:]
        return data

    def _next_bucket(self) -> None:
        if self._current is not None:
            self._free.append(self._current)
            self._current = None
            self._ask()
        self._group.finish_oldest(self._check)
        self._unread = self._coming.pop(0)
        self._current = self._unread

    def _ask(self) -> None:
        length = next(self._lengths, None)
        if length is not None:
            bucket = self._free.pop(0)
            self._group.broadcast(bucket[:length])
            self._coming.append(bucket[:length])


def _differences(offered: Sequence[TensorSpec], expected: Sequence[TensorSpec]) -> list[str]:
    sent = {spec.name: spec for spec in offered}
    wanted = {spec.name: spec for spec in expected}
    return [
        f"{name}: sent {sent.get(name)}, expected {wanted.get(name)}"
        for name in sorted(sent.keys() | wanted.keys())
        if sent.get(name) != wanted.get(name)
    ]

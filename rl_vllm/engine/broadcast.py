"""Receive a version that the trainer broadcasts: into host memory beside generation, or bucket by bucket while loading.

Nothing here knows vLLM. See :mod:`rl_vllm.protocols.wire` for what both ends agree on.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence

import torch

from rl_vllm.engine.attendance import Attendance
from rl_vllm.errors import RefitError
from rl_vllm.protocols import wire
from rl_vllm.protocols.address import address_towards
from rl_vllm.types import TensorSpec, WeightUpdate


class ReceivedWeights(Attendance):
    """One worker's end of a broadcast; see :class:`~rl_vllm.engine.attendance.Attendance` for its arguments."""

    def __init__(self, update: WeightUpdate, worker_rank: int) -> None:
        super().__init__(update, worker_rank)
        if self._invitation.hold == "none":
            self._phase = "commit"
        self._held: list[tuple[str, torch.Tensor]] = []
        self._checksum = ""

    @property
    def checksum(self) -> str:
        """Digest of the tensors that came, or "" before the last has or when the trainer sends no checksums."""
        return self._checksum

    @property
    def is_here(self) -> bool:
        """Whether :meth:`verify` receives everything."""
        return self._invitation.hold == "host"

    def verify(self, expected: Sequence[TensorSpec], cancelled: threading.Event) -> None:
        """Compare the trainer's specs with the model's and report to the roll-call; with ``host``, receive everything.

        Raises:
            RefitError: The weights are not the model's (all differences), the trainer gave up or died, bytes are
                damaged, time ran out, or ``cancelled`` was set.
        """
        self._answer_the_roll(expected, cancelled)
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
        self._release()
        self._held = []

    def _receive(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Wait for the trainer's word, join the group, and hand out tensors as their last bytes come."""
        meeting = self._open_meeting()
        group: wire.Group | None = None
        try:
            self._await_the_word(meeting)
            group = self._join(meeting)
            hashes: list[int] = []
            for name, tensor in self._tensors(group):
                if self._invitation.checksum:
                    hashes.append(wire.hash_of(tensor))
                yield name, tensor
            if self._invitation.checksum:
                self._compare(group, hashes)
            meeting.put(wire.done(self._rank), "")
        except (ConnectionError, TimeoutError) as error:
            raise self._explained(error) from error
        except RefitError as error:
            self._tell(error.reason)
            raise
        finally:
            if group is not None:
                self._say_when_unfinished(meeting)
                group.close()

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

    def _compare(self, group: wire.Group, hashes: list[int]) -> None:
        sent = torch.empty(len(hashes), dtype=torch.int64, device=group.device)
        group.broadcast(sent.view(torch.uint8))
        group.finish_oldest(self._check)
        self._checksum = self._digest(hashes, sent.tolist())


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

"""Weights from the trainer's memory to all workers of all replicas, as buckets of bytes over a process group.

Nothing is stored: what a worker has when its refit ends is all there is, so a replica that starts later gets the next
version. Gloo on CPUs and nccl on GPUs run the same code. See :mod:`rl_vllm.protocols.wire` for what both ends agree on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from rl_vllm.config import require_at_least
from rl_vllm.errors import BadInputError, ConfigError, RefitError
from rl_vllm.protocols import WeightSource, wire
from rl_vllm.types import Sending, TensorSpec, WeightReceiver, WeightUpdate
from rl_vllm.weights.roll_call import Rendezvous, RollCall, require_both
from rl_vllm.weights.shard_writer import require_finite
from rl_vllm.weights.source import next_as_declared

DEFAULT_BUCKET_BYTES = {"gloo": 8 << 20, "nccl": 64 << 20}
_PADDING = torch.zeros(wire.ALIGNMENT, dtype=torch.uint8)


class BroadcastTransport:
    """Broadcasts weights to the workers that wait for them.

    A group is formed for each refit, with whoever is a receiver then; for gloo that takes about 10 ms.

    Args:
        address: Where workers reach this process; None means the address that its packets leave from.
        bucket_bytes: Length of a bucket, at least 1; both ends hold two. None means 64 MiB with nccl; with gloo 8 MiB,
            which a processor's cache holds while it is copied, sent and checked.
        hold: ``host``: workers take a whole version into host memory while generation goes on, and load it from there.
            ``none``: they load from the buckets as they come, while generation is paused; a failure in the middle
            leaves replicas that serve nothing until the next refit.
        backend: ``gloo``, ``nccl``, or None: nccl with ``hold="none"`` where this process has a GPU, else gloo.
        checksum: Whether workers verify each tensor's hash; without, their digests are empty.

    Raises:
        ConfigError: A value is out of range.
    """

    name = "broadcast"

    def __init__(
        self,
        *,
        address: str | None = None,
        bucket_bytes: int | None = None,
        hold: wire.Hold = "host",
        backend: str | None = None,
        checksum: bool = True,
    ) -> None:
        if bucket_bytes is not None:
            require_at_least("bucket_bytes", bucket_bytes, 1)
        if hold not in ("host", "none"):
            raise ConfigError(f'hold must be "host" or "none", got {hold!r}')
        if backend not in (None, "gloo", "nccl"):
            raise ConfigError(f'backend must be "gloo" or "nccl", got {backend!r}')
        if hold == "host" and backend == "nccl":
            raise ConfigError('backend="nccl" receives into GPU memory, which hold="host" is not: use hold="none"')
        self.sending = Sending.WHILE_STAGING if hold == "host" else Sending.WHILE_COMMITTING
        self._hold: wire.Hold = hold
        self._backend = backend or ("nccl" if hold == "none" and torch.cuda.is_available() else "gloo")
        self._bucket_bytes = bucket_bytes or DEFAULT_BUCKET_BYTES[self._backend]
        self._checksum = checksum
        self._rendezvous = Rendezvous(self.name, address)

    def announce(
        self, source: WeightSource, version: int, *, receivers: tuple[WeightReceiver, ...], timeout_s: float
    ) -> WeightUpdate:
        """Open the store, once, and lay out the specs for the receivers.

        Raises:
            RefitError: There is nothing to send or nobody to receive, or the store cannot listen.
        """
        specs = source.specs()
        require_both(version, specs, receivers, doing="broadcast")
        return self._rendezvous.invite(
            version,
            specs,
            receivers,
            backend=self._backend,
            bucket_bytes=self._bucket_bytes,
            hold=self._hold,
            timeout_s=timeout_s,
            checksum=self._checksum,
        )

    def send(self, source: WeightSource, update: WeightUpdate, *, stop: threading.Event, timeout_s: float) -> None:
        """Wait until all workers are there, send, and wait until all have everything.

        Cost: on the trainer's side a copy of the weights into the buckets, a pass for NaN, one for the checksums.

        Raises:
            RefitError: A weight is NaN or infinite (phase "check"), the source broke its word, workers refused or did
                not come, or time ran out.
            ConnectionError: Workers went away or failed, or ``stop`` was set.
        """
        meeting = self._rendezvous.meeting
        if meeting is None:
            raise RefitError(update.version, "stage", (), "nothing is announced: call announce first")
        phase = "stage" if self._hold == "host" else "commit"
        roll = RollCall(meeting, update, stop, wire.Deadline(timeout_s), phase)
        sending = _Sending(meeting, update, roll)
        try:
            roll.call()
            meeting.put(wire.GO, "")
            sending.send(source)
        except BadInputError as error:
            roll.cancel(str(error))
            raise RefitError(update.version, "check", (), str(error)) from error
        except TimeoutError as error:
            raise RefitError(update.version, phase, (), f"{error}: raise the refit's timeout") from error
        finally:
            sending.close()

    def retire(self, version: int) -> None:  # noqa: ARG002
        """Forget what was announced: nothing else is kept."""
        self._rendezvous.forget()

    def discard(self, update: WeightUpdate) -> None:  # noqa: ARG002
        """Tell workers that still wait that no bytes will come."""
        self._rendezvous.give_up()

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._rendezvous.close()


class _Sending:
    """One version on its way."""

    def __init__(self, meeting: wire.Meeting, update: WeightUpdate, roll: RollCall) -> None:
        self._meeting = meeting
        self._invitation = wire.Invitation.from_payload(update.payload)
        self._roll = roll
        self._group: wire.Group | None = None
        self._is_done = False

    def send(self, source: WeightSource) -> None:
        """Form the group, move all bytes, wait for every worker's word."""
        invitation = self._invitation
        self._group = wire.Group(
            self._meeting,
            backend=invitation.backend,
            rank=0,
            world_size=invitation.world_size,
            address=invitation.host,
            deadline=self._roll.deadline,
        )
        num_bytes = wire.starts_of(source.specs())[-1]
        stream = _Stream(self._group, invitation.bucket_bytes, num_bytes, self._roll.check)
        tensors = iter(source)
        hashes = [self._write(stream, spec, next_as_declared(tensors, spec)) for spec in source.specs()]
        stream.finish()
        if invitation.checksum:
            self._group.broadcast(torch.tensor(hashes, dtype=torch.int64, device=self._group.device).view(torch.uint8))
            self._group.finish_oldest(self._roll.check)
        self._roll.wait_for(wire.done, "finish")
        self._is_done = True

    def close(self) -> None:
        """Leave the group; before that, unless all is done, tell the workers why."""
        if not self._is_done:
            self._roll.cancel("the trainer gave up, its own error says why")
        if self._group is not None:
            self._group.close()

    def _write(self, stream: _Stream, spec: TensorSpec, tensor: torch.Tensor) -> int:
        require_finite(spec.name, tensor)
        data = wire.flat_bytes(tensor)
        stream.write(data)
        stream.write(_PADDING[: -data.numel() % wire.ALIGNMENT])
        return wire.hash_of(tensor) if self._invitation.checksum else 0


class _Stream:
    """Cuts bytes into buckets: one is filled while another is under way."""

    def __init__(self, group: wire.Group, bucket_bytes: int, num_bytes: int, check: Callable[[], None]) -> None:
        self._group = group
        self._check = check
        length = min(bucket_bytes, num_bytes)
        self._buckets = [
            torch.empty(length, dtype=torch.uint8, device=group.device) for _ in range(wire.BUCKETS_IN_FLIGHT)
        ]
        self._at = 0

    def write(self, data: torch.Tensor) -> None:
        """Send these bytes, the last of them with those of a later call or of :meth:`finish`."""
        length = len(self._buckets[0])
        while data.numel():
            if self._at == 0 and data.numel() >= length and data.device == self._group.device:
                # A whole bucket needs no copy; the pending operation keeps the tensor until it is through.
                self._send(data[:length])
                data = data[length:]
                continue
            part, data = data[: length - self._at], data[length - self._at :]
            self._buckets[0][self._at : self._at + len(part)].copy_(part)
            self._at += len(part)
            if self._at == length:
                self._flush()

    def finish(self) -> None:
        """Send the rest and wait until all is through."""
        if self._at:
            self._flush()
        while self._group.num_pending:
            self._group.finish_oldest(self._check)

    def _flush(self) -> None:
        self._send(self._buckets[0][: self._at])
        self._at = 0
        self._buckets.append(self._buckets.pop(0))

    def _send(self, bucket: torch.Tensor) -> None:
        self._check()
        self._group.broadcast(bucket)
        if self._group.num_pending == wire.BUCKETS_IN_FLIGHT:
            self._group.finish_oldest(self._check)

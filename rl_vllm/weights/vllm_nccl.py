"""Weights from the trainer's GPU to all workers' by vLLM's own NCCL sender and receiver, inside our life of a refit.

A group is formed for each refit while engines stage, beside generation, so that who cannot join leaves the old weights
in service; bytes move while they commit. vLLM brings the group, the packing and the collectives
(:mod:`rl_vllm.engine.trainer_end`, :mod:`rl_vllm.engine.vllm_nccl`); the roll-call, the checks of names, values and
checksums, and every deadline are ours. See :mod:`rl_vllm.protocols.wire` for what both ends agree on.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future

import torch

from rl_vllm.config import require_at_least
from rl_vllm.errors import BadInputError, RefitError
from rl_vllm.protocols import WeightSource, gpu, wire
from rl_vllm.protocols.trainer_end import VLLM_NCCL_END, GroupPlan, TrainerEnd, TrainerEndOpener, opener_named
from rl_vllm.types import Sending, TensorSpec, WeightReceiver, WeightUpdate
from rl_vllm.weights.roll_call import Rendezvous, RollCall, require_both
from rl_vllm.weights.shard_writer import require_finite
from rl_vllm.weights.source import next_as_declared

# Of the time for staging: engines have all of it, and the trainer, which knows who is missing, must speak before them.
FORMING_FRACTION = 0.8


class VLLMNCCLTransport:
    """Broadcasts weights by vLLM's NCCL weight transfer, into GPU memory, while generation is paused.

    The trainer and every worker have a GPU of their own. A failure in the middle leaves replicas that serve nothing
    until the next refit. NCCL does not tell of a dead member: when a worker is killed in the middle, the others learn
    of it at the deadline.

    Args:
        address: Where workers reach this process; None means the address that its packets leave from.
        bucket_bytes: A packed broadcast ends with the tensor that takes it above this, at least 1; both ends hold two.
        checksum: Whether workers verify each tensor's hash, for which both ends copy all weights to the host;
            without, digests are empty.
        open_end: Forms the trainer's end of the group; None means vLLM's.

    Raises:
        ConfigError: This process has no GPU, or a value is out of range.
    """

    name = "vllm_nccl"
    sending = Sending.WHILE_COMMITTING

    def __init__(
        self,
        *,
        address: str | None = None,
        bucket_bytes: int = 256 << 20,
        checksum: bool = True,
        open_end: TrainerEndOpener | None = None,
    ) -> None:
        require_at_least("bucket_bytes", bucket_bytes, 1)
        gpu.require_gpu(self.name)
        self._bucket_bytes = bucket_bytes
        self._checksum = checksum
        self._open_end = open_end
        self._rendezvous = Rendezvous(self.name, address)
        self._round: _Round | None = None

    def announce(
        self, source: WeightSource, version: int, *, receivers: tuple[WeightReceiver, ...], timeout_s: float
    ) -> WeightUpdate:
        """Lay out the specs, and begin to form the group in a thread.

        Raises:
            ConfigError: vLLM is not installed here.
            RefitError: There is nothing to send or nobody to receive, vLLM cannot pack the tensors, or the store cannot
                listen.
        """
        specs = source.specs()
        require_both(version, specs, receivers, doing="broadcast")
        _require_packable(version, specs, self._bucket_bytes)
        open_end = self._open_end or opener_named(VLLM_NCCL_END)
        self._leave()
        update = self._rendezvous.invite(
            version,
            specs,
            receivers,
            backend="nccl",
            bucket_bytes=self._bucket_bytes,
            hold="none",
            timeout_s=timeout_s,
            checksum=self._checksum,
        )
        assert self._rendezvous.meeting is not None
        self._round = _Round(self._rendezvous.meeting, update, source, specs, gpu.this_gpu())
        self._round.begin(open_end)
        return update

    def send(self, source: WeightSource, update: WeightUpdate, *, stop: threading.Event, timeout_s: float) -> None:  # noqa: ARG002
        """Send what was announced over the group that has formed, and wait until all workers have everything.

        Cost: on the trainer's GPU a copy of the weights into the buckets and a pass for NaN; with ``checksum`` a copy
        to the host and a pass there.

        Raises:
            RefitError: A weight is NaN or infinite (phase "check"), the source broke its word, NCCL failed, or time ran
                out.
            ConnectionError: Workers failed, or ``stop`` was set.
        """
        if self._round is None:
            raise RefitError(update.version, "stage", (), "nothing is announced: call announce first")
        self._round.send(stop, wire.Deadline(timeout_s))

    def retire(self, version: int) -> None:  # noqa: ARG002
        """Forget what was announced: nothing else is kept."""
        self._leave()
        self._rendezvous.forget()

    def discard(self, update: WeightUpdate) -> None:  # noqa: ARG002
        """Tell workers that still wait that no bytes will come, and leave the group."""
        self._leave()
        self._rendezvous.forget()

    def close(self) -> None:
        """Leave the group and stop listening. Idempotent."""
        self._leave()
        self._rendezvous.close()

    def _leave(self) -> None:
        if self._round is not None:
            self._round.close()
            self._round = None


class _Round:
    """One version on its way: its group, and the :class:`~rl_vllm.protocols.trainer_end.Peers` in it."""

    def __init__(
        self,
        meeting: wire.Meeting,
        update: WeightUpdate,
        source: WeightSource,
        specs: tuple[TensorSpec, ...],
        device: torch.device,
    ) -> None:
        self._meeting = meeting
        self._version = update.version
        self._invitation = invitation = wire.Invitation.from_payload(update.payload)
        deadline = wire.Deadline(FORMING_FRACTION * invitation.timeout_s)
        self._roll = RollCall(meeting, update, threading.Event(), deadline, "stage")
        self._tensors = _Tensors(source, specs, device, self)
        self._device = device
        self._end: Future[TrainerEnd] = Future()
        # Why workers do not receive; the sender's own error is only what followed.
        self._lost: Exception | None = None
        self._is_done = False

    def begin(self, open_end: TrainerEndOpener) -> None:
        """Form the group in a thread; one that NCCL never lets go is left behind."""
        name = f"rl_vllm-form-group-{self._version}"
        threading.Thread(target=self._form, args=(open_end,), name=name, daemon=True).start()

    def send(self, stop: threading.Event, deadline: wire.Deadline) -> None:
        """See :meth:`VLLMNCCLTransport.send`."""
        self._roll.enter("commit", stop, deadline)
        try:
            # Done already: every engine has joined, or its staging had failed.
            end = self._end.result(deadline.left_s)
            # It reads on streams of its own, which do not wait for what the trainer's still writes.
            gpu.settle(self._device)
            end.send()
            self._is_done = True
        except BadInputError as error:
            self._roll.cancel(str(error))
            raise RefitError(self._version, "check", (), str(error)) from error
        except TimeoutError as error:
            reason = f"the group had not formed after {deadline.timeout_s:g} s"
            raise RefitError(self._version, "commit", (), f"{reason}: raise the refit's timeout") from error
        except Exception as error:
            if self._lost is not None:
                raise self._lost from error
            if isinstance(error, RefitError | ConnectionError):
                raise
            raise RefitError(self._version, "commit", (), f"vLLM's sender failed: {error}") from error
        finally:
            self.close()

    def join(self, facts: Mapping[str, object]) -> None:
        """Give the word to join, and wait for all."""
        self._meeting.put(wire.GO, json.dumps(dict(facts)))
        try:
            self._roll.wait_for(wire.joined, "join the group")
        except Exception as error:
            # Here, because the sender itself may wait for the missing member for ever.
            self._roll.cancel(_words(error))
            raise

    def receive(self) -> None:
        """Wait for all; when one gives up, end the collectives that the trainer's thread waits in."""
        try:
            self._roll.wait_for(wire.done, "finish")
        except Exception as error:
            self._lost = error
            self._roll.cancel(_words(error))
            self._end.result(0).close()
            raise

    @property
    def checksum(self) -> bool:
        return self._invitation.checksum

    def put_hashes(self, hashes: list[int]) -> None:
        """Give workers the hash of each tensor."""
        self._meeting.put(wire.HASHES, json.dumps(hashes))

    def check(self) -> None:
        """Raise ConnectionError when the round is over."""
        self._roll.check()

    def close(self) -> None:
        """Leave the group, now or when it has formed; workers that wait are told. Idempotent."""
        if not self._is_done:
            self._roll.cancel("the trainer gave up, its own error says why")
        self._end.add_done_callback(_close_end)

    def _form(self, open_end: TrainerEndOpener) -> None:
        try:
            self._roll.call()
            self._refuse_shared_gpus()
            plan = GroupPlan(
                host=self._invitation.host,
                world_size=self._invitation.world_size,
                bucket_bytes=self._invitation.bucket_bytes,
                device=self._device,
            )
            self._end.set_result(open_end(plan, self._tensors, self))
        except BaseException as error:  # noqa: BLE001
            # Workers tell of it: none is ready while it waits for the group.
            self._roll.cancel(_words(error))
            self._end.set_exception(error)

    def _refuse_shared_gpus(self) -> None:
        """NCCL would wait for ever, or fail without a name."""
        owners = {gpu.gpu_uuid(self._device): "the trainer"}
        for rank in self._roll.workers:
            uuid = self._meeting.read(wire.here(rank)) or ""
            if uuid in owners:
                reason = f"{self._roll.name(rank)} and {owners[uuid]} share the GPU {uuid}, which NCCL does not allow"
                self._roll.fail([rank], f"{reason}: use transport='ipc' on one GPU, or give each its own")
            owners[uuid] = self._roll.name(rank)


class _Tensors:
    """The announced source as the sender reads it: each tensor is as declared, finite, and on the trainer's GPU."""

    def __init__(
        self, source: WeightSource, specs: tuple[TensorSpec, ...], device: torch.device, round_: _Round
    ) -> None:
        self._source = source
        self._specs = specs
        self._device = device
        self._round = round_

    def specs(self) -> tuple[TensorSpec, ...]:
        return self._specs

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        hashes: list[int] = []
        tensors = iter(self._source)
        for spec in self._specs:
            # When a worker has given up, its group is closed and would swallow the rest.
            self._round.check()
            tensor = next_as_declared(tensors, spec)
            require_finite(spec.name, tensor)
            if self._round.checksum:
                hashes.append(wire.hash_of(tensor))
            yield spec.name, tensor.to(self._device)
        self._round.put_hashes(hashes)


def _words(error: BaseException) -> str:
    return error.reason if isinstance(error, RefitError) else str(error) or type(error).__name__


def _close_end(formed: Future[TrainerEnd]) -> None:
    if formed.exception() is None:
        formed.result().close()


def _require_packable(version: int, specs: tuple[TensorSpec, ...], bucket_bytes: int) -> None:
    """Refuse what vLLM cannot take out of its packed buffer: tensors that do not begin at a multiple of an element."""
    for chunk in wire.packed_chunks(specs, bucket_bytes):
        begin = 0
        for spec in chunk:
            if begin % wire.dtype_of(spec).itemsize:
                reason = f"{spec.name} ({spec.dtype}) would begin at byte {begin} of vLLM's packed buffer"
                raise RefitError(
                    version, "check", (), f"{reason}, which it cannot take apart: use transport='broadcast'"
                )
            begin += wire.size_bytes(spec)

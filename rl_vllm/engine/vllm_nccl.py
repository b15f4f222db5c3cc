"""Receive a version by vLLM's NCCL weight transfer: join while staging, take tensors while the model is loaded.

vLLM's engine class joins the group and receives; its model is a stand-in that keeps the tensors, so that they are
checked and loaded as those of every other transport. Its calls cannot be interrupted, so each runs in a thread, and
leaving the group is what ends it. See :mod:`rl_vllm.protocols.wire` for what both ends agree on.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import torch
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from rl_vllm.engine.attendance import Attendance
from rl_vllm.engine.worker_place import Catcher, WorkerPlace
from rl_vllm.errors import RefitError
from rl_vllm.protocols import gpu, wire
from rl_vllm.types import TensorSpec, WeightUpdate


class NCCLWeights(Attendance):
    """One worker's end.

    Args:
        update: See :class:`~rl_vllm.engine.attendance.Attendance`.
        place: This worker's.

    Raises:
        RefitError: As there, or this worker has no GPU.
    """

    def __init__(self, update: WeightUpdate, place: WorkerPlace) -> None:
        super().__init__(update, place.rank)
        self._device = place.device
        self._catcher = Catcher()
        self._receiver = NCCLWeightTransferEngine(place.transfer_config, place.vllm_config, place.device, self._catcher)
        self._first_rank = self._rank - place.rank
        self._checksum = ""

    @property
    def checksum(self) -> str:
        """Digest of the tensors that came, or "" before the last has or when the trainer sends no checksums."""
        return self._checksum

    @property
    def is_here(self) -> bool:
        """False: the bytes come while the model is loaded."""
        return False

    def verify(self, expected: Sequence[TensorSpec], cancelled: threading.Event) -> None:
        """Compare the trainer's specs with the model's, report to the roll-call, and join the group.

        Raises:
            RefitError: The weights are not the model's (all differences), the group did not form, the trainer gave up
                or died, time ran out, or ``cancelled`` was set.
        """
        meeting = self._open_meeting()
        uuid = gpu.gpu_uuid(self._device)
        if not uuid:
            reason = f"this engine computes on {self._device.type}, NCCL needs a GPU: use transport='broadcast'"
            meeting.put(wire.refused(self._rank), reason)
            raise self._error(reason)
        self._answer_the_roll(expected, cancelled, facts=uuid)
        try:
            facts = json.loads(self._await_the_word(meeting))
            # vLLM's trainer counts on one engine; here every replica has its own place among the ranks.
            info = self._receiver.parse_init_info({**facts, "rank_offset": self._first_rank})
            self._bounded(lambda: self._receiver.init_transfer_engine(info), "the group to form")
            meeting.put(wire.joined(self._rank), "")
        except Exception as error:
            raise self._failed(error) from error

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors as they come, on the worker's device.

        Raises:
            RefitError: See :meth:`verify`, or bytes are damaged; it may come after some tensors.
        """
        self._phase = "commit"
        self._deadline = wire.Deadline(self._invitation.timeout_s)
        meeting = self._open_meeting()
        hashes: list[int] = []
        try:
            for specs in wire.packed_chunks(self._specs, self._invitation.bucket_bytes):
                for name, tensor in self._receive(specs):
                    if self._invitation.checksum:
                        hashes.append(wire.hash_of(tensor))
                    yield name, tensor
                # The memory of the last chunk may be filled again before copies out of it have been made.
                gpu.settle(self._device)
            if self._invitation.checksum:
                self._compare(meeting, hashes)
            meeting.put(wire.done(self._rank), "")
        except Exception as error:
            raise self._failed(error) from error
        finally:
            self._say_when_unfinished(meeting)
            self._receiver.shutdown()

    def close(self) -> None:
        """Leave the group and free the connection; a receiver in another thread ends with an error. Idempotent."""
        if self._phase == "commit" and self._meeting is not None:
            self._say_when_unfinished(self._meeting)
        self._release()
        self._receiver.shutdown()
        self._catcher.take()

    def _receive(self, specs: list[TensorSpec]) -> list[tuple[str, torch.Tensor]]:
        """One packed broadcast."""
        info = self._receiver.update_info_cls(
            names=[spec.name for spec in specs],
            dtype_names=[spec.dtype for spec in specs],
            shapes=[list(spec.shape) for spec in specs],
        )
        self._bounded(lambda: self._receiver.receive_weights(info), "a bucket")
        return self._catcher.take()

    def _compare(self, meeting: wire.Meeting, hashes: list[int]) -> None:
        if not wire.wait_until(lambda: meeting.read(wire.HASHES) is not None, self._check, self._deadline):
            raise TimeoutError(f"no checksums came within {self._deadline.timeout_s:g} s")
        self._checksum = self._digest(hashes, json.loads(meeting.read(wire.HASHES) or "[]"))

    def _bounded(self, call: Callable[[], None], what: str) -> None:
        """Run a call of vLLM's in a thread of its own, and leave it behind when it does not end in time."""
        ended: Future[None] = Future()
        left_behind = threading.Event()

        def run() -> None:
            try:
                gpu.use_gpu(self._device)
                call()
            except BaseException as error:  # noqa: BLE001
                ended.set_exception(error)
            else:
                ended.set_result(None)
            if left_behind.is_set():
                # It joined a group that nobody waits for any more.
                self._receiver.shutdown()

        threading.Thread(target=run, name=f"rl_vllm-nccl-{self._version}", daemon=True).start()
        try:
            if not wire.wait_until(ended.done, self._check, self._deadline):
                raise TimeoutError(f"waited {self._deadline.timeout_s:g} s for {what}")
        except BaseException:
            left_behind.set()
            raise
        ended.result()

    def _failed(self, error: Exception) -> RefitError:
        """Leave the group, tell the trainer, and say why; the trainer's own reason comes first when it gave one."""
        self._receiver.shutdown()
        if isinstance(error, RefitError):
            self._tell(error.reason)
            return error
        if isinstance(error, ConnectionError | TimeoutError):
            return self._explained(error)
        self._tell(reason := f"NCCL failed: {type(error).__name__}: {error}")
        return self._error(reason)

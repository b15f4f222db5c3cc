"""Load a version out of the trainer's own GPU memory, by vLLM's CUDA IPC receiver.

Staging maps the memory and checks all of it, beside generation; committing copies.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

from rl_vllm.engine.weight_specs import disagreement
from rl_vllm.engine.worker_place import Catcher, WorkerPlace
from rl_vllm.errors import RefitError
from rl_vllm.protocols import gpu, ipc_handles, wire
from rl_vllm.types import TensorSpec, WeightUpdate, weights_digest


class IPCWeights:
    """One worker's view of the trainer's memory.

    Args:
        update: Its payload has the handles.
        place: This worker's.
    """

    def __init__(self, update: WeightUpdate, place: WorkerPlace) -> None:
        self._update = update
        self._place = place
        self._catcher = Catcher()
        self._receiver = IPCWeightTransferEngine(place.transfer_config, place.vllm_config, place.device, self._catcher)
        self._mapped: list[tuple[str, torch.Tensor]] = []
        self._checksum = ""

    @property
    def checksum(self) -> str:
        """Digest of the tensors, as verified; empty when the trainer computed no checksums."""
        return self._checksum

    @property
    def is_here(self) -> bool:
        """False: the bytes come while the model is loaded."""
        return False

    def verify(self, expected: Sequence[TensorSpec], cancelled: threading.Event) -> None:
        """Compare specs and GPUs, map the trainer's memory, and compare the digest.

        Cost: with checksums a copy of all weights to the host, and a pass there.

        Raises:
            RefitError: The weights are not the model's (all differences), this worker computes on another GPU than the
                trainer, the memory cannot be mapped, the digest is another, or ``cancelled`` was set.
        """
        specs = wire.specs_from_json(str(self._update.payload["specs"]))
        reason = disagreement(specs, expected)
        if reason is not None:
            raise self._error(reason)
        self._require_same_gpu()
        try:
            gpu.use_gpu(self._place.device)
            self._mapped = self._map(specs)
        except (RuntimeError, ValueError) as error:
            raise self._error(f"the trainer's memory cannot be mapped, has it ended? {error}") from error
        if self._update.checksum is not None:
            self._compare(specs, cancelled)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of the trainer's memory; valid until :meth:`close`."""
        yield from self._mapped

    def close(self) -> None:
        """Forget the mappings, once what was copied out of them has been. Idempotent."""
        if self._mapped:
            gpu.settle(self._place.device)
            self._mapped = []
        self._receiver.shutdown()

    def _require_same_gpu(self) -> None:
        ours, theirs = gpu.gpu_uuid(self._place.device), self._update.payload["gpu"]
        if ours != theirs:
            here = f"GPU {ours}" if ours else f"{self._place.device.type}, no GPU,"
            raise self._error(
                f"this worker computes on {here} of host {socket.gethostname()} and the trainer's weights are on GPU "
                f"{theirs} of host {self._update.payload['host']}: transport='ipc' needs them on one GPU, use "
                "transport='vllm_nccl', 'broadcast' or 'shared_storage'"
            )

    def _map(self, specs: Sequence[TensorSpec]) -> list[tuple[str, torch.Tensor]]:
        uuid = gpu.gpu_uuid(self._place.device)
        encoded = cast(list[list[Any]], self._update.payload["handles"])
        info = self._receiver.update_info_cls(
            names=[spec.name for spec in specs],
            dtype_names=[spec.dtype for spec in specs],
            shapes=[list(spec.shape) for spec in specs],
            ipc_handles=[{uuid: ipc_handles.from_json(handle)} for handle in encoded],
        )
        self._receiver.receive_weights(info)
        mapped = self._catcher.take()
        for spec, (name, tensor) in zip(specs, mapped, strict=True):
            found = TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            if found != spec:
                raise ValueError(f"the trainer declared {spec} and its memory holds {found}")
        return mapped

    def _compare(self, specs: Sequence[TensorSpec], cancelled: threading.Event) -> None:
        hashes: list[int] = []
        for _, tensor in self._mapped:
            if cancelled.is_set():
                raise self._error("staging was given up")
            hashes.append(wire.hash_of(tensor))
        found = weights_digest(zip(specs, hashes, strict=True))
        if found != self._update.checksum:
            raise self._error(f"the weights' digest is {found}, the trainer's memory held {self._update.checksum}")
        self._checksum = found

    def _error(self, reason: str) -> RefitError:
        return RefitError(self._update.version, "stage", (), reason)

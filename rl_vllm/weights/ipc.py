"""Weights that stay where they are: engines on the trainer's own GPU map its memory and load from there.

Only handles travel, in the update's payload. They are torch's, in the shape that vLLM's receiver takes; vLLM's own
sender is not used, because it gathers handles over torch's default process group, whose other ranks are elsewhere in a
refit.
"""

from __future__ import annotations

import socket
import threading

import torch

from rl_vllm.errors import BadInputError, ConfigError, RefitError
from rl_vllm.protocols import WeightSource, gpu, ipc_handles, wire
from rl_vllm.types import Sending, TensorSpec, WeightReceiver, WeightUpdate, weights_digest
from rl_vllm.weights.roll_call import require_both
from rl_vllm.weights.shard_writer import require_finite
from rl_vllm.weights.source import next_as_declared


class IPCTransport:
    """Lets engines on the trainer's GPU read its weights by CUDA IPC.

    No memory but for tensors that are cast, gathered or merged on the way, which live until the refit ends. The trainer
    must not change weights meanwhile; the thread that refits cannot. A replica on another GPU or host refuses while it
    stages, and the old weights stay in service.

    Args:
        checksum: Whether workers verify each tensor's hash, for which both ends copy all weights to the host;
            without, digests are empty.

    Raises:
        ConfigError: This process has no GPU.
    """

    name = "ipc"
    # Nothing is sent, but only who sends is told of the receivers.
    sending = Sending.WHILE_STAGING

    def __init__(self, *, checksum: bool = True) -> None:
        gpu.require_gpu(self.name)
        self._checksum = checksum
        self._shared: list[torch.Tensor] = []

    def announce(
        self,
        source: WeightSource,
        version: int,
        *,
        receivers: tuple[WeightReceiver, ...],
        timeout_s: float,  # noqa: ARG002
    ) -> WeightUpdate:
        """Make a handle for each tensor, and keep the tensors until the refit ends.

        Cost: a pass for NaN; with ``checksum`` a copy to the host and a pass there.

        Raises:
            ConfigError: A replica has several workers: all but one of them are on other GPUs than the trainer.
            RefitError: There is nothing to share or nobody to share with, a weight is NaN or infinite (phase "check"),
                or the source broke its word.
        """
        wide = [receiver for receiver in receivers if receiver.num_workers > 1]
        if wide:
            raise ConfigError(
                f"transport='ipc' shares the memory of one GPU, and replica {wide[0].replica} has "
                f"{wide[0].num_workers} workers on as many GPUs: use transport='vllm_nccl', 'broadcast' or "
                "'shared_storage', or tensor_parallel_size=1 and pipeline_parallel_size=1"
            )
        specs = source.specs()
        require_both(version, specs, receivers, doing="share")
        self._release()
        device = gpu.this_gpu()
        try:
            handles, hashes = self._share(source, specs, device)
        except BadInputError as error:
            self._release()
            raise RefitError(version, "check", (), str(error)) from error
        # Another process may read now.
        gpu.settle(device)
        return WeightUpdate(
            version=version,
            transport=self.name,
            payload={
                "host": socket.gethostname(),
                "gpu": gpu.gpu_uuid(device),
                "specs": wire.specs_to_json(specs),
                "handles": handles,
            },
            num_tensors=len(specs),
            num_bytes=sum(map(wire.size_bytes, specs)),
            checksum=weights_digest(zip(specs, hashes, strict=True)) if self._checksum else None,
            is_kept=False,
        )

    def send(self, source: WeightSource, update: WeightUpdate, *, stop: threading.Event, timeout_s: float) -> None:
        """Do nothing: workers read by themselves."""

    def retire(self, version: int) -> None:  # noqa: ARG002
        """Let go of the tensors: every replica has copied them."""
        self._release()

    def discard(self, update: WeightUpdate) -> None:  # noqa: ARG002
        """Let go of the tensors."""
        self._release()

    def close(self) -> None:
        """Let go of everything. Idempotent."""
        self._release()

    def _share(
        self, source: WeightSource, specs: tuple[TensorSpec, ...], device: torch.device
    ) -> tuple[list[object], list[int]]:
        handles: list[object] = []
        hashes: list[int] = []
        tensors = iter(source)
        for spec in specs:
            tensor = next_as_declared(tensors, spec)
            require_finite(spec.name, tensor)
            # A handle does not keep the memory.
            shared = tensor.detach().to(device).contiguous()
            self._shared.append(shared)
            handles.append(ipc_handles.export_handle(shared))
            if self._checksum:
                hashes.append(wire.hash_of(shared))
        return handles, hashes

    def _release(self) -> None:
        if self._shared:
            self._shared = []
            gpu.collect_ipc()

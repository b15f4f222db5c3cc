"""vLLM's NCCL sender as a :class:`~rl_vllm.protocols.trainer_end.TrainerEnd`.

It runs in the trainer's process. vLLM's class opens the group, packs and broadcasts; what it says to the engines goes
through our meeting, because the engines' own calls (stage, commit) are made by the service.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import ParamMeta
from vllm.distributed.weight_transfer.base import WeightSource as VLLMWeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from rl_vllm.protocols import WeightSource, gpu, wire
from rl_vllm.protocols.trainer_end import GroupPlan, Peers


def open_nccl_end(plan: GroupPlan, source: WeightSource, peers: Peers) -> NCCLEnd:
    """Form the group; see :class:`~rl_vllm.protocols.trainer_end.TrainerEndOpener`.

    NCCL itself has no deadline while a group forms: when a member dies then, this call does not return.

    Raises:
        Exception: The peers', vLLM's or NCCL's own.
    """
    gpu.use_gpu(plan.device)
    info = NCCLTrainerInitInfo(
        master_address=plan.host,
        master_port=_free_port(plan.host),
        world_size=plan.world_size,
        packed=True,
        packed_buffer_size_bytes=plan.bucket_bytes,
        packed_num_buffers=wire.BUCKETS_IN_FLIGHT,
        rank=0,
    )
    return NCCLEnd(WeightTransferTrainerFactory.trainer_init(info, client=_Client(peers), source=_Source(source)))


class NCCLEnd:
    """See :class:`~rl_vllm.protocols.trainer_end.TrainerEnd`."""

    def __init__(self, sender: Any) -> None:
        self._sender = sender
        self._leaving = threading.Lock()

    def send(self) -> None:
        self._sender.send_weights()

    def close(self) -> None:
        # The sender's own thread closes when workers give up, while the trainer's may do so too.
        with self._leaving:
            self._sender.shutdown()


class _Client:
    """What vLLM's sender says to the engines, as far as the service does not say it."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._peers.join(init_info)

    def start_weight_update(self) -> None:
        """Nothing: the service's commit has started it."""

    def update_weights(self, update_info: dict[str, Any]) -> None:  # noqa: ARG002
        # Workers have had the specs, which say the same, since they answered the roll.
        self._peers.receive()

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Nothing: the service's commit finishes it, and sets the version."""


class _Source(VLLMWeightSource):
    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(spec.name, wire.dtype_of(spec), spec.shape) for spec in self._source.specs()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._source)


def _free_port(host: str) -> int:
    """VLLM binds it a moment later, so another program could take it in between: its error says so then."""
    with socket.create_server((host, 0)) as probe:
        port: int = probe.getsockname()[1]
    return port

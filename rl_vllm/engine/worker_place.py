"""Where a worker stands: what a transport's receiving end may ask about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """One worker of one replica.

    Attributes:
        rank: Over data, tensor and pipeline parallel ranks.
        device: Where its part of the model is.
        transfer_config: vLLM's ``WeightTransferConfig``.
        vllm_config: vLLM's ``VllmConfig``.
    """

    rank: int
    device: torch.device
    transfer_config: Any
    vllm_config: Any


class Catcher:
    """Stands in for the model that vLLM's receivers load into: keeps the tensors for our own, whole reload."""

    def __init__(self) -> None:
        self._caught: list[tuple[str, torch.Tensor]] = []

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self._caught.extend(weights)

    def take(self) -> list[tuple[str, torch.Tensor]]:
        """What came since the last call, in order."""
        taken, self._caught = self._caught, []
        return taken

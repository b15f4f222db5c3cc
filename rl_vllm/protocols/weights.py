"""Where a refit's bytes come from and how they move."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from rl_vllm.types import (
    TensorSpec,
    WeightUpdate,
)


class WeightSource(Protocol):
    """The trainer's weights under checkpoint names, materialised one at a time."""

    def specs(self) -> tuple[TensorSpec, ...]:
        """Names, dtypes and full shapes of what iteration yields, in order, without moving anything."""
        ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A fresh pass over plain, full tensors, detached."""
        ...


class WeightTransport(Protocol):
    """Moves bytes from the trainer to where engines can load them."""

    name: str

    def stage(self, source: WeightSource, version: int, *, timeout_s: float) -> WeightUpdate:
        """Put one version where every engine can read it, and describe it.

        Raises:
            RefitError: The bytes could not be staged; earlier versions are untouched.
        """
        ...

    def retire(self, version: int) -> None:
        """Every replica serves ``version`` now: older ones may go."""
        ...

    def discard(self, update: WeightUpdate) -> None:
        """Remove a staged version that will not be committed."""
        ...

    def close(self) -> None:
        """Release everything. Idempotent."""
        ...

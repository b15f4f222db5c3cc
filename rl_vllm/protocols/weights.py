"""Where a refit's bytes come from and how they move."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch

from rl_vllm.types import (
    Sending,
    TensorSpec,
    WeightReceiver,
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


@runtime_checkable
class SendingTransport(Protocol):
    """Moves bytes from the trainer's memory to engines that wait for them, while a call on the engines is under way.

    The trainer's own thread sends, because a sharded model is gathered there, while another thread makes the call.
    """

    name: str
    sending: Sending

    def announce(
        self, source: WeightSource, version: int, *, receivers: tuple[WeightReceiver, ...], timeout_s: float
    ) -> WeightUpdate:
        """Describe one version to the receivers, with all they need to join in; no weight moves yet.

        Raises:
            RefitError: There is nothing to send, or no way to reach anyone.
        """
        ...

    def send(self, source: WeightSource, update: WeightUpdate, *, stop: threading.Event, timeout_s: float) -> None:
        """Hand the bytes to every worker of every receiver; returns when each has all of them.

        Args:
            source: As announced.
            update: As returned by :meth:`announce`.
            stop: Set when the engines' call has failed: give up.
            timeout_s: Limit for all of it.

        Raises:
            RefitError: The trainer's side failed (a weight is NaN, the source broke its word, time ran out); whoever
                waits has been told. Names the replicas that did not come.
            ConnectionError: Receivers went away, or ``stop`` was set: their own error says why.
        """
        ...

    def retire(self, version: int) -> None:
        """Every replica serves ``version`` now."""
        ...

    def discard(self, update: WeightUpdate) -> None:
        """Forget an announced version that will not be committed."""
        ...

    def close(self) -> None:
        """Release everything. Idempotent."""
        ...

"""The seam between the trainer, which does not import vLLM, and vLLM's own sender, wrapped in :mod:`rl_vllm.engine`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from rl_vllm.errors import ConfigError
from rl_vllm.protocols.weights import WeightSource

# Resolved when a refit needs it: neither layer imports the other.
VLLM_NCCL_END = "rl_vllm.engine.trainer_end:open_nccl_end"


class Peers(Protocol):
    """The workers, as the sender calls on them; both calls come from a thread of its own."""

    def join(self, facts: Mapping[str, object]) -> None:
        """Tell every worker how to join the group; returns when each has.

        Raises:
            RefitError: They did not within the deadline.
            ConnectionError: One gave up.
        """
        ...

    def receive(self) -> None:
        """Returns when every worker has everything.

        Raises:
            RefitError: They have not within the deadline.
            ConnectionError: One gave up.
        """
        ...


class TrainerEnd(Protocol):
    """The trainer's place in a group that has formed."""

    def send(self) -> None:
        """Send all tensors of the source, from the calling thread; returns when every worker has them.

        Raises:
            Exception: The source's, the peers', or the sender's own.
        """
        ...

    def close(self) -> None:
        """Leave the group; a :meth:`send` under way ends with an error. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """What the trainer decides about a group.

    Attributes:
        host: Where workers reach the trainer.
        world_size: The trainer and all workers.
        bucket_bytes: A packed broadcast ends with the tensor that takes it above this.
        device: The trainer's GPU.
    """

    host: str
    world_size: int
    bucket_bytes: int
    device: torch.device


class TrainerEndOpener(Protocol):
    """Forms the group with the peers' help."""

    def __call__(self, plan: GroupPlan, source: WeightSource, peers: Peers) -> TrainerEnd:
        """Returns when the group has formed; the source is read by :meth:`TrainerEnd.send` only.

        Raises:
            Exception: The peers', or the sender's own.
        """
        ...


def opener_named(name: str) -> TrainerEndOpener:
    """Import ``module:function``.

    Raises:
        ConfigError: What it needs is not installed where the trainer runs.
    """
    module, _, function = name.partition(":")
    try:
        found = vars(importlib.import_module(module))[function]
    except ImportError as error:
        raise ConfigError(
            f"{name} cannot be imported in the trainer's process ({error}): install vLLM there too, or use "
            "transport='broadcast' or transport='shared_storage'"
        ) from error
    return cast(TrainerEndOpener, found)

"""Which way weights go when nobody says: chosen from where trainer and replicas are, and why."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from rl_vllm.protocols import WeightSource, wire
from rl_vllm.types import WeightReceiver
from rl_vllm.weights.lockstep import LeadingSource
from rl_vllm.weights.source import ModuleSource


@dataclass(frozen=True, slots=True, kw_only=True)
class RefitFacts:
    """What the choice is made from.

    Attributes:
        folder: The folder that the caller named, or None.
        receivers: The replicas that are up, at least one.
        is_on_gpu: Whether the trainer's weights are known to lie on a CUDA device.
        has_ray: Whether this process is connected to Ray.
    """

    folder: str | None
    receivers: tuple[WeightReceiver, ...]
    is_on_gpu: bool
    has_ray: bool


@dataclass(frozen=True, slots=True)
class TransportChoice:
    """A way for the weights.

    Attributes:
        name: Of the transport.
        reason: Why it is this one.
        hold: For ``broadcast``: where workers hold a version, see :class:`~rl_vllm.weights.BroadcastTransport`.
    """

    name: str
    reason: str
    hold: wire.Hold = "host"


def choose_transport(facts: RefitFacts) -> TransportChoice:
    """The way that needs least among those that are known to work.

    A folder that was named is used. On one machine its memory is the folder. To other machines, weights on a GPU are
    broadcast into the engines' memory; others go through Ray's object store, of which late replicas can have them too,
    or are broadcast where that does not reach: to replicas that span machines, and without Ray.
    """
    if facts.folder is not None:
        return TransportChoice("shared_storage", f"folder={facts.folder!r} was named")
    if all(receiver.is_here for receiver in facts.receivers):
        return TransportChoice("shared_storage", "every replica is on the trainer's machine")
    elsewhere = _others(facts.receivers)
    if facts.is_on_gpu:
        return TransportChoice("broadcast", f"{elsewhere}, and the trainer's weights are on a GPU", hold="none")
    spread = [receiver.replica for receiver in facts.receivers if not receiver.is_on_one_host]
    if spread:
        return TransportChoice("broadcast", f"{elsewhere}, and {_named(spread)} not whole on one known machine")
    if not facts.has_ray:
        return TransportChoice("broadcast", f"{elsewhere}, and this process is not connected to Ray")
    return TransportChoice("object_store", f"{elsewhere}, and no folder was named")


def gather_facts(
    folder: str | os.PathLike[str] | None, receivers: tuple[WeightReceiver, ...], source: WeightSource
) -> RefitFacts:
    """The facts as they are in this process now."""
    # Not imported for the question: what was never loaded is not connected.
    ray = sys.modules.get("ray")
    return RefitFacts(
        folder=None if folder is None else os.fspath(folder),
        receivers=receivers,
        is_on_gpu=isinstance(source, ModuleSource | LeadingSource) and source.is_on_gpu,
        has_ray=ray is not None and ray.is_initialized(),
    )


def _others(receivers: tuple[WeightReceiver, ...]) -> str:
    known = [receiver.replica for receiver in receivers if receiver.hosts and not receiver.is_here]
    if known:
        return f"{_named(known)} on other machines"
    return f"{_named([receiver.replica for receiver in receivers if not receiver.hosts])} on machines not known"


def _named(replicas: list[int]) -> str:
    listed = ", ".join(map(str, replicas))
    return f"replica {listed} is" if len(replicas) == 1 else f"replicas {listed} are"

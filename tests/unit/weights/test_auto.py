"""Which way weights go when nobody says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rl_vllm.types import WeightReceiver
from rl_vllm.weights import ModuleSource, RefitFacts, choose_transport
from rl_vllm.weights.auto import gather_facts

HERE = WeightReceiver(0, 1, ("localhost",))
ELSEWHERE = WeightReceiver(1, 2, ("node-b",))
SPREAD = WeightReceiver(2, 4, ("node-b", "node-c"))
HALF_HERE = WeightReceiver(3, 4, ("localhost", "node-b"))
UNKNOWN = WeightReceiver(4, 1)


def choice(
    *receivers: WeightReceiver, folder: str | None = None, is_on_gpu: bool = False, has_ray: bool = True
) -> tuple[str, str, str]:
    chosen = choose_transport(RefitFacts(folder=folder, receivers=receivers, is_on_gpu=is_on_gpu, has_ray=has_ray))
    return chosen.name, chosen.hold, chosen.reason


@pytest.mark.parametrize("receivers", [(HERE,), (ELSEWHERE,), (SPREAD, UNKNOWN)])
def test_a_folder_that_was_named_is_used_wherever_replicas_are(receivers: tuple[WeightReceiver, ...]) -> None:
    assert choice(*receivers, folder="/mnt/w", is_on_gpu=True) == (
        "shared_storage",
        "host",
        "folder='/mnt/w' was named",
    )


@pytest.mark.parametrize("is_on_gpu", [False, True])
@pytest.mark.parametrize("has_ray", [False, True])
def test_on_one_machine_its_memory_is_the_folder(is_on_gpu: bool, has_ray: bool) -> None:
    name, _, reason = choice(HERE, HERE, is_on_gpu=is_on_gpu, has_ray=has_ray)
    assert (name, reason) == ("shared_storage", "every replica is on the trainer's machine")


@pytest.mark.parametrize("has_ray", [False, True])
@pytest.mark.parametrize("other", [ELSEWHERE, SPREAD])
def test_weights_on_a_gpu_are_broadcast_into_the_engines_memory(other: WeightReceiver, has_ray: bool) -> None:
    name, hold, reason = choice(HERE, other, is_on_gpu=True, has_ray=has_ray)
    assert (name, hold) == ("broadcast", "none")
    assert reason == f"replica {other.replica} is on other machines, and the trainer's weights are on a GPU"


def test_other_weights_go_through_the_object_store() -> None:
    assert choice(HERE, ELSEWHERE) == (
        "object_store",
        "host",
        "replica 1 is on other machines, and no folder was named",
    )


@pytest.mark.parametrize("spread", [SPREAD, HALF_HERE])
def test_replicas_that_span_machines_are_broadcast_to(spread: WeightReceiver) -> None:
    name, hold, reason = choice(ELSEWHERE, spread)
    assert (name, hold) == ("broadcast", "host")
    assert reason == (
        f"replicas 1, {spread.replica} are on other machines, and replica {spread.replica} is not whole on one known "
        "machine"
    )


def test_without_ray_other_machines_are_broadcast_to() -> None:
    assert choice(ELSEWHERE, has_ray=False) == (
        "broadcast",
        "host",
        "replica 1 is on other machines, and this process is not connected to Ray",
    )


def test_a_replica_whose_machine_nobody_knows_is_not_taken_to_be_here() -> None:
    name, hold, reason = choice(HERE, UNKNOWN)
    assert (name, hold) == ("broadcast", "host")
    assert reason.startswith("replica 4 is on machines not known")


def test_facts_are_gathered_without_connecting_to_ray() -> None:
    facts = gather_facts(None, (HERE,), ModuleSource(nn.Linear(3, 2)))
    assert facts == RefitFacts(folder=None, receivers=(HERE,), is_on_gpu=False, has_ray=False)


def test_a_source_of_ones_own_is_not_taken_to_be_on_a_gpu() -> None:
    class Own:
        def specs(self) -> tuple[()]:
            return ()

        def __iter__(self):
            return iter(())

    assert gather_facts("/mnt/w", (), Own()).is_on_gpu is False


@pytest.mark.parametrize("form", ["module", "state dict"])
def test_weights_on_a_gpu_are_seen(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 2)
    source = ModuleSource(model if form == "module" else dict(model.state_dict()))
    assert not source.is_on_gpu
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: tuple(tensor.shape) == (2,)))
    assert source.is_on_gpu

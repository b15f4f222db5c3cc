"""Refits out of the trainer's own memory: vLLM's CUDA IPC receiver, over a stand-in for the handles alone."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("vllm")

from rl_vllm.config import RefitConfig
from rl_vllm.errors import ConfigError, RefitError
from rl_vllm.protocols import ipc_handles
from rl_vllm.types import InFlight, KVCache, TensorSpec, Verify, WeightUpdate
from rl_vllm.weights import ModuleSource, refit
from rl_vllm.weights.ipc import IPCTransport
from rl_vllm.weights.source import spec_of
from tests.unit.engine.stand_in_gpu import LIMIT_S, NO_GPU, Handles, Workers, gpus, whole_load

__all__ = ["gpus", "whole_load"]
pytestmark = pytest.mark.usefixtures("gpus", "whole_load")


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "byte": torch.tensor([seed, 1, 2], dtype=torch.uint8),
        "scalar": torch.tensor(float(seed)),
        "large": torch.randn(11, 13, generator=generator),
        "half": torch.randn(7, 3, generator=generator).to(torch.bfloat16),
    }


SPECS = tuple(spec_of(name, tensor) for name, tensor in weights().items())


@pytest.fixture
def transport(gpus: Handles) -> Iterator[IPCTransport]:
    made = IPCTransport()
    yield made
    made.close()


def on_the_trainers_gpu(replicas: int = 1, *, gpu: int | None = 0) -> Workers:
    workers = Workers(SPECS, dict.fromkeys(range(replicas), 1), first_gpu=gpu)
    for engine in workers.engines.values():
        engine.device = NO_GPU if gpu is None else torch.device("cpu", gpu)
    return workers


def announced(transport: IPCTransport, sent: dict[str, torch.Tensor], workers: Workers) -> WeightUpdate:
    return transport.announce(ModuleSource(sent), 1, receivers=workers.weight_receivers(), timeout_s=LIMIT_S)


def test_every_replica_on_the_gpu_has_every_bit_three_times_in_a_row(transport: IPCTransport) -> None:
    workers = on_the_trainers_gpu(replicas=2)
    for seed in range(3):
        receipt = refit(workers, ModuleSource(weights(seed)), transport)
        assert (receipt.transport, receipt.version, len(receipt.checksum)) == ("ipc", seed + 1, 16)
        for model in workers.models.values():
            assert all(torch.equal(model.tensors[name], tensor) for name, tensor in weights(seed).items())


def test_nothing_is_copied_but_what_is_cast(transport: IPCTransport) -> None:
    sent = weights()
    workers = on_the_trainers_gpu()
    update = announced(transport, sent, workers)
    workers.stage_weights(update, timeout_s=LIMIT_S)
    # Between staging and committing, which no trainer does: the engines load what the memory holds then.
    sent["large"].fill_(7.0)
    workers.commit_weights(update, in_flight=InFlight.KEEP, kv=KVCache.RECOMPUTE, timeout_s=LIMIT_S)
    assert torch.equal(workers.models[0, 0].tensors["large"], torch.full((11, 13), 7.0))


def test_tensors_that_are_cast_live_until_the_refit_ends(transport: IPCTransport, gpus: Handles) -> None:
    workers = on_the_trainers_gpu()
    trained = {name: tensor.double() if name == "large" else tensor for name, tensor in weights().items()}
    refit(workers, ModuleSource(trained), transport)
    assert torch.equal(workers.models[0, 0].tensors["large"], weights()["large"])
    assert [reference() for reference in gpus._shared.values()] == [None] * len(SPECS)


@pytest.mark.parametrize("ended", ["discarded", "closed"])
def test_memory_that_the_trainer_let_go_of_cannot_be_mapped(transport: IPCTransport, ended: str) -> None:
    workers = on_the_trainers_gpu()
    update = announced(transport, weights(), workers)
    if ended == "discarded":
        transport.discard(update)
    else:
        transport.close()
    with pytest.raises(RefitError, match="cannot be mapped, has it ended"):
        workers.stage_weights(update, timeout_s=LIMIT_S)


def test_a_replica_on_another_gpu_refuses_and_says_where_both_are(transport: IPCTransport) -> None:
    workers = on_the_trainers_gpu(gpu=3)
    with pytest.raises(RefitError, match=r"GPU GPU-3 of host .* on GPU GPU-0 of host .*'vllm_nccl'") as caught:
        refit(workers, ModuleSource(weights()), transport)
    assert caught.value.phase == "stage"
    assert workers.models[0, 0].tensors == {}


def test_an_engine_without_a_gpu_refuses(transport: IPCTransport) -> None:
    with pytest.raises(RefitError, match="computes on cpu, no GPU"):
        refit(on_the_trainers_gpu(gpu=None), ModuleSource(weights()), transport)


def test_replicas_of_several_workers_are_refused_before_a_handle_is_made(
    transport: IPCTransport, gpus: Handles
) -> None:
    with pytest.raises(ConfigError, match=r"replica 1 has 2 workers.*tensor_parallel_size=1"):
        refit(Workers(SPECS, {0: 1, 1: 2}), ModuleSource(weights()), transport)
    assert gpus._shared == {}


def test_other_names_are_told_before_memory_is_mapped(transport: IPCTransport) -> None:
    workers = on_the_trainers_gpu()
    workers.engines[0, 0]._expected = (*SPECS[:-1], TensorSpec("whole", "bfloat16", (7, 3)))
    with pytest.raises(RefitError, match=r"2 tensors are not the model's: half.*whole"):
        refit(workers, ModuleSource(weights()), transport)


def test_memory_that_changed_while_engines_staged_is_found(transport: IPCTransport) -> None:
    sent = weights()
    workers = on_the_trainers_gpu()
    update = announced(transport, sent, workers)
    sent["half"][0, 0] += 1
    with pytest.raises(RefitError, match=r"digest is \w+, the trainer's memory held"):
        workers.stage_weights(update, timeout_s=LIMIT_S)


def test_a_weight_that_is_not_finite_is_named_and_nothing_is_kept(transport: IPCTransport, gpus: Handles) -> None:
    sent = weights()
    sent["half"][3] = float("nan")
    with pytest.raises(RefitError, match="half holds NaN or infinity") as caught:
        refit(on_the_trainers_gpu(), ModuleSource(sent), transport)
    assert caught.value.phase == "check"
    del sent
    assert transport._shared == []


def test_a_load_that_breaks_fails_the_refit_and_the_next_one_repairs(transport: IPCTransport) -> None:
    workers = on_the_trainers_gpu()
    workers.models[0, 0].breaks_at = "large"
    with pytest.raises(RefitError, match="out of memory") as caught:
        refit(workers, ModuleSource(weights()), transport)
    assert caught.value.phase == "commit"
    refit(workers, ModuleSource(weights(1)), transport)
    assert torch.equal(workers.models[0, 0].tensors["large"], weights(1)["large"])


def test_without_checksums_a_refit_must_be_proven_otherwise(gpus: Handles) -> None:
    transport = IPCTransport(checksum=False)
    config = RefitConfig(verify=Verify.NONE)
    assert refit(on_the_trainers_gpu(), ModuleSource(weights()), transport, config=config).checksum == ""
    with pytest.raises(RefitError, match="checksum=True"):
        refit(on_the_trainers_gpu(), ModuleSource(weights()), transport)


def test_a_handle_travels_as_json_and_comes_back_the_same(gpus: Handles) -> None:
    tensor = weights()["half"]
    arguments = gpus.reduce(tensor)[1]
    assert ipc_handles.from_json(json.loads(json.dumps(ipc_handles.to_json(arguments)))) == arguments
    # An empty tensor has no memory to name.
    arguments = (*arguments[:7], None, *arguments[8:])
    assert ipc_handles.from_json(json.loads(json.dumps(ipc_handles.to_json(arguments)))) == arguments


@pytest.mark.parametrize("damage", [{5: "os"}, {7: {"bytes": "§"}}])
def test_what_is_no_handle_is_refused(gpus: Handles, damage: dict[int, object]) -> None:
    encoded = ipc_handles.export_handle(weights()["half"])
    for position, value in damage.items():
        encoded[position] = value
    with pytest.raises(ValueError, match=r"no dtype|ASCII|base64"):
        ipc_handles.from_json(encoded)
    with pytest.raises(ValueError, match="15 parts, got 3"):
        ipc_handles.from_json(encoded[:3])


def test_a_machine_without_gpus_is_told_what_to_use_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"transport='ipc'.*'broadcast' or transport='shared_storage'"):
        IPCTransport()

"""vLLM's NCCL weight transfer in our life of a refit: its own sender and receivers, over a stand-in for NCCL alone."""

from __future__ import annotations

import multiprocessing as mp
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.distributed.weight_transfer.packed_tensor import pack_tensors

from rl_vllm.config import RefitConfig
from rl_vllm.errors import ConfigError, RefitError
from rl_vllm.protocols import gpu, wire
from rl_vllm.protocols.trainer_end import opener_named
from rl_vllm.types import InFlight, KVCache, TensorSpec, Verify, WeightReceiver, WeightUpdate
from rl_vllm.weights import ModuleSource, refit
from rl_vllm.weights.source import spec_of
from rl_vllm.weights.vllm_nccl import VLLMNCCLTransport
from tests.unit.engine.nccl_trainer_to_kill import train
from tests.unit.engine.stand_in_gpu import LIMIT_S, StandInNccl, Workers, gpus, whole_load

__all__ = ["gpus", "whole_load"]
pytestmark = pytest.mark.usefixtures("gpus", "whole_load")

BUCKET_BYTES = 200
SHORT = RefitConfig(stage_timeout_s=5.0, commit_timeout_s=3.0)


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """``large`` is longer than a bucket, and the last ones share one."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "scalar": torch.tensor(float(seed)),
        "empty": torch.empty(0, 5),
        "large": torch.randn(11, 13, generator=generator),
        "half": torch.randn(7, 3, generator=generator).to(torch.bfloat16),
        "odd": torch.randn(5, generator=generator).to(torch.float16),
        "byte": torch.tensor([seed, 1], dtype=torch.uint8),
    }


SPECS = tuple(spec_of(name, tensor) for name, tensor in weights().items())


@pytest.fixture
def transport() -> Iterator[VLLMNCCLTransport]:
    made = VLLMNCCLTransport(address="127.0.0.1", bucket_bytes=BUCKET_BYTES)
    yield made
    made.close()


def assert_all_have(workers: Workers, expected: dict[str, torch.Tensor]) -> None:
    for model in workers.models.values():
        assert list(model.tensors) == list(expected)
        for name, tensor in expected.items():
            assert model.tensors[name].dtype == tensor.dtype
            assert torch.equal(model.tensors[name], tensor)


def test_every_worker_of_every_replica_has_every_bit_three_times_in_a_row(transport: VLLMNCCLTransport) -> None:
    workers = Workers(SPECS, {0: 2, 3: 1})
    for seed in range(3):
        StandInNccl.made.clear()
        receipt = refit(workers, ModuleSource(weights(seed)), transport)
        assert_all_have(workers, weights(seed))
        assert (receipt.transport, receipt.version, receipt.num_tensors) == ("vllm_nccl", seed + 1, 6)
        assert len(receipt.checksum) == 16
        assert all(member.is_left for member in StandInNccl.made)
    assert len(StandInNccl.buses) == 3


@pytest.mark.parametrize(
    ("num_workers", "world_size", "first_ranks"),
    [
        # Tensor parallel 2 on two replicas of which the middle one is gone.
        ({0: 2, 2: 2}, 2, {"0": 1, "2": 3}),
        # Pipeline parallel 2 and two data parallel copies: four workers a replica.
        ({0: 4, 1: 4}, 2, {"0": 1, "1": 5}),
    ],
)
def test_each_worker_has_a_rank_of_its_own_over_all_kinds_of_parallelism(
    transport: VLLMNCCLTransport, num_workers: dict[int, int], world_size: int, first_ranks: dict[str, int]
) -> None:
    workers = Workers(SPECS, num_workers, world_size=world_size)
    refit(workers, ModuleSource(weights()), transport)
    total = 1 + sum(num_workers.values())
    assert sorted(member.rank for member in StandInNccl.made) == list(range(total))
    assert {member.world_size for member in StandInNccl.made} == {total}
    assert wire.ranks_of(workers.weight_receivers()) == (first_ranks, total)


def test_the_group_forms_while_engines_stage_and_bytes_move_while_they_commit(transport: VLLMNCCLTransport) -> None:
    workers = Workers(SPECS, {0: 1})
    source = ModuleSource(weights())
    update = transport.announce(source, 1, receivers=workers.weight_receivers(), timeout_s=LIMIT_S)
    assert StandInNccl.made == []
    workers.stage_weights(update, timeout_s=LIMIT_S)
    (bus,) = StandInNccl.buses.values()
    assert (bus.joined, bus.sent, workers.models[0, 0].tensors) == ({0, 1}, [], {})
    sending = threading.Thread(
        target=transport.send, args=(source, update), kwargs={"stop": threading.Event(), "timeout_s": LIMIT_S}
    )
    sending.start()
    workers.commit_weights(update, in_flight=InFlight.KEEP, kv=KVCache.RECOMPUTE, timeout_s=LIMIT_S)
    sending.join(LIMIT_S)
    assert_all_have(workers, weights())
    assert len(bus.sent) == len(wire.packed_chunks(SPECS, BUCKET_BYTES)) > 1


def test_a_name_that_one_replica_does_not_have_is_told_before_any_group_forms(transport: VLLMNCCLTransport) -> None:
    workers = Workers(SPECS, {0: 1, 1: 1})
    workers.engines[1, 0]._expected = (*SPECS[:-1], TensorSpec("bite", "uint8", (2,)))
    with pytest.raises(RefitError, match=r"replica 1, worker 0: 2 tensors are not the model's: bite.*byte") as caught:
        refit(workers, ModuleSource(weights()), transport)
    assert caught.value.phase == "stage"
    assert StandInNccl.made == []
    assert workers.models[0, 0].tensors == workers.models[1, 0].tensors == {}


def test_who_does_not_come_is_named_at_the_deadline_and_the_next_refit_takes(transport: VLLMNCCLTransport) -> None:
    workers = Workers(SPECS, {0: 1, 1: 1})
    workers.absent = {1}
    with pytest.raises(RefitError, match="replica 1, worker 0 did not come within 4 s"):
        refit(workers, ModuleSource(weights()), transport, config=SHORT)
    assert StandInNccl.made == []
    workers.absent = set()
    refit(workers, ModuleSource(weights(1)), transport)
    assert_all_have(workers, weights(1))


def test_a_group_that_never_forms_leaves_the_old_weights_and_the_next_refit_takes(transport: VLLMNCCLTransport) -> None:
    workers = Workers(SPECS, {0: 1, 1: 1})
    StandInNccl.absent = {2}
    with pytest.raises(RefitError, match=r"replica 1, worker 0 did not join the group within 4 s") as caught:
        refit(workers, ModuleSource(weights()), transport, config=SHORT)
    assert caught.value.phase == "stage"
    assert all(model.tensors == {} for model in workers.models.values())
    for member in StandInNccl.made:
        member.destroy()
    StandInNccl.absent = set()
    refit(workers, ModuleSource(weights(1)), transport)
    assert_all_have(workers, weights(1))


def test_a_load_that_breaks_in_the_middle_ends_everyone_and_the_next_refit_repairs(
    transport: VLLMNCCLTransport,
) -> None:
    workers = Workers(SPECS, {0: 1, 1: 1})
    workers.models[1, 0].breaks_at = "large"
    with pytest.raises(RefitError, match="out of memory") as caught:
        refit(workers, ModuleSource(weights()), transport)
    assert caught.value.phase == "commit"
    assert 1 in caught.value.replicas
    assert "out of memory" in str(workers.engines[1, 0].stage_state()[1])
    assert all(member.is_left for member in StandInNccl.made)
    refit(workers, ModuleSource(weights(1)), transport)
    assert_all_have(workers, weights(1))


def test_a_worker_that_falls_silent_is_named_at_the_deadline(transport: VLLMNCCLTransport) -> None:
    workers = Workers(SPECS, {0: 1, 1: 1})
    StandInNccl.deaf = {2}
    with pytest.raises(RefitError, match=r"did not finish within|a bucket") as caught:
        refit(workers, ModuleSource(weights()), transport, config=SHORT)
    assert caught.value.phase == "commit"
    assert all(member.is_left for member in StandInNccl.made)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_weight_that_is_not_finite_is_named_and_the_workers_are_told(
    transport: VLLMNCCLTransport, bad: float
) -> None:
    workers = Workers(SPECS, {0: 1})
    sent = weights()
    sent["half"][3] = bad
    with pytest.raises(RefitError, match="half holds NaN or infinity") as caught:
        refit(workers, ModuleSource(sent), transport)
    assert caught.value.phase == "check"
    assert "half holds NaN or infinity" in str(workers.engines[0, 0].stage_state()[1])


def test_damaged_bytes_are_named_by_the_worker_that_got_them(transport: VLLMNCCLTransport) -> None:
    workers = Workers(SPECS, {0: 1, 1: 1})
    StandInNccl.damaging = {2}
    with pytest.raises(RefitError, match="scalar arrived damaged") as caught:
        refit(workers, ModuleSource(weights()), transport)
    assert 1 in caught.value.replicas


def test_without_checksums_a_refit_must_be_proven_otherwise() -> None:
    transport = VLLMNCCLTransport(address="127.0.0.1", checksum=False)
    workers = Workers(SPECS, {0: 1})
    assert refit(workers, ModuleSource(weights()), transport, config=RefitConfig(verify=Verify.NONE)).checksum == ""
    with pytest.raises(RefitError, match="checksum=True"):
        refit(workers, ModuleSource(weights()), transport)
    transport.close()


def test_two_members_on_one_gpu_are_refused_by_name(transport: VLLMNCCLTransport) -> None:
    workers = Workers(SPECS, {0: 1}, first_gpu=0)
    with pytest.raises(RefitError, match=r"replica 0, worker 0 and the trainer share the GPU GPU-0.*transport='ipc'"):
        refit(workers, ModuleSource(weights()), transport)
    assert StandInNccl.made == []


def test_an_engine_without_a_gpu_refuses(transport: VLLMNCCLTransport) -> None:
    workers = Workers(SPECS, {0: 1}, first_gpu=None)
    with pytest.raises(RefitError, match="computes on cpu, NCCL needs a GPU: use transport='broadcast'"):
        refit(workers, ModuleSource(weights()), transport)


def test_a_group_that_cannot_be_opened_fails_the_workers_with_the_trainers_words() -> None:
    def unlucky(*_: object) -> Any:
        raise OSError("no port is free")

    transport = VLLMNCCLTransport(address="127.0.0.1", open_end=unlucky)
    with pytest.raises(RefitError, match="no port is free") as caught:
        refit(Workers(SPECS, {0: 1}), ModuleSource(weights()), transport)
    assert caught.value.phase == "stage"
    transport.close()


def test_discarding_tells_workers_that_wait(transport: VLLMNCCLTransport) -> None:
    workers = Workers(SPECS, {0: 1, 1: 1})
    workers.absent = {1}
    update = transport.announce(ModuleSource(weights()), 1, receivers=workers.weight_receivers(), timeout_s=LIMIT_S)
    engine = workers.engines[0, 0]
    engine.stage(update.addressed_to(0))
    transport.discard(update)
    assert wire.wait_until(lambda: engine.stage_state()[1] is not None, lambda: None, wire.Deadline(LIMIT_S))


def test_a_trainer_that_is_killed_fails_its_workers() -> None:
    StandInNccl.is_whole = False
    context = mp.get_context("spawn")
    pipe, theirs = context.Pipe()
    trainer = context.Process(target=train, args=(theirs, list(SPECS)), daemon=True)
    trainer.start()
    theirs.close()
    assert pipe.poll(LIMIT_S)
    update = WeightUpdate(1, "vllm_nccl", pipe.recv(), len(SPECS), 1)
    workers = Workers(SPECS, {0: 1})
    workers.stage_weights(update, timeout_s=LIMIT_S)
    pipe.send("die")
    with pytest.raises(RefitError, match=r"went away|store is gone") as caught:
        workers.commit_weights(update, in_flight=InFlight.KEEP, kv=KVCache.RECOMPUTE, timeout_s=LIMIT_S)
    assert caught.value.phase == "commit"
    assert StandInNccl.made[0].is_left
    trainer.join(LIMIT_S)
    assert trainer.exitcode == -signal.SIGKILL
    trainer.close()
    pipe.close()


def test_our_chunks_are_those_that_vllm_packs() -> None:
    tensors = {
        f"t{i}": torch.zeros(length, dtype=torch.uint8) for i, length in enumerate([50, 150, 1, 0, 201, 200, 1, 1])
    }
    stream = iter(tensors.items())
    packed = []
    while (chunk := pack_tensors(stream, lambda item: item[1], 200)) is not None:
        packed.append(chunk.names)
    specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
    assert [[spec.name for spec in chunk] for chunk in wire.packed_chunks(specs, 200)] == packed


def test_tensors_that_vllm_cannot_unpack_are_refused_before_any_group_forms(transport: VLLMNCCLTransport) -> None:
    sent = {"odd": torch.zeros(3, dtype=torch.uint8), "float": torch.zeros(1)}
    workers = Workers(tuple(spec_of(*item) for item in sent.items()), {0: 1})
    with pytest.raises(RefitError, match=r"float.*byte 3.*transport='broadcast'"):
        refit(workers, ModuleSource(sent), transport)


def test_announcing_nothing_or_to_nobody_is_refused(transport: VLLMNCCLTransport) -> None:
    with pytest.raises(RefitError, match="no replica receives"):
        transport.announce(ModuleSource(weights()), 1, receivers=(), timeout_s=1.0)
    receivers = (WeightReceiver(0, 1),)
    update = transport.announce(ModuleSource(weights()), 1, receivers=receivers, timeout_s=LIMIT_S)
    transport.discard(update)
    with pytest.raises(RefitError, match="call announce first"):
        transport.send(ModuleSource(weights()), update, stop=threading.Event(), timeout_s=1.0)


def test_a_machine_without_gpus_is_told_what_to_use_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"transport='vllm_nccl'.*'broadcast' or transport='shared_storage'"):
        VLLMNCCLTransport()
    assert gpu.gpu_uuid(torch.device("cpu")) == ""


def test_a_trainer_without_vllm_is_told_what_to_use_instead() -> None:
    with pytest.raises(ConfigError, match=r"install vLLM there too.*'broadcast'"):
        opener_named("rl_vllm.engine.not_there:open_nccl_end")

"""Sources of a model that two real processes hold in shards: what is sent is what the whole model would send."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel
from xxhash import xxh3_64_digest

from rl_vllm.config import RefitConfig
from rl_vllm.errors import BadInputError, RefitError
from rl_vllm.testing.fake_service import FakeService
from rl_vllm.testing.models import build_tiny_model
from rl_vllm.types import TensorSpec, Verify, weights_digest
from rl_vllm.weights.lockstep import LeadingSource, join_refit
from rl_vllm.weights.shard_writer import bytes_of
from rl_vllm.weights.shared_storage import SharedStorageTransport
from rl_vllm.weights.source import CastSource, ModuleSource, spec_of
from rl_vllm.weights.update import refit
from tests.unit.processes import run_ranks

NUM_RANKS = 2
LIMIT_S = 240.0
ROWS = [[5, 6, 7, 8], [9, 10, 11]]


def digest(source: ModuleSource | CastSource) -> str:
    return weights_digest(
        (spec_of(name, tensor), int.from_bytes(xxh3_64_digest(bytes_of(tensor)), "big", signed=True))
        for name, tensor in source
    )


def in_half(source: ModuleSource) -> CastSource:
    return CastSource(source, tuple(TensorSpec(spec.name, "bfloat16", spec.shape) for spec in source.specs()))


def trained(path: Path) -> tuple[PreTrainedModel, torch.optim.Optimizer]:
    """The model in shards, after one step of an optimizer whose state is in shards too."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(input_ids=torch.tensor([ROWS[0]])).logits.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def bits_of_state(optimizer: torch.optim.Optimizer) -> list[bytes]:
    return [
        bytes(bytes_of(state[key].to_local()))
        for state in optimizer.state.values()
        for key in ("exp_avg", "exp_avg_sq")
    ]


def one_rank(rank: int, path: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=NUM_RANKS)
    try:
        whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        sharded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for layer in sharded.model.layers:
            fully_shard(layer)
        fully_shard(sharded)
        source, expected = ModuleSource(sharded), ModuleSource(whole)
        assert source.specs() == expected.specs()
        assert digest(source) == digest(expected)
        assert digest(in_half(source)) == digest(in_half(expected))
        for ours, theirs in zip(source.score(ROWS), expected.score(ROWS), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)
        assert digest(source) == digest(expected), "scoring changed what is sent"
        lead_or_join(rank, source, digest(expected), folder)
        keep_the_optimizer(path)
    finally:
        distributed.destroy_process_group()


def lead_or_join(rank: int, source: ModuleSource, expected: str, folder: Path) -> None:
    """A refit that takes, one that is given up in the middle of a pass, and one after it."""
    if rank > 0:
        with pytest.raises(BadInputError, match="rank 1 drives no refit"):
            LeadingSource(source)
        for _ in range(3):
            join_refit(source)
        return
    with pytest.raises(BadInputError, match="rank 0 drives the refit"):
        join_refit(source)
    with LeadingSource(source) as leading:
        service = FakeService(specs=leading.specs())
        transport = SharedStorageTransport(folder / "weights")
        assert leading.can_score
        assert len(leading.score(ROWS)[0]) == len(ROWS[0]) - 1
        receipt = refit(service, leading, transport, config=RefitConfig(verify=Verify.CHECKSUM))
        assert receipt.checksum == expected
    with pytest.raises(RefitError, match="out of time after 1 tensors"), LeadingSource(source) as leading:
        refit(service, leading, transport, config=RefitConfig(stage_timeout_s=1e-9))
    with LeadingSource(source) as leading:
        assert refit(service, leading, transport).checksum == expected
    transport.close()


def keep_the_optimizer(path: Path) -> None:
    model, optimizer = trained(path)
    before = bits_of_state(optimizer)
    assert before
    digest(ModuleSource(model))
    assert bits_of_state(optimizer) == before
    # The optimizer goes on with the parameters it knows.
    model(input_ids=torch.tensor([ROWS[1]])).logits.square().mean().backward()
    sent = digest(ModuleSource(model))
    optimizer.step()
    assert digest(ModuleSource(model)) != sent


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_in_shards_sends_what_the_whole_one_would(tmp_path: Path, tied: bool) -> None:
    path = build_tiny_model(tmp_path / "model", tied=tied, with_tokenizer=False)
    run_ranks(__file__, str(path), str(tmp_path), num_ranks=NUM_RANKS, limit_s=LIMIT_S)


if __name__ == "__main__":
    one_rank(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))

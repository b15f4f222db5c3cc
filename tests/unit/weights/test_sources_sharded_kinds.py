"""Trainers that hold a model in shards inside something else: PEFT's adapters, TorchRL's wrapper, a tensordict."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from tensordict import TensorDict
from tensordict.nn import TensorDictParams
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchrl.modules.llm import TransformersWrapper
from transformers import AutoModelForCausalLM, PreTrainedModel

from rl_vllm.testing.models import build_tiny_model, tiny_tokenizer
from rl_vllm.weights.source import ModuleSource
from tests.unit.processes import run_ranks

NUM_RANKS = 2
LIMIT_S = 240.0


def load(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def with_adapter(model: PreTrainedModel) -> nn.Module:
    """Every rank, and the whole model, draws the same adapter."""
    torch.manual_seed(5)
    config = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(model, config)


def shard(model: nn.Module, layers: nn.ModuleList) -> None:
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)


def same(source: ModuleSource, expected: dict[str, torch.Tensor]) -> None:
    sent = dict(source)
    assert [spec.name for spec in source.specs()] == list(sent)
    assert sent.keys() == expected.keys()
    for name, tensor in sent.items():
        assert not isinstance(tensor, DTensor)
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6, msg=name)


def an_adapted_model(path: Path) -> None:
    # PEFT's own merging is the answer.
    merged = with_adapter(load(path)).merge_and_unload()
    expected = dict(ModuleSource(merged))
    plain = dict(ModuleSource(load(path)))
    changed = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.allclose(expected[changed], plain[changed], atol=1e-3)
    adapted = with_adapter(load(path))
    shard(adapted, adapted.get_base_model().model.layers)
    assert any(isinstance(parameter, DTensor) for parameter in adapted.parameters())
    before = {name: parameter.to_local().clone() for name, parameter in adapted.named_parameters()}
    same(ModuleSource(adapted), expected)
    for name, parameter in adapted.named_parameters():
        assert torch.equal(parameter.to_local(), before[name]), f"sending changed {name}"


def a_wrapped_model(path: Path) -> None:
    model = load(path)
    shard(model, model.model.layers)
    wrapper = TransformersWrapper(
        model, tokenizer=tiny_tokenizer(), input_mode="tokens", generate=False, return_log_probs=True
    )
    same(ModuleSource(wrapper), dict(ModuleSource(load(path))))


def a_tensordict(path: Path) -> None:
    model = load(path)
    shard(model, model.model.layers)
    weights = TensorDictParams(TensorDict(dict(model.named_parameters())), no_convert=True)
    same(ModuleSource(weights), dict(ModuleSource(load(path))))


def one_rank(rank: int, path: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=NUM_RANKS)
    try:
        an_adapted_model(path)
        a_wrapped_model(path)
        a_tensordict(path)
    finally:
        distributed.destroy_process_group()


def test_each_kind_sends_what_the_whole_one_would(tmp_path: Path) -> None:
    path = build_tiny_model(tmp_path / "model", "llama", tied=False, with_tokenizer=False)
    run_ranks(__file__, str(path), str(tmp_path), num_ranks=NUM_RANKS, limit_s=LIMIT_S)


if __name__ == "__main__":
    one_rank(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))

"""Names, dtypes and values that leave a trainer."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictParams
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torchrl.modules.llm import TransformersWrapper
from transformers import PreTrainedModel

from rl_vllm.engine.weight_specs import expected_weights
from rl_vllm.errors import BadInputError, ConfigError
from rl_vllm.testing.models import tiny_tokenizer
from rl_vllm.types import TensorSpec
from rl_vllm.weights.source import CastSource, ModuleSource

from .conftest import checkpoint_of, llama, moe


def sent_by(weights: object) -> dict[str, torch.Tensor]:
    pairs = list(ModuleSource(weights))  # type: ignore[arg-type]
    assert len({name for name, _ in pairs}) == len(pairs), "a name came twice"
    return dict(pairs)


def test_a_tied_head_is_left_out_and_everything_else_is_as_saved(tied_model: PreTrainedModel, tmp_path: Path) -> None:
    sent = sent_by(tied_model)
    assert "lm_head.weight" not in sent
    assert "model.embed_tokens.weight" in sent
    torch.testing.assert_close(sent, checkpoint_of(tied_model, tmp_path), rtol=0, atol=0)


def test_an_untied_head_is_sent(untied_model: PreTrainedModel, tmp_path: Path) -> None:
    sent = sent_by(untied_model)
    assert torch.equal(sent["lm_head.weight"], untied_model.lm_head.weight)
    torch.testing.assert_close(sent, checkpoint_of(untied_model, tmp_path), rtol=0, atol=0)


def test_fused_experts_are_sent_one_by_one_under_checkpoint_names(tmp_path: Path) -> None:
    model = moe()
    sent = sent_by(model)
    fused = model.model.layers[1].mlp.experts
    # transformers keeps [experts, 2 * width, hidden]: the gates first, then the up projections.
    assert torch.equal(sent["model.layers.1.mlp.experts.2.gate_proj.weight"], fused.gate_up_proj[2, :4])
    assert torch.equal(sent["model.layers.1.mlp.experts.2.up_proj.weight"], fused.gate_up_proj[2, 4:])
    assert torch.equal(sent["model.layers.1.mlp.experts.2.down_proj.weight"], fused.down_proj[2])
    assert not any("gate_up_proj" in name for name in sent)
    torch.testing.assert_close(sent, checkpoint_of(model, tmp_path), rtol=0, atol=0)


@pytest.mark.parametrize("model", [llama(tied=True), llama(tied=False), moe()], ids=["tied", "untied", "moe"])
def test_specs_are_what_iteration_yields_and_what_an_engine_expects(model: PreTrainedModel, tmp_path: Path) -> None:
    declared = ModuleSource(model).specs()
    yielded = [
        TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in ModuleSource(model)
    ]
    assert list(declared) == yielded
    model.config.save_pretrained(tmp_path)
    assert set(declared) == set(expected_weights(str(tmp_path), dtype="float32"))


def test_expected_weights_come_in_the_engines_dtype_and_load_nothing(
    tied_model: PreTrainedModel, tmp_path: Path
) -> None:
    tied_model.config.save_pretrained(tmp_path)
    specs = expected_weights(str(tmp_path), dtype="bfloat16")
    assert {spec.dtype for spec in specs} == {"bfloat16"}
    assert TensorSpec("model.layers.0.mlp.up_proj.weight", "bfloat16", (16, 8)) in specs
    assert not any("rotary" in spec.name or spec.name == "lm_head.weight" for spec in specs)


def test_expected_weights_refuse_a_dtype_that_is_none(tied_model: PreTrainedModel, tmp_path: Path) -> None:
    tied_model.config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="'auto'"):
        expected_weights(str(tmp_path), dtype="auto")


def test_lora_is_merged_into_what_is_sent_and_the_trainers_model_is_untouched() -> None:
    model = get_peft_model(llama(tied=True), LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"]))
    base = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight.detach().clone()
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    sent = sent_by(model)

    by_hand = base + 6 / 2 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    torch.testing.assert_close(sent["model.layers.0.self_attn.q_proj.weight"], by_hand)
    assert not torch.allclose(sent["model.layers.0.self_attn.q_proj.weight"], base)
    assert set(sent) == {name for name, _ in ModuleSource(llama(tied=True))}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    reference = copy.deepcopy(model).merge_and_unload()
    torch.testing.assert_close(sent, sent_by(reference))


def test_lora_on_fused_experts_is_merged_expert_by_expert() -> None:
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = get_peft_model(moe(), LoraConfig(r=2, target_modules=["q_proj"], target_parameters=parameters))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    sent = sent_by(model)
    torch.testing.assert_close(sent, sent_by(copy.deepcopy(model).merge_and_unload()))
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    assert not torch.allclose(sent[name], sent_by(moe())[name])


def test_weights_without_data_are_refused() -> None:
    with pytest.raises(BadInputError, match="meta device"):
        sent_by({"a": torch.empty(2, device="meta")})


def test_merged_and_disabled_adapters_are_not_added_again() -> None:
    model = get_peft_model(llama(tied=True), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    name = "model.layers.0.self_attn.q_proj.weight"
    with_adapter = sent_by(model)[name]
    model.merge_adapter()
    torch.testing.assert_close(sent_by(model)[name], with_adapter)
    model.unmerge_adapter()
    model.base_model.disable_adapter_layers()
    torch.testing.assert_close(sent_by(model)[name], sent_by(llama(tied=True))[name])


def test_a_module_that_peft_trains_as_a_whole_is_sent_in_its_trained_copy() -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = get_peft_model(llama(tied=False), config)
    trained = model.base_model.model.lm_head.modules_to_save["default"].weight
    with torch.no_grad():
        trained += 1.0
    sent = sent_by(model)
    assert torch.equal(sent["lm_head.weight"], trained)
    assert set(sent) == {name for name, _ in ModuleSource(llama(tied=False))}


def test_adapters_that_are_no_plain_sum_are_refused() -> None:
    model = get_peft_model(llama(tied=True), LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    with pytest.raises(BadInputError, match="DoRA"):
        ModuleSource(model).specs()


def test_a_wrapper_around_one_model_sends_that_models_names(tied_model: PreTrainedModel) -> None:
    wrapper = TensorDictModule(tied_model, in_keys=["input_ids"], out_keys=["logits"])
    assert set(sent_by(wrapper)) == set(sent_by(tied_model))


def test_torchrls_policy_wrapper_sends_the_model_inside(tied_model: PreTrainedModel) -> None:
    wrapper = TransformersWrapper(
        tied_model, tokenizer=tiny_tokenizer(), input_mode="tokens", generate=False, return_log_probs=True
    )
    assert set(sent_by(wrapper)) == set(sent_by(tied_model))


def test_a_sharded_tensor_leaves_whole_and_plain(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        whole = torch.arange(6.0).view(3, 2)
        sent = sent_by({"a": distribute_tensor(whole, mesh, [Shard(0)])})
        assert type(sent["a"]) is torch.Tensor
        assert torch.equal(sent["a"], whole)
    finally:
        torch.distributed.destroy_process_group()


def test_a_module_with_two_models_is_refused_and_both_are_named() -> None:
    both = nn.ModuleDict({"actor": llama(tied=True), "critic": llama(tied=True)})
    with pytest.raises(BadInputError, match=r"actor .*critic"):
        ModuleSource(both)


def test_a_loss_that_holds_parameters_outside_its_network_is_refused() -> None:
    loss = nn.Module()
    loss.actor_network_params = TensorDictParams(TensorDict({"weight": torch.ones(2)}))
    with pytest.raises(BadInputError, match="pass the policy"):
        ModuleSource(loss)


@pytest.mark.parametrize("weights", [nn.Identity(), {}, 3], ids=["no parameters", "empty", "no weights at all"])
def test_nothing_to_send_is_refused(weights: object) -> None:
    with pytest.raises(BadInputError):
        ModuleSource(weights)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"a.b": None}, "a.b in the state dict is a NoneType, not a tensor"),
        ({"a.b": torch.zeros(2).numpy()}, "a.b in the state dict is a ndarray, not a tensor: convert it"),
        ({3: torch.zeros(2)}, "the state dict has the key 3"),
    ],
)
def test_an_entry_that_is_no_named_tensor_is_refused_by_name(entry: dict[object, object], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        ModuleSource({"a.a": torch.zeros(2)} | entry)  # type: ignore[arg-type]


def test_state_dicts_and_tensordicts_send_their_entries_without_the_tied_head() -> None:
    embedding = torch.arange(6.0).view(3, 2)
    state = {"model.embed_tokens.weight": embedding, "mtp.lm_head.weight": embedding, "lm_head.weight": embedding}
    assert list(sent_by(state)) == ["model.embed_tokens.weight", "mtp.lm_head.weight"]
    assert list(sent_by(state | {"lm_head.weight": embedding.clone()})) == list(state)
    nested = TensorDict({"model": {"embed_tokens": {"weight": embedding}}})
    assert torch.equal(sent_by(nested)["model.embed_tokens.weight"], embedding)


def test_a_head_with_storage_of_its_own_is_left_out_only_while_it_equals_the_embedding() -> None:
    model = llama(tied=True)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    assert "lm_head.weight" not in sent_by(model)
    with torch.no_grad():
        model.lm_head.weight += 1.0
    assert "lm_head.weight" in sent_by(model)


def test_every_pass_reads_the_weights_of_that_moment(tied_model: PreTrainedModel) -> None:
    source = ModuleSource(tied_model)
    first = dict(source)["model.norm.weight"].clone()
    with torch.no_grad():
        tied_model.model.norm.weight += 2.0
    assert torch.equal(dict(source)["model.norm.weight"], first + 2.0)


def test_what_leaves_is_plain_detached_and_contiguous(tied_model: PreTrainedModel) -> None:
    with torch.no_grad():
        tied_model.model.layers[0].mlp.up_proj.weight.data = torch.arange(128.0).view(8, 16).t()
    for tensor in sent_by(tied_model).values():
        assert tensor.is_contiguous()
        assert not tensor.requires_grad


def test_a_cast_source_declares_and_sends_the_engines_dtypes() -> None:
    source = ModuleSource({"a": torch.tensor([1.0, 1.001]), "b": torch.ones(1, dtype=torch.bfloat16)})
    cast = CastSource(source, (TensorSpec("a", "bfloat16", (2,)), TensorSpec("b", "float32", (1,))))
    assert cast.specs() == (TensorSpec("a", "bfloat16", (2,)), TensorSpec("b", "float32", (1,)))
    sent = dict(cast)
    # bfloat16 has eight bits of precision: 1.001 rounds to 1.
    assert sent["a"].dtype == torch.bfloat16
    assert sent["a"].tolist() == [1.0, 1.0]
    assert sent["b"].dtype == torch.float32

"""What trainers make of a model in shards: adapters, wrappers, tensordicts, optimizers.

Two processes go through all cases once; each test asks for one of them.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tensordict import TensorDict
from tensordict.nn import TensorDictParams
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torchrl.modules.llm import TransformersWrapper
from torchrl.modules.llm.policies import Masks, Tokens
from transformers import PreTrainedModel

from rl_vllm.testing.models import tiny_tokenizer
from rl_vllm.weights.lockstep import LeadingSource, join_refit
from rl_vllm.weights.source import ModuleSource, spec_of
from tests.unit.processes import run_ranks

from .conftest import checkpoint_of, llama, moe

Case: TypeAlias = Callable[[int, Path], None]
NUM_RANKS = 2
LIMIT_S = 240.0
ROWS = [[5, 6, 7, 8], [9, 10, 11]]
IDS = torch.tensor([ROWS[0]])


def shard(model: PreTrainedModel, root: nn.Module | None = None) -> None:
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model if root is None else root)


def adapted(model: PreTrainedModel, **settings: Any) -> PeftModel:
    """With random adapters, the same each time; their rank does not divide among the processes."""
    adapted = get_peft_model(model, LoraConfig(**{"r": 3, "target_modules": ["q_proj", "down_proj"]} | settings))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return adapted


def wrapped(model: nn.Module) -> TransformersWrapper:
    return TransformersWrapper(
        model, tokenizer=tiny_tokenizer(), input_mode="tokens", generate=False, return_log_probs=True
    )


def expect_sent(rank: int, weights: nn.Module, expected: PreTrainedModel, folder: Path) -> None:
    """Rank 0 gets the checkpoint of ``expected``, as transformers writes it."""
    source = ModuleSource(weights)
    if rank > 0:
        join_refit(source)
        return
    with LeadingSource(source) as leading:
        declared, sent = leading.specs(), dict(leading)
    assert tuple(spec_of(*item) for item in sent.items()) == declared
    assert {type(tensor) for tensor in sent.values()} == {torch.Tensor}
    torch.testing.assert_close(sent, checkpoint_of(expected, folder))


def expect_scores(weights: nn.Module, expected: PreTrainedModel) -> None:
    for ours, theirs in zip(ModuleSource(weights).score(ROWS), ModuleSource(expected).score(ROWS), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def adapters_in_shards(rank: int, folder: Path) -> None:
    for tied, settings in ((True, {}), (False, {"modules_to_save": ["lm_head"]})):
        model = adapted(llama(tied=tied), **settings)
        shard(model.base_model.model, root=model)
        expected = adapted(llama(tied=tied), **settings).merge_and_unload()
        expect_sent(rank, model, expected, folder)
        expect_scores(model, expected)
        # A forward without backward leaves the root's parameters gathered.
        model(input_ids=IDS)
        expect_sent(rank, model, expected, folder)


def adapters_on_a_base_in_shards(rank: int, folder: Path) -> None:
    base = llama(tied=True)
    shard(base)
    model, expected = adapted(base), adapted(llama(tied=True)).merge_and_unload()
    expect_sent(rank, model, expected, folder)
    expect_scores(model, expected)


def adapters_of_experts(rank: int, folder: Path) -> None:
    settings = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    model = adapted(moe(), target_modules=["q_proj"], **settings)
    assert model.config.num_experts % NUM_RANKS
    shard(model.base_model.model, root=model)
    expect_sent(rank, model, adapted(moe(), target_modules=["q_proj"], **settings).merge_and_unload(), folder)


def torchrls_wrapper(rank: int, folder: Path) -> None:
    plain, lora = llama(tied=True), adapted(llama(tied=True))
    shard(plain)
    shard(lora.base_model.model, root=lora)
    for model, expected in ((plain, llama(tied=True)), (lora, adapted(llama(tied=True)).merge_and_unload())):
        policy = wrapped(model)
        masks = Masks(all_attention_mask=torch.ones_like(IDS, dtype=torch.bool), batch_size=(1,))
        policy(TensorDict(tokens=Tokens(full=IDS, batch_size=(1,)), masks=masks, batch_size=(1,)))
        expect_sent(rank, policy, expected, folder)
        expect_scores(policy, expected)


def wrapper_that_is_the_root(rank: int, folder: Path) -> None:
    model = llama(tied=True)
    policy = wrapped(model)
    shard(model, root=policy)
    expect_sent(rank, policy, llama(tied=True), folder)
    assert not ModuleSource(policy).can_score


def tensordict_of_parameters(rank: int, folder: Path) -> None:
    model, expected = llama(tied=True), llama(tied=True)
    shard(model)
    parameters = TensorDictParams(TensorDict(dict(model.named_parameters())).unflatten_keys("."))
    expect_sent(rank, parameters, expected, folder)
    with torch.no_grad():
        for parameter in (*model.parameters(), *expected.parameters()):
            parameter += 1.0
    expect_sent(rank, parameters, expected, folder)


def training_goes_on(rank: int, folder: Path) -> None:
    """Both ranks train on the same rows: the mean of their gradients is what a whole model has."""
    plain, lora = llama(tied=True), adapted(llama(tied=True))
    for model in (plain, lora):
        whole = copy.deepcopy(model)
        inner = lora.base_model.model if model is lora else model
        shard(inner, root=model)
        models = (model, whole)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in models]
        for each, optimizer in zip(models, optimizers, strict=True):
            backward(each)
            optimizer.step()
            optimizer.zero_grad()
            backward(each)
        before = memory_of(optimizers[0])
        expect_sent(rank, model, merged(whole), folder)
        expect_scores(model, merged(whole))
        assert memory_of(optimizers[0]) == before
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(model(input_ids=IDS).logits, whole(input_ids=IDS).logits)
        expect_sent(rank, model, merged(whole), folder)


def backward(model: nn.Module) -> None:
    model(input_ids=IDS).logits.square().mean().backward()


def merged(model: nn.Module) -> PreTrainedModel:
    model = copy.deepcopy(model)
    return model.merge_and_unload() if isinstance(model, PeftModel) else model


def memory_of(optimizer: torch.optim.Optimizer) -> list[object]:
    """Which tensors it works on, where they are, and their values."""
    tensors = [
        tensor
        for parameter, state in optimizer.state.items()
        for tensor in (parameter, parameter.grad, state["momentum_buffer"])
    ]
    assert tensors
    return [(id(tensor), tensor.to_local().data_ptr(), tensor.to_local().tolist()) for tensor in tensors]


CASES: tuple[Case, ...] = (
    adapters_in_shards,
    adapters_on_a_base_in_shards,
    adapters_of_experts,
    torchrls_wrapper,
    wrapper_that_is_the_root,
    tensordict_of_parameters,
    training_goes_on,
)


@pytest.fixture(scope="module")
def expect_done(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], None]:
    folder, said = tmp_path_factory.mktemp("ranks"), ""
    try:
        run_ranks(__file__, str(folder), num_ranks=NUM_RANKS, limit_s=LIMIT_S)
    except AssertionError as error:
        said = str(error)

    def expect(case: Case) -> None:
        # The ranks end at the first case that fails.
        assert all((folder / f"{case.__name__}.{rank}").exists() for rank in range(NUM_RANKS)), said

    return expect


def one_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=NUM_RANKS)
    try:
        for case in CASES:
            case(rank, folder / "checkpoint")
            (folder / f"{case.__name__}.{rank}").touch()
    finally:
        distributed.destroy_process_group()


def test_adapters_in_shards_are_merged_into_a_base_in_shards_as_peft_merges_them(
    expect_done: Callable[[Case], None],
) -> None:
    expect_done(adapters_in_shards)


def test_whole_adapters_are_merged_into_a_base_in_shards(expect_done: Callable[[Case], None]) -> None:
    expect_done(adapters_on_a_base_in_shards)


def test_adapters_of_experts_that_do_not_divide_among_the_ranks_are_merged(
    expect_done: Callable[[Case], None],
) -> None:
    expect_done(adapters_of_experts)


def test_torchrls_policy_wrapper_sends_the_model_in_shards_inside(expect_done: Callable[[Case], None]) -> None:
    expect_done(torchrls_wrapper)


def test_a_wrapper_that_gathers_the_shards_itself_is_sent_and_does_not_claim_to_score(
    expect_done: Callable[[Case], None],
) -> None:
    expect_done(wrapper_that_is_the_root)


def test_parameters_in_shards_in_a_tensordict_are_sent_as_they_are_at_the_time(
    expect_done: Callable[[Case], None],
) -> None:
    expect_done(tensordict_of_parameters)


def test_sending_and_scoring_leave_an_optimizer_in_shards_as_it_was_and_training_goes_on(
    expect_done: Callable[[Case], None],
) -> None:
    expect_done(training_goes_on)


if __name__ == "__main__":
    one_rank(int(sys.argv[1]), Path(sys.argv[2]))

"""A second set of a model's parameters, on modules without kernels; the matrix of refits has vLLM's models."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)

from rl_vllm.engine.back_buffer import BackBuffer, is_supported, num_bytes
from tests.unit.engine.toy_model import LOADED, Model, Scaled, X, answer, weights


def test_the_model_computes_from_the_old_weights_until_the_swap() -> None:
    model = Model()
    assert is_supported(model)
    assert num_bytes(model) == 4 * (16 + 4 + 4)
    parameters = dict(model.named_parameters())
    for value in (1.0, 3.0):
        buffer = BackBuffer(model)
        before, num_loads = model(X).clone(), model.first.num_loads
        buffer.load(weights(value).items())
        assert torch.equal(model(X), before)
        assert model.first.num_loads == num_loads
        buffer.swap()
        assert torch.equal(model(X), torch.full((1, 4), answer(value)))
    # The objects stay: whoever holds one, a captured graph for example, computes from the new values.
    assert {name: id(each) for name, each in model.named_parameters()} == {
        name: id(each) for name, each in parameters.items()
    }
    assert model.second.weight is model.first.weight
    assert torch.equal(model.first.table, torch.arange(3.0))


def test_parameters_that_were_loaded_do_not_wait_for_pythons_search_for_cycles() -> None:
    model = Model()
    LOADED.clear()
    gc.disable()
    try:
        buffer = BackBuffer(model)
        buffer.load(weights(1.0).items())
        assert all(parameter() is not None for parameter in LOADED)
        buffer.swap()
        buffer.close()
        buffer.close()
        assert [parameter() for parameter in LOADED] == [None] * 3
    finally:
        gc.enable()
    assert torch.equal(model(X), torch.full((1, 4), answer(1.0)))


def test_it_loads_again_after_a_reload_in_place() -> None:
    model = Model()
    initialize_layerwise_reload(model)
    model.load_weights({**weights(1.0), "second.weight": torch.ones(4, 4)}.items())
    finalize_layerwise_reload(model, None)
    buffer = BackBuffer(model)
    buffer.load(weights(3.0).items())
    buffer.swap()
    assert torch.equal(model(X), torch.full((1, 4), answer(3.0)))


@pytest.mark.parametrize("missing", ["first.weight", "second.bias"])
def test_a_parameter_without_weights_is_named_and_nothing_changes(missing: str) -> None:
    model = Model()
    before = model(X).clone()
    buffer = BackBuffer(model)
    some = {name: tensor for name, tensor in weights(1.0).items() if name != missing}
    with pytest.raises(RuntimeError, match=f"1 parameters got no weights or only some, for example {missing}"):
        buffer.load(some.items())
    assert torch.equal(model(X), before)


def test_a_part_of_a_parameter_without_weights_is_noticed() -> None:
    model = Model()

    def load_half(param: nn.Parameter, loaded: torch.Tensor) -> None:
        param.data[:2].copy_(loaded[:2])

    model.first.weight.weight_loader = load_half
    record_metadata_for_reloading(model)
    with pytest.raises(RuntimeError, match=r"first\.weight"):
        BackBuffer(model).load(weights(1.0).items())


def test_a_layer_with_a_post_load_step_that_is_not_known_is_not_supported() -> None:
    class Packed(Scaled):
        def process_weights_after_loading(self) -> None: ...

    model = Model()
    model.second = Packed(4)
    record_metadata_for_reloading(model)
    assert not is_supported(model)


def test_a_parameter_that_came_after_the_first_load_is_not_supported() -> None:
    model = Model()
    model.first.scale = nn.Parameter(torch.ones(1), requires_grad=False)
    assert not is_supported(model)

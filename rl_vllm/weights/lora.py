"""LoRA adapters folded into the tensors that are sent; the trainer's model is not touched.

The identity is PEFT's own: the merged weight is ``W + sum over active adapters of scaling * B @ A``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.func import functional_call

from rl_vllm.errors import BadInputError
from rl_vllm.weights import sharded

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import ModulesToSaveWrapper

Delta = Callable[[], torch.Tensor]


def is_adapted(module: nn.Module) -> bool:
    """Whether PEFT has put layers of its own into ``module``."""
    return any(type(child).__module__.startswith("peft.") for child in module.modules())


def is_peft_model(module: nn.Module) -> bool:
    """Whether ``module`` is what ``get_peft_model`` returns, which is called as the model inside is."""
    if not is_adapted(module):
        return False
    from peft import PeftModel

    return isinstance(module, PeftModel)


def refuse_prompt_learning(module: nn.Module) -> None:
    """Raise :class:`BadInputError` for adapters that add virtual tokens, which no weight can carry."""
    from peft import PeftModel

    for child in module.modules():
        if isinstance(child, PeftModel) and child.active_peft_config.is_prompt_learning:
            raise BadInputError(
                f"adapter {child.active_adapter!r} learns a prompt ({child.active_peft_config.peft_type}), which "
                "cannot be merged into weights: train with LoRA"
            )


def base_state(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, list[Delta]]]:
    """The model's tensors under the names they had before PEFT, and what to add to some of them.

    Returns:
        The tensors by name, and for each adapted one its additions, computed when called.

    Raises:
        BadInputError: An active adapter is of a kind that is not a plain sum, for example DoRA.
    """
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    deltas: dict[str, list[Delta]] = {}
    replaced: dict[str, str] = {}
    skipped: list[str] = []
    for path, child in model.named_modules():
        if isinstance(child, LoraLayer):
            name, additions = _lora_additions(path, child)
            deltas.setdefault(name, []).extend(additions)
            skipped += [f"{path}.{attribute}." for attribute in child.adapter_layer_names]
        elif isinstance(child, ModulesToSaveWrapper):
            _replace_saved_module(path, child, replaced, skipped)
        elif isinstance(child, AuxiliaryTrainingWrapper | BaseTunerLayer):
            raise BadInputError(
                f"{path} is adapted by {type(child).__name__}, which cannot be merged here: use LoRA, or merge it "
                "yourself and pass the merged model"
            )
    tensors = _plain_names(model.state_dict(), replaced, tuple(skipped))
    return tensors, {name: additions for name, additions in deltas.items() if additions}


def _lora_additions(path: str, layer: LoraLayer) -> tuple[str, list[Delta]]:
    from peft.tuners.lora.layer import Embedding, Linear, ParamWrapper

    parameter = layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
    name = _without_wrappers(f"{path}.{parameter}")
    if layer.disable_adapters:
        return name, []
    present = set(layer.lora_A) | set(layer.lora_embedding_A)
    pending = [name for name in layer.active_adapters if name in present and name not in layer.merged_adapters]
    for adapter in pending:
        plain = isinstance(layer, Linear | Embedding | ParamWrapper) and adapter not in layer.lora_variant
        if not plain or layer.lora_bias.get(adapter, False):
            raise BadInputError(
                f"{path}: adapter {adapter!r} is not plain LoRA on a linear layer or embedding (DoRA, a trained bias "
                "or another layer type): merge it yourself and pass the merged model"
            )

    return name, [partial(_delta, layer, adapter) for adapter in pending]


def _delta(layer: LoraLayer, adapter: str) -> torch.Tensor:
    """PEFT's own, from whole factors: it views those of experts in ways that uneven shards do not have."""
    factors = tuple(f"{part}.{adapter}" for part in layer.adapter_layer_names)
    whole = {
        f"layer.{name}": sharded.full(factor.detach())
        for name, factor in layer.named_parameters()
        if name.startswith(factors)
    }
    delta: torch.Tensor = functional_call(_DeltaOf(layer, adapter), whole, ())
    return delta


class _DeltaOf(nn.Module):
    def __init__(self, layer: LoraLayer, adapter: str) -> None:
        super().__init__()
        self.layer = layer
        self._adapter = adapter

    def forward(self) -> torch.Tensor:
        delta: torch.Tensor = self.layer.get_delta_weight(self._adapter)
        return delta


def _replace_saved_module(
    path: str, wrapper: ModulesToSaveWrapper, replaced: dict[str, str], skipped: list[str]
) -> None:
    """Map the copy that is in use to the module's own name, and leave the other copies out."""
    active = [name for name in wrapper.active_adapters if name in wrapper.modules_to_save]
    used = f"{path}.original_module."
    if active and not wrapper.disable_adapters:
        used = f"{path}.modules_to_save.{active[0]}."
    replaced[used] = f"{path}."
    skipped += [f"{path}.original_module.", f"{path}.modules_to_save."]


def _plain_names(
    state: Mapping[str, torch.Tensor], replaced: Mapping[str, str], skipped: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        used = next((prefix for prefix in replaced if name.startswith(prefix)), None)
        if used is not None:
            tensors[_without_wrappers(replaced[used] + name.removeprefix(used))] = tensor
        elif not name.startswith(skipped):
            tensors[_without_wrappers(name)] = tensor
    return tensors


def _without_wrappers(name: str) -> str:
    # Wrappers nest when one layer has several adapted parameters.
    return re.sub(r"(\.base_layer)+\.", ".", name)

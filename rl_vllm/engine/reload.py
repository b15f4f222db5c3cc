"""Load a whole model's weights through vLLM's layerwise reload, with the corrections that vLLM 0.32 needs.

1. A tied output head is not loaded by name, so the reload puts it back as it was; on a CPU it computes from a repacked
   copy of the old embedding. Its post-load step runs again after the embedding has changed.
2. Unquantised MoE experts on a CPU are repacked on the first load and left unpacked by later ones. Their kernel's own
   post-load step runs again; and weights that it padded get their loadable shape back before the reload.
3. Layers without weights of their own (rotary tables) and tied heads are reported as "Failed to load weights". They are
   told apart beforehand, so that the report, here an error, means what it says.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform


@torch.no_grad()
def load_whole_model(model: nn.Module, model_config: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Replace every weight of ``model``.

    Args:
        model: As vLLM built and loaded it.
        model_config: vLLM's ``ModelConfig``.
        weights: Checkpoint names and full tensors, all of the model's; they may be views over mapped files.

    Raises:
        RuntimeError: A layer got no weights.
        Exception: Whatever a layer's loader raises. In both cases the model has weights of both versions, and the next
            call can replace them all.
    """
    tied_heads = _tied_heads(model)
    experts = repacked_experts(model)
    for layer in experts:
        _give_back_loadable_shapes(layer)
    initialize_layerwise_reload(model)
    try:
        for layer in model.modules():
            if layer in tied_heads or not any(True for _ in layer.parameters(recurse=False)):
                get_layerwise_info(layer).load_numel_total = 0
        model.load_weights(weights)  # type: ignore[operator]
        _require_all_loaded(model)
    finally:
        finalize_layerwise_reload(model, model_config)
    for head in tied_heads:
        head.quant_method.process_weights_after_loading(head)  # type: ignore[union-attr, operator]
    for layer in experts:
        layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def _tied_heads(model: nn.Module) -> list[nn.Module]:
    """Output heads whose weight is another layer's parameter."""
    owners: dict[int, list[nn.Module]] = {}
    for layer in model.modules():
        for parameter in layer.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(layer)
    return [
        layer
        for layers in owners.values()
        for layer in layers
        if isinstance(layer, ParallelLMHead) and any(not isinstance(other, ParallelLMHead) for other in layers)
    ]


def repacked_experts(model: nn.Module) -> list[Any]:
    """Experts that a CPU computes from a packed copy, which later loads leave to their kernel's own post-load step."""
    if not current_platform.is_cpu():
        return []
    return [
        layer
        for layer in model.modules()
        if isinstance(layer, RoutedExperts) and isinstance(layer.quant_method, UnquantizedFusedMoEMethod)
    ]


def _give_back_loadable_shapes(layer: Any) -> None:
    """Padding by the CPU kernel changed shapes, and a reload copies into the parameters that it finds."""
    loadable, _ = get_layerwise_info(layer).restore_metadata
    for name, parameter in list(layer.named_parameters(recurse=False)):
        if name in loadable and parameter.shape != loadable[name].shape:
            parameter.data = torch.empty(loadable[name].shape, dtype=parameter.dtype, device=parameter.device)


def _require_all_loaded(model: nn.Module) -> None:
    """Raise for layers that wait for weights: what is loaded completely has left this state."""
    starved = [
        name
        for name, layer in model.named_modules()
        if not is_deferred_attention_layer(layer)
        and get_layerwise_info(layer).load_numel == 0
        and (get_layerwise_info(layer).load_numel_total or 0) > 0
    ]
    if starved:
        raise RuntimeError(f"{len(starved)} layers got no weights, for example {starved[0]}")

"""Double buffering of a model's weights: new ones are loaded and packed beside those in use, then change places.

vLLM's reload works on the layers that serve, so generation has to wait for all of it. Here copies of the layers, which
share everything with them but their parameters, go through vLLM's first loading: allocate, load, post-process. What is
left for the pause is to hand the results over.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS
from vllm.model_executor.model_loader.reload.sanitize import layer_ref_sentinel
from vllm.platforms import current_platform

from rl_vllm.engine.reload import repacked_experts

# Whose post-load steps are known to change nothing but the layer that they are given.
_KNOWN_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)
_POST_LOAD_STEP = "process_weights_after_loading"
_NUM_SAMPLES = 256
_STRUCTURE = ("_parameters", "_buffers", "_modules")


def is_supported(model: nn.Module) -> bool:
    """Whether everything that turns this model's checkpoint into what its layers compute from is known here."""
    return all(_is_known(layer) for layer in model.modules())


def _is_known(layer: nn.Module) -> bool:
    loadable, _ = get_layerwise_info(layer).restore_metadata
    if not loadable.keys() >= {name for name, value in layer._parameters.items() if value is not None} - SKIP_TENSORS:
        return False
    method = _method_of(layer)
    if isinstance(layer, _KNOWN_METHODS) or isinstance(method, QuantizeMethodBase):
        return isinstance(layer, _KNOWN_METHODS) or isinstance(method, _KNOWN_METHODS)
    return type(layer) is Attention or not any(_POST_LOAD_STEP in vars(base) for base in type(layer).__mro__)


def _method_of(layer: nn.Module) -> object:
    """What loads and computes for the layer: an attribute, or a module of its own."""
    return vars(layer).get("quant_method") or layer._modules.get("quant_method")


def num_bytes(model: nn.Module) -> int:
    """Bytes that a second set of the model's parameters needs."""
    sizes: dict[int, int] = {}
    for layer in model.modules():
        loadable, _ = get_layerwise_info(layer).restore_metadata
        for name, parameter in layer._parameters.items():
            if parameter is not None:
                like = loadable.get(name, parameter)
                sizes[id(parameter)] = like.numel() * like.element_size()
    return sum(sizes.values())


class BackBuffer:
    """A second set of one model's parameters.

    Args:
        model: The model that serves, as vLLM built and loaded it; :func:`is_supported` says whether it will do.
    """

    def __init__(self, model: nn.Module) -> None:
        self._front = model
        self._backs: dict[int, nn.Module] = {}
        self._back = self._copy(model)
        self._attributes = {id(layer): dict(vars(layer)) for layer in self._back.modules()}

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load and post-process a checkpoint's weights; the model that serves is not touched.

        Raises:
            RuntimeError: A parameter got no weights, or only some, or its layout changed.
            Exception: Whatever a layer's loader raises.
        """
        _return_freed_memory()
        # Layers that compute from one parameter go on to do so: each gets it, one loads it.
        shared: dict[int, nn.Parameter] = {}
        for layer in self._front.modules():
            self._allocate(layer, shared)
        self._back.load_weights(weights)  # type: ignore[operator]
        self._require_all_loaded()
        for front, back in self._pairs():
            method = _method_of(back)
            if type(back) is VocabParallelEmbedding and current_platform.is_cpu():
                vars(back)["cpu_linear"] = _PackedAtFirstUse(front, method)
            elif isinstance(method, _KNOWN_METHODS):
                method.process_weights_after_loading(back)
        for experts in repacked_experts(self._back):
            experts.quant_method.moe_kernel.fused_experts.process_weights_after_loading(experts)
        self._require_same_layout()
        _return_freed_memory()

    @torch.no_grad()
    def swap(self) -> None:
        """Have the model compute from what was loaded; generation must be paused.

        On a CPU memory changes hands. On a GPU values are copied, because captured graphs know the old addresses.
        """
        for front, back in self._pairs():
            for name, parameter in front._parameters.items():
                new = back._parameters[name]
                if parameter is None or new is None or parameter is new:
                    continue
                if parameter.device.type == "cpu":
                    parameter.data = new.data
                else:
                    parameter.data.copy_(new.data)
            before = self._attributes[id(back)]
            for name, value in vars(back).items():
                # What post-load steps made of the weights: packed copies, kernels over them.
                if name not in _STRUCTURE and value is not before.get(name, before):
                    setattr(front, name, value)

    def close(self) -> None:
        """Let go of the second set; nothing else can be done with it then. Idempotent.

        Parameters know their layers, as vLLM's loaders need it, and would keep each other until Python looks for
        cycles: whole versions of the weights could pile up before.
        """
        for back in self._backs.values():
            vars(back).clear()
        self._attributes.clear()

    def _copy(self, layer: nn.Module) -> nn.Module:
        """The layer and those below, with places of their own for parameters; everything else is shared."""
        if id(layer) in self._backs:
            return self._backs[id(layer)]
        back = object.__new__(type(layer))
        self._backs[id(layer)] = back
        vars(back).update(vars(layer))
        vars(back)["_parameters"] = dict(layer._parameters)
        vars(back)["_buffers"] = dict(layer._buffers)
        vars(back)["_modules"] = {
            name: None if child is None else self._copy(child) for name, child in layer._modules.items()
        }
        return back

    def _allocate(self, front: nn.Module, shared: dict[int, nn.Parameter]) -> None:
        back = self._backs[id(front)]
        loadable, _ = get_layerwise_info(front).restore_metadata
        with get_layerwise_info(front).restore_device:
            for name, parameter in front._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in shared:
                    shared[id(parameter)] = _allocated(parameter, loadable.get(name), front, back)
                back._parameters[name] = shared[id(parameter)]

    def _require_all_loaded(self) -> None:
        starved = [name for name, parameter in self._back.named_parameters() if bool(_sample(parameter).isnan().any())]
        if starved:
            raise RuntimeError(
                f"{len(starved)} parameters got no weights or only some, for example {starved[0]}; what the checkpoint "
                "lacks is kept with RefitConfig(double_buffer=False)"
            )

    def _require_same_layout(self) -> None:
        """Raise before anything is swapped: a swap that fails half-way would leave a mixture."""
        for front, back in self._pairs():
            for name, parameter in front._parameters.items():
                new = back._parameters.get(name)
                if parameter is not None and (
                    new is None or (new.shape, new.dtype) != (parameter.shape, parameter.dtype)
                ):
                    raise RuntimeError(f"{type(front).__name__}.{name} is {parameter.shape}, loaded again it is {new}")

    def _pairs(self) -> Iterator[tuple[nn.Module, nn.Module]]:
        for front in self._front.modules():
            yield front, self._backs[id(front)]


def _return_freed_memory() -> None:
    """Have the C library give back what was freed: the threads that load keep a version each otherwise."""
    # glibc has this call; with another library there is nothing to do.
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class _PackedAtFirstUse:
    """Multiplies by an embedding's table: few models do, but vLLM packs a copy of the table for all.

    Args:
        layer: The layer that serves, which this has become a part of when it is called.
        method: What packs.
    """

    def __init__(self, layer: Any, method: Any) -> None:
        self._layer = layer
        self._method = method

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._layer.cpu_linear is self:
            self._method.process_weights_after_loading(self._layer)
        product: torch.Tensor = self._layer.cpu_linear(x, weight, bias)
        return product


def _allocated(parameter: nn.Parameter, like: torch.Tensor | None, front: nn.Module, back: nn.Module) -> nn.Parameter:
    """A parameter of ``back`` with the shape and the loader that the checkpoint is loaded with."""
    # vLLM keeps no record of some; they are loaded in the shape that they have.
    source: Any = parameter if like is None else like
    new: Any = torch.empty_strided(source.size(), source.stride(), dtype=source.dtype)
    new.__class__ = type(source)
    new.__dict__ = {name: _bound_to(value, front, back) for name, value in vars(source).items()}
    if new.is_floating_point():
        _sample(new).fill_(torch.nan)
    parameter_of_back: nn.Parameter = new
    return parameter_of_back


def _bound_to(value: Any, front: nn.Module, back: nn.Module) -> Any:
    """A loader of ``front`` as one of ``back``."""
    # A reload in place has left its own around the one that loads.
    while isinstance(value, FunctionType) and value.__name__ == "online_process_loader":
        value = value.__wrapped__  # type: ignore[attr-defined]
    if isinstance(value, MethodType) and value.__self__ in (front, layer_ref_sentinel):
        return value.__func__.__get__(back)
    return value


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Values from all over a parameter, so many that no part of it which is loaded by itself is left out."""
    flat = tensor.data.as_strided((tensor.numel(),), (1,))
    return flat[:: max(1, len(flat) // _NUM_SAMPLES)]

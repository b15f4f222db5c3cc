"""The adapter that a trainer trains: found, taken out, and compared with what a service takes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from rl_vllm.errors import BadInputError
from rl_vllm.types import AdapterState, LoRALimits, TensorSpec
from rl_vllm.weights.source import ModuleSource

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

# Module, and which of the two matrices (A is applied first) of what.
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_(embedding_)?([AB])(?:\.weight)?")
# What vLLM does not apply: PEFT's setting, and the value that is harmless.
_UNSUPPORTED = {
    "use_dora": False,
    "lora_bias": False,
    "bias": "none",
    "modules_to_save": None,
    "layer_replication": None,
}
# Values that vLLM takes for max_lora_rank.
_MAX_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_SHOWN = 4


class TrainedAdapter:
    """The one active LoRA adapter of a PEFT model.

    Args:
        model: A ``PeftModel``, or a module that contains exactly one.

    Attributes:
        config: PEFT's own.

    Raises:
        BadInputError: There is not exactly one PEFT model with exactly one active adapter, or that is not LoRA.
    """

    def __init__(self, model: object) -> None:
        peft_model = _peft_model_inside(model)
        active = list(peft_model.active_adapters)
        if len(active) != 1:
            raise BadInputError(f"the model has {len(active)} active adapters, {active}: activate the one to send")
        self._model, self._adapter = peft_model, active[0]
        self.config = _lora_config(peft_model, active[0])

    def source(self) -> ModuleSource:
        """The whole model, which can score."""
        return ModuleSource(self._model)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Its matrices under PEFT's names, as they are now: copies in this process's memory, contiguous.

        Raises:
            BadInputError: They lie in shards, or are on the meta device.
        """
        from peft import get_peft_model_state_dict
        from torch.distributed.tensor import DTensor

        found = get_peft_model_state_dict(self._model, adapter_name=self._adapter, save_embedding_layers=False)
        for name, tensor in found.items():
            if isinstance(tensor, DTensor):
                raise BadInputError(
                    f"{name} lies in shards: gather the adapter into a PeftModel of one process first, or send the "
                    "merged weights by refit(service, LeadingSource(...), ...)"
                )
            if tensor.is_meta:
                raise BadInputError(f"{name} has no data (meta device): load or initialise it first")
        return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in found.items()}


def find_problems(
    name: str,
    tensors: Mapping[str, torch.Tensor],
    config: LoraConfig,
    state: AdapterState,
    expected: Sequence[TensorSpec],
) -> tuple[str, ...]:
    """Everything that keeps an adapter from being sent, one line each.

    Args:
        name: What it is to be called on the service.
        tensors: Its matrices under PEFT's names.
        config: PEFT's settings.
        state: The service's adapters and limits.
        expected: The tensors of the served model.
    """
    settings = config.to_dict()
    problems = [
        f"{setting}={settings[setting]!r}: vLLM does not apply it; train without, or send merged weights (refit)"
        for setting, harmless in _UNSUPPORTED.items()
        if settings.get(setting, harmless) not in (harmless, None)
    ]
    problems += _of_tensors(tensors, {spec.name: spec.shape for spec in expected})
    if state.limits is None:
        rank = max(_ranks(tensors).values(), default=0)
        offered = next((each for each in _MAX_RANKS if each >= rank), rank)
        wanted = f"enable_lora=True, max_lora_rank={offered}, max_loras=2, max_cpu_loras=3"
        return (*problems, f"the engines run without LoRA: launch them with engine_kwargs=dict({wanted})")
    problems += _beyond(tensors, state.limits)
    if name in state.loaded and name not in state.trained:
        problems.append(
            f"an adapter that add_lora() loaded is called {name!r}: remove_lora({name!r}), or use another name"
        )
    if len(state.loaded) >= state.limits.max_loaded:
        problems.append(
            f"no slot is free: {', '.join(state.loaded)} stay and the engines hold {state.limits.max_loaded}; the old "
            "version must stay until the new one is there: remove an adapter, or raise engine_kwargs['max_cpu_loras']"
        )
    return tuple(problems)


def _of_tensors(tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    problems = [] if tensors else ["it has no tensors"]
    for key, tensor in tensors.items():
        if not bool(torch.isfinite(tensor.float()).all()):
            problems.append(f"{key} holds NaN or infinity")
        module, matrix, of_embedding = _parse(key)
        weight = shapes.get(f"{module}.weight")
        if weight is None:
            problems.append(
                f"{key}: the served model has no module {module!r}" if module else f"{key} is not of LoRA's"
            )
            continue
        out, into = reversed(weight) if of_embedding else weight
        (axis, size) = (1, into) if matrix == "A" else (0, out)
        if tensor.ndim != 2 or tensor.shape[axis] != size:
            problems.append(f"{key} has shape {list(tensor.shape)}; the served model's {module} is {list(weight)}")
    return problems


def _beyond(tensors: Mapping[str, torch.Tensor], limits: LoRALimits) -> list[str]:
    ranks = _ranks(tensors)
    problems = []
    above = [module for module, rank in ranks.items() if rank > limits.max_rank]
    if above:
        rank = max(ranks.values())
        problems.append(
            f"rank {rank} is above the engines' max_lora_rank={limits.max_rank} ({_some(above)}): raise "
            "engine_kwargs['max_lora_rank'], or train with a lower rank"
        )
    outside = [module for module in ranks if not limits.may_adapt(module)]
    if outside:
        problems.append(
            f"{_some(outside)} are outside the engines' target_modules={list(limits.target_modules or ())}: widen "
            "engine_kwargs['target_modules'], or adapt other modules"
        )
    return problems


def _ranks(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The rank of each adapted module."""
    parsed = [(_parse(key), tensor) for key, tensor in tensors.items()]
    return {module: tensor.shape[0] for (module, matrix, _), tensor in parsed if matrix == "A"}


def _parse(key: str) -> tuple[str, str, bool]:
    """Module, "A" or "B", and whether of an embedding; empty when the key is not one of LoRA's."""
    match = _KEY.fullmatch(key)
    return (match[1], match[3], match[2] is not None) if match else ("", "", False)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _peft_model_inside(model: object) -> PeftModel:
    from peft import PeftModel

    if not isinstance(model, nn.Module):
        raise BadInputError(
            f"an adapter refit needs the PeftModel itself, got a {type(model).__name__}: pass the model, or send whole "
            "weights by refit"
        )
    found = [child for child in model.modules() if isinstance(child, PeftModel)]
    if len(found) != 1:
        raise BadInputError(
            f"an adapter refit needs one PeftModel, {type(model).__name__} holds {len(found)}: pass what peft's "
            "get_peft_model(...) returned, or send whole weights by refit"
        )
    return found[0]


def _lora_config(model: PeftModel, adapter: str) -> LoraConfig:
    from peft import LoraConfig

    config = model.peft_config[adapter]
    if not isinstance(config, LoraConfig):
        raise BadInputError(
            f"adapter {adapter!r} is {config.peft_type}, and vLLM takes LoRA alone: send merged weights"
        )
    return config

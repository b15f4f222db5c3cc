"""Whether a folder in PEFT's format holds a LoRA adapter that an engine can apply, every tensor of it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from vllm.config import LoRAConfig
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import is_base_embedding_weights, is_in_target_modules

from rl_vllm.errors import ConfigError
from rl_vllm.types import LoRAAdapter, TensorSpec, hash_of_bytes, weights_digest

_SHOWN = 8
# Module, which of the two matrices (A is applied first), and of what; PEFT's prefix is not always there.
_KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(embedding_)?([AB])(?:\.weight)?")
# A full classification head, which vLLM checks itself.
_HEAD = re.compile(r".*\b(score|classifier)\.(weight|bias)")
_ONE_EXPERT = re.compile(r".*\.experts\.\d+\.\w+")


def check_folder(
    adapter: LoRAAdapter,
    folder: Path,
    limits: LoRAConfig,
    expected: Sequence[TensorSpec],
    *,
    packed: Mapping[str, Sequence[str]],
    adapts_experts: bool,
) -> None:
    """Read an adapter whole and compare it with the model; nothing is loaded anywhere.

    Args:
        adapter: Its name, for errors, and its checksum.
        folder: Where it lies.
        limits: vLLM's LoRA settings.
        expected: The model's tensors under checkpoint names.
        packed: The engine's names of layers that it computes at once, with the checkpoint's names of each.
        adapts_experts: Whether the engine can adapt the experts of a mixture, one by one.

    Raises:
        ConfigError: Lists what is wrong with the settings, the keys or the tensors, in this order.
    """
    try:
        helper = _read_settings(folder, limits)
        tensors = _read_tensors(folder)
        _require_checksum(tensors, adapter.checksum)
        _require_no_fused_experts(tensors, adapts_experts=adapts_experts)
        shapes = {spec.name.removesuffix(".weight"): spec.shape for spec in expected if spec.name.endswith(".weight")}
        _require_modules(tensors, shapes)
        _require_targets(tensors, limits, packed)
        _require_fit(tensors, shapes, helper)
    except (ValueError, OSError) as error:
        raise ConfigError(f"adapter {adapter.name!r} in {folder} cannot be loaded: {error}") from error


def _read_settings(folder: Path, limits: LoRAConfig) -> PEFTHelper:
    if not folder.is_dir():
        raise ValueError("there is no such folder on the engine's machine")
    path = folder / "adapter_config.json"
    if not path.is_file():
        raise ValueError("it has no adapter_config.json: give a folder written by PEFT's save_pretrained")
    settings = json.loads(path.read_text())
    if not isinstance(settings, dict) or settings.get("peft_type", "LORA") != "LORA":
        raise ValueError(f"adapter_config.json does not describe a LoRA adapter: {str(settings)[:200]}")
    try:
        helper = PEFTHelper.from_dict(settings)
    except (KeyError, TypeError) as error:
        raise ValueError(f"adapter_config.json: {type(error).__name__}: {error}") from error
    helper.validate_legal(limits)
    return helper


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors by key, without base embeddings that PEFT saved beside them."""
    try:
        if (folder / "adapter_model.safetensors").is_file():
            tensors = load_file(folder / "adapter_model.safetensors")
        else:
            names = [name for name in ("adapter_model.bin", "adapter_model.pt") if (folder / name).is_file()]
            if not names:
                raise ValueError("it has no adapter_model.safetensors")
            tensors = torch.load(folder / names[0], map_location="cpu", weights_only=True)
    except (SafetensorError, UnpicklingError, RuntimeError) as error:
        raise ValueError(f"its tensors cannot be read: {error}") from error
    tensors = {key: tensor for key, tensor in tensors.items() if not is_base_embedding_weights(key)}
    if not tensors:
        raise ValueError("it holds no tensors")
    return tensors


def _require_checksum(tensors: Mapping[str, torch.Tensor], expected: str | None) -> None:
    if expected is None:
        return
    found = weights_digest((_spec(name, tensor), hash_of_bytes(_bytes(tensor))) for name, tensor in tensors.items())
    if found != expected:
        raise ValueError(f"its tensors are not those that were written: checksum {found}, expected {expected}")


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _bytes(tensor: torch.Tensor) -> memoryview:
    data: memoryview = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return data


def _require_no_fused_experts(tensors: Mapping[str, torch.Tensor], *, adapts_experts: bool) -> None:
    of_experts = [key for key in tensors if ".experts." in key]
    fused = [key for key in of_experts if tensors[key].ndim != 2 or not _ONE_EXPERT.match(key)]
    if fused:
        raise ValueError(f"adapters of fused experts are not supported, merge them and refit the model: {_list(fused)}")
    if of_experts and not adapts_experts:
        raise ValueError(
            f"this engine's build cannot adapt experts, merge the adapter and refit the model: {_list(of_experts)}"
        )


def _require_modules(tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    unmatched = [key for key in tensors if not _HEAD.fullmatch(key) and _parse(key)[0] not in shapes]
    if unmatched:
        raise ValueError(
            f"{len(unmatched)} of its {len(tensors)} keys match no module of the model: {_list(unmatched)}"
        )


def _require_targets(
    tensors: Mapping[str, torch.Tensor], limits: LoRAConfig, packed: Mapping[str, Sequence[str]]
) -> None:
    parts = {name: list(parts) for name, parts in packed.items()}
    outside = [key for key in tensors if not is_in_target_modules(_parse(key)[0], limits.target_modules, parts)]
    if outside:
        raise ValueError(
            f"{len(outside)} of its {len(tensors)} keys are outside the engine's "
            f"target_modules={limits.target_modules}: {_list(outside)}"
        )


def _require_fit(
    tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]], helper: PEFTHelper
) -> None:
    problems = []
    pairs: dict[str, set[str]] = {}
    for key, tensor in tensors.items():
        module, matrix, of_embedding = _parse(key)
        if not module:
            continue
        pairs.setdefault(module, set()).add(matrix)
        rank, _ = helper.get_rank_and_scaling(module)
        out, into = reversed(shapes[module]) if of_embedding else shapes[module]
        shape = (rank, into) if matrix == "A" else (out, rank)
        if tuple(tensor.shape) != shape:
            problems.append(f"{key} has shape {tuple(tensor.shape)} where rank {rank} needs {shape}")
        elif not bool(torch.isfinite(tensor.float()).all()):
            problems.append(f"{key} holds values that are not finite")
    problems += [f"{module} has only lora_{have.pop()}" for module, have in pairs.items() if len(have) == 1]
    if problems:
        raise ValueError(_list(problems))


def _parse(key: str) -> tuple[str, str, bool]:
    """Module, "A" or "B", and whether of an embedding; an empty module when the key is not one of LoRA's."""
    match = _KEY.fullmatch(key)
    return (match[1], match[3], match[2] is not None) if match else ("", "", False)


def _list(entries: Sequence[str]) -> str:
    more = f", and {len(entries) - _SHOWN} more" if len(entries) > _SHOWN else ""
    return ", ".join(entries[:_SHOWN]) + more

"""Compare what a trainer would send with what the engine expects, before any byte moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rl_vllm.errors import WeightsMismatchError
from rl_vllm.types import TensorSpec
from rl_vllm.weights.source import HEAD, dtype_from


def check_specs(sent: Sequence[TensorSpec], expected: Sequence[TensorSpec]) -> None:
    """Raise unless every expected tensor is sent, once, in its shape, and nothing else is.

    A floating dtype other than the engine's is no problem: the sender casts. An integer where a float belongs is one.

    Raises:
        WeightsMismatchError: Lists every difference.
    """
    wanted = {spec.name: spec for spec in expected}
    offered = {spec.name: spec for spec in sent}
    problems = [f"{name}: sent twice" for name in _repeated(sent)]
    problems += [_describe_missing(spec) for name, spec in wanted.items() if name not in offered]
    problems += [_describe_unexpected(spec) for name, spec in offered.items() if name not in wanted]
    for name, spec in wanted.items():
        if name in offered:
            problems += _differences(offered[name], spec)
    if problems:
        hint = _prefix_hint(offered, wanted)
        raise WeightsMismatchError(tuple(problems if hint is None else [hint, *problems]))


def _repeated(specs: Sequence[TensorSpec]) -> list[str]:
    names = [spec.name for spec in specs]
    return sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []


def _describe_missing(spec: TensorSpec) -> str:
    return f"{spec.name}: missing; the engine expects {spec.dtype} {list(spec.shape)}"


def _describe_unexpected(spec: TensorSpec) -> str:
    if spec.name == HEAD:
        return (
            f"{spec.name}: unexpected; the engine ties it to the input embedding and the trainer's differs: tie it "
            "(model.tie_weights()), or serve a config with tie_word_embeddings=false"
        )
    return f"{spec.name}: unexpected; the engine's model has no such tensor ({spec.dtype} {list(spec.shape)} offered)"


def _differences(sent: TensorSpec, wanted: TensorSpec) -> list[str]:
    found = []
    if sent.shape != wanted.shape:
        found.append(f"{sent.name}: shape {list(sent.shape)}; the engine expects {list(wanted.shape)}")
    if dtype_from(sent.dtype).is_floating_point != dtype_from(wanted.dtype).is_floating_point:
        found.append(f"{sent.name}: dtype {sent.dtype} cannot be cast to {wanted.dtype}")
    return found


def _prefix_hint(offered: Mapping[str, TensorSpec], wanted: Mapping[str, TensorSpec]) -> str | None:
    """Name the wrapper's prefix when it is all that is wrong."""
    first = next(iter(wanted), None)
    if first is None or first in offered:
        return None
    for name in offered:
        prefix = name.removesuffix(first)
        if name != first and name.endswith(f".{first}") and all(f"{prefix}{other}" in offered for other in wanted):
            return f"every name starts with {prefix!r}: pass the model inside the wrapper, or strip the prefix"
    prefix = first.partition(".")[0] + "."
    if any(f"{prefix}{name}" in wanted for name in offered) and not any(name in wanted for name in offered):
        return (
            f"every name lacks {prefix!r}: send the whole model; TorchRL's push_weights_from_transformers() sends the "
            ".model of what it is given, so give it TransformersWrapper(model) or another object with .model"
        )
    return None

"""Where weights come from: a module, or a state dict, under the names a checkpoint would have.

Transformers keeps some weights under other names, or fused, while a model is in memory (the experts of a MoE layer are
one tensor). The engine's loaders want the checkpoint's names, so what is sent goes through the reverse mapping that
``save_pretrained`` uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase, TensorDictParams
from torch import nn

from rl_vllm.errors import BadInputError
from rl_vllm.protocols import WeightSource
from rl_vllm.types import TensorSpec
from rl_vllm.weights import lora, sharded

HEAD = "lm_head.weight"


class ModuleSource:
    """A :class:`~rl_vllm.protocols.WeightSource` over live weights: every pass reads what they are then.

    Args:
        weights: One of
            a Hugging Face model, with or without PEFT LoRA adapters (merged for sending, in float32, without changing
            the model);
            a module that contains exactly one, such as TorchRL's ``TransformersWrapper``;
            any other module, whose parameter names must be checkpoint names;
            a state dict or tensordict of checkpoint names.
            Tied heads are left out; buffers are sent only when ``state_dict`` has them.

    Raises:
        BadInputError: There is no single model to send, its adapters cannot be merged, an entry of the state dict is no
            tensor, or it is something else altogether.
    """

    def __init__(self, weights: nn.Module | Mapping[str, torch.Tensor] | TensorDictBase) -> None:
        self._module: nn.Module | None = None
        self._given: nn.Module | None = None
        self._mapping: dict[str, torch.Tensor] | None = None
        if isinstance(weights, TensorDictParams | TensorDictBase):
            self._mapping = _flat(weights)
        elif isinstance(weights, nn.Module):
            self._module, self._given = _model_inside(weights), weights
        elif isinstance(weights, Mapping):
            self._mapping = _named_tensors(weights)
        else:
            got = repr(weights) if isinstance(weights, str) else f"a {type(weights).__name__}"
            raise BadInputError(
                f"weights must be a module, a state dict, a tensordict or a WeightSource, got {got}: pass the model "
                "itself, or of names and tensors dict(...); load a checkpoint first"
            )
        if self._mapping is not None and not self._mapping:
            raise BadInputError("the state dict is empty: there is nothing to send")

    def specs(self) -> tuple[TensorSpec, ...]:
        """Names, dtypes and full shapes of what iteration yields, in order; no data moves."""
        return tuple(spec_of(name, tensor) for name, tensor in self._checkpoint_tensors(_Entry.shadow))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A fresh pass over plain, full, contiguous tensors, detached; at most one layer of new memory at a time."""
        for name, tensor in self._checkpoint_tensors(_Entry.tensor):
            yield name, tensor.contiguous()

    @property
    def is_on_gpu(self) -> bool:
        """Whether a weight lies on a CUDA device."""
        tensors = self._module.parameters() if self._module is not None else (self._mapping or {}).values()
        return any(tensor.is_cuda for tensor in tensors)

    @property
    def merges_adapters(self) -> bool:
        """Whether LoRA adapters are added to what is sent, as the model is now."""
        return self._module is not None and lora.is_adapted(self._module) and bool(lora.base_state(self._module)[1])

    @property
    def can_score(self) -> bool:
        """Whether there is a Hugging Face model inside, which :meth:`score` can run.

        A wrapper's own shards (``fully_shard(TransformersWrapper(model))``) are beyond it: shard the model inside.
        """
        return self._runnable() is not None

    def score(self, rows: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """Logprobs, in nats, of every token but the first of each sequence, as the model gives them now.

        Adapters count as they are. Each sequence is run alone, without padding, in evaluation mode, after which every
        layer has the mode it had; no gradient is recorded. Of a sharded model, all ranks must call this together, and
        what was gathered is let go.

        Args:
            rows: Token ids, at least two in each.

        Returns:
            float32 [length - 1] for each.

        Raises:
            BadInputError: There is no Hugging Face model.
        """
        runnable = self._runnable()
        if runnable is None:
            raise BadInputError(
                "only a Hugging Face model gives logprobs, sharded without what wraps it: pass the model, or use "
                "another scorer"
            )
        training = [child for child in runnable.modules() if child.training]
        runnable.eval()
        try:
            with torch.no_grad():
                return [_logprobs(runnable, row) for row in rows]
        finally:
            for child in training:
                child.training = True
            sharded.let_go(runnable)

    def _runnable(self) -> nn.Module | None:
        """What gives logits: the model, or PEFT's around it when the call of that gathers the model's shards."""
        if self._given is None or self._module is None or not _is_transformers_model(self._module):
            return None
        found = next((outer for outer in _around(self._module, self._given) if sharded.gathers(outer)), self._module)
        return found if found is self._module or lora.is_peft_model(found) else None

    def _entries(self) -> dict[str, _Entry]:
        if self._mapping is not None:
            return _without_tied_head({name: _Entry(tensor, []) for name, tensor in self._mapping.items()})
        assert self._module is not None
        if lora.is_adapted(self._module):
            tensors, deltas = lora.base_state(self._module)
        else:
            tensors, deltas = self._module.state_dict(), {}
        entries = {
            name: _Entry(tensor, deltas.get(name, []))
            for name, tensor in tensors.items()
            if isinstance(tensor, torch.Tensor)
        }
        return _without_ties(self._module, entries)

    def _checkpoint_tensors(self, read: Callable[[_Entry], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Layer by layer, because conversions join or split tensors within a layer and never across layers."""
        convert = _is_transformers_model(self._module)
        for _, group in groupby(self._entries().items(), key=lambda item: _layer_of(item[0])):
            tensors = {name: read(entry) for name, entry in group}
            if convert:
                from transformers.core_model_loading import revert_weight_conversion

                tensors = revert_weight_conversion(self._module, tensors)
            yield from tensors.items()


class CastSource:
    """Another source in the dtypes an engine expects: what is declared is what is sent.

    Args:
        source: Yields at least the names of ``expected``.
        expected: The engine's specs.
    """

    def __init__(self, source: WeightSource, expected: tuple[TensorSpec, ...]) -> None:
        self._source = source
        self._dtypes = {spec.name: spec.dtype for spec in expected}

    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(spec.name, self._dtypes[spec.name], spec.shape) for spec in self._source.specs())

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._source:
            yield name, tensor.to(dtype_from(self._dtypes[name]))


class _Entry:
    """One tensor of the trainer's model, with what LoRA adds to it."""

    def __init__(self, base: torch.Tensor, deltas: list[lora.Delta]) -> None:
        self.base = base
        self._deltas = deltas
        self.shape = base.shape
        # The sum is made in float32 and rounded once, by the cast to the engine's dtype.
        self.dtype = torch.promote_types(base.dtype, torch.float32) if deltas else base.dtype

    def shadow(self) -> torch.Tensor:
        """The same tensor without data, to learn names and shapes from."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def tensor(self) -> torch.Tensor:
        """The full tensor as it is now: the trainer's own memory unless adapters are added or shards gathered."""
        if self.base.is_meta:
            raise BadInputError("the model's weights have no data (meta device): load or initialise them first")
        whole = sharded.full(self.base.detach())
        if not self._deltas:
            return whole
        merged = whole.to(self.dtype, copy=True)
        for delta in self._deltas:
            merged += delta()
        return merged

    def is_same_as(self, other: _Entry) -> bool:
        """Whether both are one storage; of shards, this rank's own: gathered copies have addresses without meaning."""
        ours, theirs = sharded.local(self.base), sharded.local(other.base)
        return (
            not self._deltas
            and not other._deltas
            and self.shape == other.shape
            and ours.data_ptr() == theirs.data_ptr()
            and (ours.numel() > 0 or not self.is_sharded)
        )

    @property
    def is_sharded(self) -> bool:
        return sharded.local(self.base) is not self.base

    def is_equal_to(self, other: _Entry) -> bool:
        return self.shape == other.shape and torch.equal(self.tensor(), other.tensor())


def _logprobs(model: nn.Module, row: Sequence[int]) -> NDArray[np.float32]:
    device = next(model.parameters()).device
    ids_1T = torch.tensor([list(row)], device=device)
    logits_TV = model(input_ids=ids_1T, use_cache=False).logits[0, :-1].float()
    logprobs_T = logits_TV.log_softmax(-1).gather(1, ids_1T[0, 1:, None])[:, 0]
    scores: NDArray[np.float32] = logprobs_T.cpu().numpy()
    return scores


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def next_as_declared(tensors: Iterator[tuple[str, torch.Tensor]], spec: TensorSpec) -> torch.Tensor:
    """The next tensor of a pass over a source.

    Raises:
        BadInputError: It is not what the source declared.
    """
    name, tensor = next(tensors, ("", None))
    if tensor is None or spec_of(name, tensor) != spec:
        got = "the end" if tensor is None else spec_of(name, tensor)
        raise BadInputError(f"the weight source declared {spec} and yielded {got}")
    return tensor


def dtype_from(name: str) -> torch.dtype:
    """The dtype of a :class:`TensorSpec`.

    Raises:
        BadInputError: torch has no such dtype.
    """
    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype):
        raise BadInputError(f"torch has no dtype {name!r}")
    return found


def _flat(weights: TensorDictBase) -> dict[str, torch.Tensor]:
    return {name: value for name, value in weights.flatten_keys(".").items() if isinstance(value, torch.Tensor)}


def _named_tensors(weights: Mapping[str, object]) -> dict[str, torch.Tensor]:
    named: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        if not isinstance(name, str):
            raise BadInputError(f"the state dict has the key {name!r}: keys are the names of a checkpoint's tensors")
        if not isinstance(value, torch.Tensor):
            raise BadInputError(
                f"{name} in the state dict is a {type(value).__name__}, not a tensor: convert it "
                "(torch.as_tensor), or leave it out"
            )
        named[name] = value
    return named


def _layer_of(name: str) -> str:
    """``model.layers.3.mlp.experts.7.w1`` belongs to ``model.layers.3``; names without a number to their parent."""
    parts = name.split(".")
    for position, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: position + 1])
    return ".".join(parts[:-1])


def _is_transformers_model(module: nn.Module | None) -> bool:
    if module is None:
        return False
    from transformers import PreTrainedModel

    return isinstance(module, PreTrainedModel)


def _model_inside(module: nn.Module) -> nn.Module:
    """The one Hugging Face model to send, or the module itself when there is none."""
    from transformers import PreTrainedModel

    if lora.is_adapted(module):
        lora.refuse_prompt_learning(module)
    found: dict[str, nn.Module] = {}
    for path, child in module.named_modules():
        if isinstance(child, PreTrainedModel) and not any(path.startswith(f"{outer}.") for outer in found if outer):
            found[path] = child
        if "" in found:
            return module
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        names = ", ".join(f"{path} ({type(child).__name__})" for path, child in found.items())
        raise BadInputError(
            f"{type(module).__name__} holds {len(found)} models, {names}: pass the one that the engine serves"
        )
    if any(isinstance(child, TensorDictParams) for child in module.modules()):
        raise BadInputError(
            f"{type(module).__name__} keeps its parameters outside its networks, as TorchRL's losses do: pass the "
            "policy module that you gave to it, for example the TransformersWrapper"
        )
    if next(module.parameters(), None) is None:
        raise BadInputError(f"{type(module).__name__} has no parameters: there is nothing to send")
    return module


def _around(model: nn.Module, given: nn.Module) -> list[nn.Module]:
    """The modules of ``given`` that ``model`` lies in, outermost first."""
    parts = next(path for path, child in given.named_modules() if child is model).split(".")
    return [given.get_submodule(".".join(parts[:depth])) for depth in range(len(parts)) if parts != [""]]


def _without_ties(module: nn.Module, entries: dict[str, _Entry]) -> dict[str, _Entry]:
    if not _is_transformers_model(module):
        return _without_tied_head(entries)
    kept = dict(entries)
    for target, source in module.all_tied_weights_keys.items():  # type: ignore[union-attr, operator]
        if target not in kept or source not in kept:
            continue
        # A head the config ties but that has storage of its own is dropped only while it is equal: otherwise the check
        # against the engine's specs reports it.
        # Of shards the values decide alone: ranks must agree, and make the same gathers to find out.
        head, embedding = kept[target], kept[source]
        if (not head.is_sharded and head.is_same_as(embedding)) or head.is_equal_to(embedding):
            del kept[target]
    return kept


def _without_tied_head(entries: dict[str, _Entry]) -> dict[str, _Entry]:
    """Without a config to ask, the output head is tied when it shares its storage with another entry."""
    head = entries.get(HEAD)
    if head is None or not any(head.is_same_as(entry) for name, entry in entries.items() if name != HEAD):
        return entries
    return {name: entry for name, entry in entries.items() if name != HEAD}

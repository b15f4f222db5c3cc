"""From a tensordict to ragged token ids, once, at the edge: whatever the form of the prompts, one path follows.

Axes: B prompts (the batch, flattened), L positions of a padded prompt, T ids of all rows laid end to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorData, TensorDictBase, is_tensor_collection, lazy_stack
from torchrl.data.llm import History

from rl_vllm.errors import BadInputError, BadPromptError
from rl_vllm.policy.keys import PolicyKeys
from rl_vllm.policy.options import Key
from rl_vllm.policy.text import TextCodec
from rl_vllm.types import PromptBatch

_INT32 = np.iinfo(np.int32)


@dataclass(frozen=True, slots=True)
class PromptInput:
    """The prompts of one call.

    Attributes:
        prompts: B rows, the tensordict's batch flattened row after row.
        text_B: The prompts as text when they came as text or chats, else None.
        history: ``History`` [B, turns] when they came as chats, else None.
        ids_BL: int64 [B, L], the padded tensor they came as, or None when they did not come as one.
        mask_BL: bool [B, L], where the ids are in it.
        device: Where the prompts were, or None when they were not tensors.
    """

    prompts: PromptBatch
    text_B: list[str] | None = None
    history: Any = None
    ids_BL: NDArray[np.int64] | None = None
    mask_BL: NDArray[np.bool_] | None = None
    device: torch.device | None = None


def read_tokens(td: TensorDictBase, keys: PolicyKeys, attention_mask_key: Key, *, entry: str = "prompt") -> PromptInput:
    """Sequences given as ids under ``("tokens", entry)``.

    Args:
        td: Holds one of: an integer tensor [*batch, L]; a nested tensor [B, ragged]; a list of B ids sequences; a lazy
            stack of 1-D tensors. A padded tensor may come with a boolean or 0/1 mask of the same shape under
            ``attention_mask_key``, or under ``("masks", "all_attention_mask")`` as TorchRL's wrappers read it; padding
            may be on either side. Without a mask every id is real: no id is taken for padding because of its value.
        keys: The names of the groups.
        attention_mask_key: Where the mask is.
        entry: ``prompt``, or ``full`` for whole sequences.

    Raises:
        BadInputError: The entry is missing, not integer, or of the wrong rank; or the mask has another shape, or
            a value that is neither 0 nor 1.
    """
    key = keys.within("tokens", entry)
    value = _read(td, key)
    mask, place = _find_mask(td, keys, attention_mask_key, entry)
    if isinstance(value, torch.Tensor) and not value.is_nested:
        return _from_padded(value, td.batch_size, mask, place)
    rows = _rows(value, td.batch_size.numel(), key)
    if mask is not None and len({len(row) for row in rows}) == 1:
        stacked = torch.as_tensor(np.stack(rows))
        stacked_mask = mask if isinstance(mask, torch.Tensor) else _stack_mask(mask)
        return _from_padded(stacked, stacked.shape[:1], stacked_mask, place)
    if mask is not None:
        rows = _without_padding(rows, mask, place)
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    flat = np.concatenate([*rows, np.zeros(0, np.int64)])
    return PromptInput(_pack(flat, lengths), device=_device_of(value))


def _find_mask(td: TensorDictBase, keys: PolicyKeys, attention_mask_key: Key, entry: str) -> tuple[Any, _Place]:
    """The mask of ``("tokens", entry)``, if there is one, and where it was."""
    key = keys.within("tokens", entry)
    given, own_key = _read_mask(td, attention_mask_key), keys.within("masks", "all_attention_mask")
    own = _read_mask(td, own_key)
    if entry == "full":
        # TorchRL's masks describe the whole sequence; what was given may still be the prompt's.
        mask, mask_key = (own, own_key) if own is not None else (given, attention_mask_key)
        return mask, _Place(key, mask_key, explicit=mask is not None)
    if given is not None:
        return given, _Place(key, attention_mask_key, explicit=True)
    if td.get(keys.within("tokens", "full"), None, as_list=True) is not None:
        # Only before there is a whole sequence can TorchRL's masks describe the prompt.
        own = None
    return own, _Place(key, own_key, explicit=False)


def _without_padding(rows: list[NDArray[np.int64]], mask: Any, place: _Place) -> list[NDArray[np.int64]]:
    """Rows of different widths, each without what its own mask hides."""
    masks = [torch.as_tensor(row) for row in (mask.unbind(0) if isinstance(mask, torch.Tensor) else mask)]
    if [tuple(row.shape) for row in masks] != [row.shape for row in rows]:
        if not place.explicit:
            return rows
        shapes = [tuple(row.shape) for row in masks]
        raise BadInputError(
            f"{place.mask_key} has rows of shapes {shapes}, and {place.key} of {[row.shape for row in rows]}: give "
            "every row a mask of its own shape"
        )
    kept = []
    for index, (row, row_mask) in enumerate(zip(rows, masks, strict=True)):
        ids = torch.from_numpy(row)
        real = _mask_of(ids, row_mask, (1, len(row)), _Place(f"{place.key} row {index}", place.mask_key, explicit=True))
        assert real is not None
        kept.append(row[real[0]])
    return kept


def read_text(td: TensorDictBase, keys: PolicyKeys, codec: TextCodec, *, entry: str = "prompt") -> PromptInput:
    """Sequences given as strings under ``("text", entry)``.

    Raises:
        BadInputError: The entry is missing, or holds something that is not a string.
    """
    key = keys.within("text", entry)
    text = _strings(_read(td, key), td.batch_size.numel(), key)
    return PromptInput(PromptBatch(*codec.encode(text)), text_B=text)


def read_chats(td: TensorDictBase, keys: PolicyKeys, *, entry: str) -> Any:
    """The ``History`` [B, turns] under ``("history", entry)``.

    Raises:
        BadInputError: The entry is missing, no ``History``, or without an axis for turns.
    """
    key = keys.within("history", entry)
    history = _read(td, key)
    if not isinstance(history, History):
        raise BadInputError(
            f"{key} must be a torchrl.data.llm.History, got {type(history).__name__}: "
            "build one with History.from_chats([[{'role': 'user', 'content': ...}], ...])"
        )
    if history.batch_dims != 2:
        raise BadInputError(
            f"{key} must have the tensordict's batch shape and one axis for turns, got batch size "
            f"{tuple(history.batch_size)} for {td.batch_size.numel()} prompts"
        )
    return history


def read_history(td: TensorDictBase, keys: PolicyKeys, codec: TextCodec) -> PromptInput:
    """Prompts given as a ``History`` [*batch, turns] under ``("history", "prompt")``; raises as :func:`read_chats`."""
    history = read_chats(td, keys, entry="prompt")
    text = codec.render(history)
    return PromptInput(PromptBatch(*codec.encode_rendered(text)), text_B=text, history=history)


def check_prompts(prompts: PromptBatch) -> None:
    """Refuse what no engine could take, before anything is sent.

    Raises:
        BadPromptError: A prompt has no token, or a negative id.
    """
    empty = np.flatnonzero(prompts.lengths_B == 0)
    if len(empty):
        raise BadPromptError(
            int(empty[0]), "it has no tokens (all of it is padding, or it is empty): give at least one"
        )
    negative = np.flatnonzero(prompts.tokens_T < 0)
    if len(negative):
        row = int(np.searchsorted(prompts.offsets_B1, negative[0], side="right")) - 1
        raise BadPromptError(
            row,
            f"token id {int(prompts.tokens_T[negative[0]])} is negative: padding needs an attention mask, "
            "every other position a real id",
        )


@dataclass(frozen=True, slots=True)
class _Place:
    """Where ids and their mask are, and whether the mask is certainly theirs."""

    key: Key
    mask_key: Key
    explicit: bool


def _read(td: TensorDictBase, key: tuple[str, ...]) -> Any:
    """The entry with the batch flattened: a tensor keeps its shape, everything else has one axis of B."""
    group = td.get(key[:-1], None)
    value = None
    if is_tensor_collection(group):
        value = group.get(key[-1], as_list=True)
        if value is not None and not isinstance(value, torch.Tensor) and td.ndim != 1:
            flat = group.reshape(-1) if td.ndim else lazy_stack([group])
            value = flat.get(key[-1], as_list=True)
        if isinstance(value, list) and value and is_tensor_collection(value[0]):
            value = lazy_stack(value)
    if value is None:
        found = sorted(str(name) for name in td.keys(include_nested=True, leaves_only=True))
        raise BadInputError(f"the tensordict has no {key}, which this input mode reads; it has: {', '.join(found)}")
    return value


def _read_mask(td: TensorDictBase, key: Key) -> Any:
    value = td.get(key, None, as_list=True)
    return None if is_tensor_collection(value) else value


def _stack_mask(mask: Sequence[Any]) -> Any:
    """One tensor when the rows have one shape, else the rows as they are."""
    rows = [torch.as_tensor(row) for row in mask]
    return torch.stack(rows) if len({row.shape for row in rows}) == 1 else mask


def _from_padded(ids: torch.Tensor, batch_size: torch.Size, mask: Any, place: _Place) -> PromptInput:
    if ids.ndim != len(batch_size) + 1 or ids.shape[:-1] != batch_size:
        raise BadInputError(
            f"{place.key} must have shape [*batch, L] with batch {tuple(batch_size)}, got {tuple(ids.shape)}"
        )
    _require_integers(ids, place.key)
    device = ids.device
    # The batch in numbers: of prompts without a position, -1 would leave the number of rows open.
    shape_BL = (batch_size.numel(), ids.shape[-1])
    ids_BL = ids.detach().reshape(shape_BL).cpu().numpy()
    mask_BL = _mask_of(ids, mask, shape_BL, place)
    hidden = ids_BL[:0] if mask_BL is None else ids_BL[~mask_BL]
    if mask_BL is None or (not place.explicit and len(hidden) and bool((hidden != hidden[0]).any())):
        # A mask that hides different ids is the leftover of an earlier sequence, not padding of this one.
        mask_BL = np.ones(shape_BL, np.bool_)
    prompts = _pack(ids_BL[mask_BL], mask_BL.sum(axis=1, dtype=np.int64))
    return PromptInput(prompts, ids_BL=ids_BL, mask_BL=mask_BL, device=device)


def _mask_of(ids: torch.Tensor, mask: Any, shape_BL: tuple[int, int], place: _Place) -> NDArray[np.bool_] | None:
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor) or mask.is_nested or mask.shape != ids.shape:
        if not place.explicit:
            return None
        shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) and not mask.is_nested else type(mask).__name__
        raise BadInputError(f"the attention mask must have the prompts' shape {tuple(ids.shape)}, got {shape}")
    real = mask.detach() == 1
    wrong = mask.detach()[~(real | (mask.detach() == 0))]
    if len(wrong):
        # An additive mask is 0 on the real tokens: read as true or false it would keep the padding and drop the rest.
        raise BadInputError(
            f"{place.mask_key} must be 1 (or True) on real tokens and 0 on padding, and holds {wrong[0].item()}: "
            "give a boolean mask; of an additive one (0 on real tokens, very negative on padding) give mask == 0"
        )
    return real.reshape(shape_BL).cpu().numpy()


def _require_integers(ids: torch.Tensor, key: Key) -> None:
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise BadInputError(f"{key} has dtype {ids.dtype}, token ids are integers: give it as torch.int64")


def _rows(value: Any, count: int, key: Key) -> list[NDArray[np.int64]]:
    """One array of ids per prompt."""
    if isinstance(value, torch.Tensor):
        value = list(value.unbind())
    elif isinstance(value, NonTensorData) and isinstance(value.data, list):
        value = value.data
    elif is_tensor_collection(value):
        value = value.tolist()
    if not isinstance(value, list) or len(value) != count:
        held = f"{len(value)} rows" if isinstance(value, list) else f"a {type(value).__name__}"
        raise BadInputError(f"{key} must hold one row of ids for each of {count} prompts, got {held}")
    return [_row(index, row, key) for index, row in enumerate(value)]


def _row(index: int, row: Any, key: Key) -> NDArray[np.int64]:
    try:
        ids = row if isinstance(row, torch.Tensor) else torch.as_tensor(row, dtype=None if len(row) else torch.int64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadInputError(f"{key} row {index} is no sequence of token ids ({error}): got {row!r}") from error
    if ids.ndim != 1:
        raise BadInputError(f"{key} row {index} must have one axis, got shape {tuple(ids.shape)}")
    _require_integers(ids, key)
    return ids.detach().cpu().numpy().astype(np.int64)


def _pack(flat: NDArray[Any], lengths_B: NDArray[np.int64]) -> PromptBatch:
    offsets = np.zeros(len(lengths_B) + 1, np.int64)
    np.cumsum(lengths_B, out=offsets[1:])
    # An id that int32 cannot hold is out of every vocabulary; the nearest int32 is too, and wraps around nowhere.
    return PromptBatch(np.clip(flat, _INT32.min, _INT32.max).astype(np.int32), offsets)


def _strings(value: Any, count: int, key: Key) -> list[str]:
    if isinstance(value, str):
        value = [value]
    elif not isinstance(value, list):
        value = value.tolist()
    texts = [value] if isinstance(value, str) else list(value)
    if len(texts) != count:
        raise BadInputError(f"{key} must hold one string for each of {count} prompts, got {len(texts)}")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise BadInputError(f"{key} row {index} must be a string, got {text!r}")
    return texts


def _device_of(value: Any) -> torch.device | None:
    if isinstance(value, torch.Tensor):
        return value.device
    if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
        return value[0].device
    return None

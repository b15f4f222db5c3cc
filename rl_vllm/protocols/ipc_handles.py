"""CUDA IPC handles as JSON values, so that an update's payload can carry them and nobody unpickles what came by wire.

A handle is what ``torch.multiprocessing.reductions.reduce_tensor`` gives for a tensor on a GPU: the arguments of
``rebuild_cuda_tensor``, which vLLM's receiver calls with them.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing import reductions
from torch.storage import TypedStorage

# Positions in the arguments of ``rebuild_cuda_tensor``.
_TENSOR_CLASS, _SIZE, _STRIDE, _STORAGE_CLASS, _DTYPE = 0, 1, 2, 4, 5
_CLASSES: dict[int, type] = {_TENSOR_CLASS: torch.Tensor, _STORAGE_CLASS: TypedStorage}
_SIZES = (_SIZE, _STRIDE)
NUM_ARGUMENTS = 15


def export_handle(tensor: torch.Tensor) -> list[object]:
    """A handle of a tensor on a GPU, as JSON values; its memory must stay until the importers are through.

    Args:
        tensor: Plain, detached, contiguous.
    """
    return to_json(reductions.reduce_tensor(tensor)[1])  # type: ignore[no-untyped-call]


def to_json(arguments: Sequence[Any]) -> list[object]:
    """The arguments of ``rebuild_cuda_tensor`` as JSON values."""
    return [_encoded(position, value) for position, value in enumerate(arguments)]


def from_json(encoded: Sequence[Any]) -> tuple[Any, ...]:
    """Inverse of :func:`to_json`.

    Raises:
        ValueError: It is no handle.
    """
    if len(encoded) != NUM_ARGUMENTS:
        raise ValueError(f"a handle has {NUM_ARGUMENTS} parts, got {len(encoded)}")
    return tuple(_decoded(position, value) for position, value in enumerate(encoded))


def _encoded(position: int, value: Any) -> object:
    if position in _CLASSES:
        assert value is _CLASSES[position], value
        return None
    if position == _DTYPE:
        return str(value).removeprefix("torch.")
    if position in _SIZES:
        return list(value)
    return {"bytes": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def _decoded(position: int, value: Any) -> object:
    if position in _CLASSES:
        return _CLASSES[position]
    if position == _DTYPE:
        dtype = vars(torch).get(value)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"torch has no dtype {value!r}")
        return dtype
    if position in _SIZES:
        return torch.Size(value) if position == _SIZE else tuple(value)
    return base64.b64decode(value["bytes"], validate=True) if isinstance(value, dict) else value

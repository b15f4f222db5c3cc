"""Write tensors as safetensors shards in one pass, at most one tensor in memory, with a checksum for each."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from rl_vllm.errors import BadInputError
from rl_vllm.types import ShardEntry, TensorSpec
from rl_vllm.weights.source import dtype_from, next_as_declared

# https://github.com/huggingface/safetensors: names of dtypes in a file's header.
FORMAT_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One file: which tensors, in order."""

    file: str
    specs: tuple[TensorSpec, ...]

    @property
    def num_bytes(self) -> int:
        return sum(size_bytes(spec) for spec in self.specs)


def size_bytes(spec: TensorSpec) -> int:
    count = dtype_from(spec.dtype).itemsize
    for length in spec.shape:
        count *= length
    return count


def plan_shards(specs: Sequence[TensorSpec], shard_bytes: int) -> tuple[ShardPlan, ...]:
    """Fill files in order up to ``shard_bytes``; a tensor above it has a file of its own."""
    groups: list[list[TensorSpec]] = [[]]
    used = 0
    for spec in specs:
        size = size_bytes(spec)
        if groups[-1] and used + size > shard_bytes:
            groups.append([])
            used = 0
        groups[-1].append(spec)
        used += size
    return tuple(ShardPlan(f"shard-{index:05d}.safetensors", tuple(group)) for index, group in enumerate(groups))


def write_shards(
    folder: Path, plans: Iterable[ShardPlan], tensors: Iterator[tuple[str, torch.Tensor]], *, checksum: bool = True
) -> Iterator[ShardEntry]:
    """Write every plan's file, in order, yielding each tensor's entry when its bytes are in the file.

    Raises:
        BadInputError: The tensors are not the planned ones, or one holds NaN or infinity.
        OSError: A file cannot be written.
    """
    for plan in plans:
        with (folder / plan.file).open("wb", buffering=0) as file:
            _write_all(file, memoryview(_header(plan.specs)))
            for spec in plan.specs:
                tensor = next_as_declared(tensors, spec)
                require_finite(spec.name, tensor)
                data = bytes_of(tensor)
                _write_all(file, data)
                yield ShardEntry(spec=spec, file=plan.file, crc32=zlib.crc32(data) if checksum else None)
            os.fsync(file.fileno())


def _header(specs: Sequence[TensorSpec]) -> bytes:
    header: dict[str, object] = {}
    start = 0
    for spec in specs:
        if spec.dtype not in FORMAT_DTYPES:
            raise BadInputError(
                f"{spec.name}: dtype {spec.dtype} cannot be written; supported: {sorted(FORMAT_DTYPES)}"
            )
        end = start + size_bytes(spec)
        header[spec.name] = {
            "dtype": FORMAT_DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _write_all(file: BinaryIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def require_finite(name: str, tensor: torch.Tensor) -> None:
    """One pass for the extremes: NaN propagates to them, infinity is one of them."""
    if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2 or tensor.numel() == 0:
        return
    low, high = torch.aminmax(tensor.detach())
    if not (bool(torch.isfinite(low)) and bool(torch.isfinite(high))):
        raise BadInputError(f"{name} holds NaN or infinity (smallest {low.item()}, largest {high.item()})")

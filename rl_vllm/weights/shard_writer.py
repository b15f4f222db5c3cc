"""Write tensors as safetensors shards in one pass, at most one tensor in memory, with a checksum for each.

A shard's bytes go to whoever takes them: a file, or an array that becomes an object of a store.
"""

from __future__ import annotations

import json
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import torch

from rl_vllm.errors import BadInputError, RefitError
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
        """Bytes of the tensors."""
        return sum(size_bytes(spec) for spec in self.specs)

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""
        return len(_header(self.specs)) + self.num_bytes


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
            yield from write_shard(plan, tensors, partial(_write_all, file), checksum=checksum)
            os.fsync(file.fileno())


def write_shard(
    plan: ShardPlan,
    tensors: Iterator[tuple[str, torch.Tensor]],
    write: Callable[[memoryview], None],
    *,
    checksum: bool = True,
) -> Iterator[ShardEntry]:
    """Write one plan's bytes, in order, yielding each tensor's entry when its bytes are written.

    Args:
        plan: What the shard holds.
        tensors: A pass over the source that has come to the plan's first tensor.
        write: Takes the next bytes, all of them.
        checksum: Whether the entries have one.

    Raises:
        BadInputError: The tensors are not the planned ones, or one holds NaN or infinity.
    """
    write(memoryview(_header(plan.specs)))
    with ThreadPoolExecutor(1, thread_name_prefix="rl_vllm-checksums") as beside:
        for spec in plan.specs:
            tensor = next_as_declared(tensors, spec)
            require_finite(spec.name, tensor)
            data = bytes_of(tensor)
            # Both leave the interpreter to others while they work: the checksum costs no time of its own.
            crc32 = beside.submit(zlib.crc32, data) if checksum else None
            write(data)
            yield ShardEntry(spec=spec, file=plan.file, crc32=None if crc32 is None else crc32.result())


def in_time(entries: Iterable[ShardEntry], version: int, deadline: float) -> Iterator[ShardEntry]:
    """The entries, for as long as there is time.

    Args:
        entries: Yielded as their tensors are written.
        version: Named in the error.
        deadline: On the monotonic clock, in seconds.

    Raises:
        RefitError: The deadline has passed; says how far the writing came.
    """
    for number, entry in enumerate(entries, start=1):
        if time.monotonic() > deadline:
            raise RefitError(version, "stage", (), f"out of time after {number} tensors: raise stage_timeout_s")
        yield entry


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


def sync_folder(folder: Path) -> None:
    """Flush a folder's list of names, so that a rename in it is there after a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Write tensors as safetensors shards in one pass, few of them in memory at once, with a checksum for each.

A shard's bytes go to whoever takes them: a file, or an array that becomes an object of a store.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from rl_vllm.errors import BadInputError, RefitError
from rl_vllm.types import ShardEntry, TensorSpec, hash_of_bytes
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

_MOST_THREADS = 8
# What the source makes only for us (gathered, cast) may fill this much memory, or that of one larger tensor.
_MOST_BYTES_UNDER_WAY = 256 << 20


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
            yield from write_shard(plan, tensors, partial(_write_all, file.fileno()), checksum=checksum)
            os.fsync(file.fileno())


def write_shard(
    plan: ShardPlan,
    tensors: Iterator[tuple[str, torch.Tensor]],
    write: Callable[[int, memoryview], None],
    *,
    checksum: bool = True,
) -> Iterator[ShardEntry]:
    """Write one plan's bytes, yielding each tensor's entry when its bytes are written.

    Several threads check, write and hash a tensor each: all of it leaves the interpreter to others.

    Args:
        plan: What the shard holds.
        tensors: A pass over the source that has come to the plan's first tensor.
        write: Puts bytes, all of them, at an offset; called from several threads.
        checksum: Whether the entries have one.

    Raises:
        BadInputError: The tensors are not the planned ones, or one holds NaN or infinity.
    """
    header = _header(plan.specs)
    write(0, memoryview(header))
    offset = len(header)
    under_way: deque[tuple[TensorSpec, Future[int | None]]] = deque()
    bytes_under_way = 0
    with ThreadPoolExecutor(num_threads(), thread_name_prefix="rl_vllm-shard") as pool:
        try:
            for spec in plan.specs:
                size = size_bytes(spec)
                while under_way and bytes_under_way + size > _MOST_BYTES_UNDER_WAY:
                    bytes_under_way -= size_bytes(under_way[0][0])
                    yield _entry(plan, *under_way.popleft())
                tensor = next_as_declared(tensors, spec)
                future = pool.submit(_write_one, spec.name, tensor, partial(write, offset), checksum=checksum)
                under_way.append((spec, future))
                bytes_under_way += size
                offset += size
            while under_way:
                yield _entry(plan, *under_way.popleft())
        finally:
            for _, future in under_way:
                future.cancel()


def num_threads() -> int:
    """Threads that read or write weights at once; memory has no more speed for many."""
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)))


def _write_one(name: str, tensor: torch.Tensor, write: Callable[[memoryview], None], *, checksum: bool) -> int | None:
    require_finite(name, tensor)
    data = bytes_of(tensor)
    write(data)
    return hash_of_bytes(data) if checksum else None


def _entry(plan: ShardPlan, spec: TensorSpec, future: Future[int | None]) -> ShardEntry:
    return ShardEntry(spec=spec, file=plan.file, xxh3=future.result())


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


def _write_all(descriptor: int, offset: int, data: memoryview) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


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

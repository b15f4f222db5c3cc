"""Read a staged version from shared storage: map it, prove it whole, hand out its tensors.

Nothing here knows vLLM. Everything that can be wrong is found by :meth:`StagedFolder.verify`, before any model is
touched; what was verified is the mapping that is loaded later, so a folder removed in between does no harm.
"""

from __future__ import annotations

import json
import mmap
import struct
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from rl_vllm.engine.weight_specs import disagreement
from rl_vllm.errors import RefitError
from rl_vllm.types import ShardEntry, TensorSpec, WeightManifest, WeightUpdate, digest_of, hash_of_bytes

FORMAT_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class StagedFolder:
    """One version's folder, mapped into this process.

    Args:
        update: Its payload names the folder.

    Raises:
        RefitError: The manifest is missing, torn, or of another version or writer.
    """

    def __init__(self, update: WeightUpdate) -> None:
        self._update = update
        self._folder = Path(str(update.payload["folder"]))
        self._manifest = self._read_manifest()
        self._shards: dict[str, _Shard] = {}

    @property
    def checksum(self) -> str:
        """Digest of the tensors, as verified; empty when the trainer computed no checksums."""
        return digest_of(self._manifest.entries) or ""

    @property
    def is_here(self) -> bool:
        """True: what is verified is mapped."""
        return True

    def verify(self, expected: Sequence[TensorSpec], cancelled: threading.Event) -> None:
        """Map every shard and compare names, shapes, dtypes, sizes and checksums.

        Cost: one read of all bytes, at the memory's speed; the interpreter's lock is free meanwhile.

        Raises:
            RefitError: Tensors are not the model's (all of them), or the first other thing that is wrong, or
                ``cancelled`` was set.
        """
        reason = disagreement([entry.spec for entry in self._manifest.entries], expected)
        if reason is not None:
            raise self._error(reason)
        for entry in self._manifest.entries:
            if cancelled.is_set():
                raise self._error("staging was given up")
            found = self._shard(entry).bytes_of(entry.spec.name)
            if entry.xxh3 is not None and hash_of_bytes(found) != entry.xxh3:
                raise self._error(f"{entry.spec.name} in {entry.file} has a wrong checksum: the file is damaged")
        if self._update.checksum is not None and self.checksum != self._update.checksum:
            raise self._error(f"the weights' digest is {self.checksum}, the trainer sent {self._update.checksum}")

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors over the mapped bytes; valid until :meth:`close`."""
        for entry in self._manifest.entries:
            yield entry.spec.name, self._shard(entry).tensor(entry.spec.name)

    def close(self) -> None:
        """Forget the mappings; the memory goes when the last tensor over it does."""
        self._shards.clear()

    def _read_manifest(self) -> WeightManifest:
        path = self._folder / WeightManifest.FILE_NAME
        try:
            text = path.read_bytes()
            if zlib.crc32(text) != self._update.payload["manifest_crc32"]:
                raise self._error(f"{path} is not the manifest that the trainer wrote")
            manifest = WeightManifest.from_json(text.decode())
        except OSError as error:
            raise self._error(f"{path} cannot be read, is the folder shared with this machine? {error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise self._error(f"{path} is not a manifest: {error}") from error
        if manifest.version != self._update.version:
            raise self._error(f"{path} is of version {manifest.version}")
        if manifest.writer != self._update.payload["writer"]:
            raise self._error(f"{path} was written by {manifest.writer}, not by {self._update.payload['writer']}")
        return manifest

    def _shard(self, entry: ShardEntry) -> _Shard:
        if entry.file not in self._shards:
            if Path(entry.file).name != entry.file:
                raise self._error(f"{entry.file!r} is not the name of a file in the version's folder")
            try:
                self._shards[entry.file] = _Shard(self._folder / entry.file)
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise self._error(f"{entry.file} cannot be used: {error}") from error
        shard = self._shards[entry.file]
        if shard.specs.get(entry.spec.name) != entry.spec:
            raise self._error(
                f"{entry.file} holds {shard.specs.get(entry.spec.name)} where the manifest has {entry.spec}"
            )
        return shard

    def _error(self, reason: str) -> RefitError:
        return RefitError(self._update.version, "stage", (), reason)


class _Shard:
    """One safetensors file, mapped copy-on-write: nothing that a loader does reaches the file.

    Raises:
        ValueError: The file is torn or not in the format.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 8:
                raise ValueError(f"it is torn: {size} bytes")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        (header_bytes,) = struct.unpack_from("<Q", self._map)
        if header_bytes > size - 8:
            raise ValueError(f"it is torn: {size} bytes, its header alone has {header_bytes}")
        header: Mapping[str, Mapping[str, object]] = json.loads(self._map[8 : 8 + header_bytes])
        self._start = 8 + header_bytes
        self._offsets: dict[str, tuple[int, int]] = {}
        self.specs: dict[str, TensorSpec] = {}
        for name, facts in header.items():
            if name != "__metadata__":
                self._add(name, str(facts["dtype"]), facts["shape"], facts["data_offsets"], size - self._start)

    def bytes_of(self, name: str) -> memoryview:
        begin, end = self._offsets[name]
        return memoryview(self._map)[self._start + begin : self._start + end]

    def tensor(self, name: str) -> torch.Tensor:
        spec = self.specs[name]
        dtype: torch.dtype = vars(torch)[spec.dtype]
        data = self.bytes_of(name)
        if not data:
            return torch.empty(spec.shape, dtype=dtype)
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(spec.shape)

    def _add(self, name: str, dtype_code: str, shape: object, offsets: object, available: int) -> None:
        if not isinstance(shape, list) or not isinstance(offsets, list) or dtype_code not in FORMAT_DTYPES:
            raise ValueError(f"its header describes {name} as {dtype_code} {shape} {offsets}")
        begin, end = offsets
        dtype = FORMAT_DTYPES[dtype_code]
        count = dtype.itemsize
        for length in shape:
            count *= length
        if begin < 0 or end - begin != count:
            raise ValueError(f"its header gives {name} {end - begin} bytes, {dtype} {shape} has {count}")
        if end > available:
            raise ValueError(f"it is torn: {name} ends at byte {end} of its data, there are {available}")
        self._offsets[name] = (begin, end)
        self.specs[name] = TensorSpec(name, str(dtype).removeprefix("torch."), tuple(shape))

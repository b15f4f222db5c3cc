"""Weights through Ray's object store: for clusters whose machines share no folder.

The files of a shared folder, each as one object. Ray moves an object to a machine once, whoever asks for it there, and
keeps it while this process refers to it, so a replica that starts later can still have it.
"""

from __future__ import annotations

import time
import uuid
import zlib
from collections.abc import Iterator

import numpy as np
import torch

from rl_vllm.config import require_at_least
from rl_vllm.errors import BadInputError, ConfigError, RefitError
from rl_vllm.protocols import WeightSource
from rl_vllm.protocols.object_store import NAME, Bytes, Put, StoredShards, StoredVersion
from rl_vllm.types import ShardEntry, WeightManifest, WeightUpdate, digest_of
from rl_vllm.weights.shard_writer import ShardPlan, in_time, plan_shards, write_shard


class ObjectStoreTransport:
    """Stages weights as safetensors shards in Ray's object store.

    Args:
        keep_versions: Versions kept by :meth:`retire`, at least 1; while one is staged the store holds one more.
        shard_bytes: Largest object, unless one tensor is larger. Beside the store, one is in this process's memory.
        checksum: Whether trainer and engines each compute a checksum of every tensor; without, names, shapes, dtypes,
            sizes, the manifest and finite values are still checked.
        put: Stores one array and returns a reference to it; None means ``ray.put``.

    Raises:
        ConfigError: A value is out of range.
    """

    name = NAME

    def __init__(
        self,
        *,
        keep_versions: int = 2,
        shard_bytes: int = 512 << 20,
        checksum: bool = True,
        put: Put | None = None,
    ) -> None:
        require_at_least("keep_versions", keep_versions, 1)
        require_at_least("shard_bytes", shard_bytes, 1)
        self._keep_versions = keep_versions
        self._shard_bytes = shard_bytes
        self._checksum = checksum
        self._put = put
        self._writer = uuid.uuid4().hex[:12]
        self._kept: dict[int, StoredShards] = {}

    @property
    def versions(self) -> tuple[int, ...]:
        """What this transport keeps in the store, oldest first."""
        return tuple(sorted(self._kept))

    def stage(self, source: WeightSource, version: int, *, timeout_s: float) -> WeightUpdate:
        """Put one version into the store, shard by shard; this process owns it.

        Cost: two copies of the weights, one read for the checksum and one for the check that all are finite, on up
        to eight cores; of tensors made for us (gathered or cast) up to 256 MB at a time.

        Raises:
            ConfigError: This process is not connected to Ray.
            RefitError: The store is full or refuses, the version is there already, a weight is NaN or infinite (phase
                "check"), or ``timeout_s`` passed. Nothing is left behind.
        """
        from ray.exceptions import RayError

        deadline = time.monotonic() + timeout_s
        put = self._put or _ray_put()
        if version in self._kept:
            reason = f"version {version} is in the store already: give each service a transport of its own"
            raise RefitError(version, "stage", (), reason)
        plans = plan_shards(source.specs(), self._shard_bytes)
        needed = sum(plan.num_bytes for plan in plans)
        shards = StoredShards({})
        try:
            entries = tuple(in_time(self._put_all(put, plans, iter(source), shards), version, deadline))
        except BaseException as error:
            # An error may be remembered for long; what it was about must not stay in the store with it.
            shards.drop()
            if isinstance(error, BadInputError):
                raise RefitError(version, "check", (), str(error)) from error
            if isinstance(error, RayError | MemoryError):
                raise RefitError(version, "stage", (), _explain(error, needed)) from error
            raise
        manifest = WeightManifest(version=version, writer=self._writer, entries=entries).to_json()
        stored = StoredVersion(
            shards=shards,
            manifest=manifest,
            manifest_crc32=zlib.crc32(manifest.encode()),
            writer=self._writer,
        )
        self._kept[version] = shards
        return WeightUpdate(
            version=version,
            transport=self.name,
            payload=stored.to_payload(),
            num_tensors=len(entries),
            num_bytes=needed,
            checksum=digest_of(entries),
        )

    def retire(self, version: int) -> None:
        """Let go of the versions that no replica needs now, except the newest ``keep_versions`` up to ``version``."""
        found = [old for old in self.versions if old <= version]
        for old in found[: -self._keep_versions]:
            self._kept.pop(old).drop()

    def discard(self, update: WeightUpdate) -> None:
        """Let go of a version that will not be committed; a replica that has it on its machine keeps that."""
        shards = self._kept.pop(update.version, None)
        if shards is not None:
            shards.drop()

    def close(self) -> None:
        """Let go of everything: a replica that starts later gets the next refit's weights. Idempotent."""
        while self._kept:
            _, shards = self._kept.popitem()
            shards.drop()

    def _put_all(
        self,
        put: Put,
        plans: tuple[ShardPlan, ...],
        tensors: Iterator[tuple[str, torch.Tensor]],
        shards: StoredShards,
    ) -> Iterator[ShardEntry]:
        for plan in plans:
            shard = _Shard(plan.file_bytes)
            yield from write_shard(plan, tensors, shard.write, checksum=self._checksum)
            shards.add(plan.file, put(shard.data))
            # Before the next one is made: one at a time is what this process has beside the store.
            del shard


class _Shard:
    """A file's bytes as they are written."""

    def __init__(self, num_bytes: int) -> None:
        self.data: Bytes = np.empty(num_bytes, dtype=np.uint8)

    def write(self, offset: int, data: memoryview) -> None:
        # numpy's copy, unlike a memoryview's, lets other threads run.
        self.data[offset : offset + len(data)] = np.frombuffer(data, dtype=np.uint8)


def _ray_put() -> Put:
    import ray

    # Asked first: ``ray.put`` would start a Ray of its own, which no engine is in.
    if not ray.is_initialized():
        raise ConfigError(
            "transport 'object_store' needs this process connected to the engines' Ray: launch the service "
            "(executor='ray') or call ray.init() first, or use transport='shared_storage' or 'broadcast'"
        )
    put: Put = ray.put
    return put


def _explain(error: Exception, needed: int) -> str:
    from ray.exceptions import ObjectStoreFullError, OutOfDiskError

    first_line = str(error).strip().partition("\n")[0] or type(error).__name__
    if isinstance(error, ObjectStoreFullError | OutOfDiskError):
        return (
            f"Ray's object store has no room for weights of {needed} bytes ({first_line}): give it more "
            "(ray start --object-store-memory), lower keep_versions, or use transport='broadcast', which stores nothing"
        )
    if isinstance(error, MemoryError):
        return f"this process has no memory for a shard of the weights ({first_line}): lower shard_bytes"
    return f"Ray could not store the weights: {type(error).__name__}: {first_line}"

"""Weights that come through Ray's object store land in a folder of this machine before the workers are told.

The engine's driving process fetches the objects, because workers are not connected to Ray, and writes each into a file.
From there on it is shared storage: workers map the files and verify them. Nothing here knows vLLM.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np

from rl_vllm.errors import RefitError
from rl_vllm.protocols.object_store import NAME, Bytes, Get, StoredVersion
from rl_vllm.protocols.private_folder import PrivateFolder
from rl_vllm.types import WeightManifest, WeightUpdate

# What is left for the workers when fetching took all the time: they then say how far they came.
_LEAST_S = 0.001


@asynccontextmanager
async def landed(
    update: WeightUpdate,
    *,
    replica: int,
    timeout_s: float,
    nodes: Callable[[], tuple[str, ...]] | None = None,
    get: Get | None = None,
) -> AsyncIterator[tuple[WeightUpdate, float]]:
    """The update as workers of this machine can read it, and the seconds that are left, while the context is open.

    An update of another transport is passed on as it is. Leaving removes the files: a worker that has mapped and
    verified them needs them no longer, and they go with this process too, however it ends.

    Args:
        update: As the trainer staged it.
        replica: Named in errors.
        timeout_s: Limit for fetching and for what the context is opened for.
        nodes: The machines that the workers are on, asked in a thread, which may wait for the cluster; None when they
            are all on this one.
        get: Fetches one object; None means ``ray.get``.

    Raises:
        RefitError: The workers are on several machines, an object is lost or late, the trainer has let the version go,
            or there is no room here.
    """
    if update.transport != NAME:
        yield update, timeout_s
        return
    deadline = time.monotonic() + timeout_s
    landing = _Landing(update, replica, deadline, get or _ray_get)
    try:
        local = await asyncio.to_thread(landing.run, nodes)
        yield local, max(deadline - time.monotonic(), _LEAST_S)
    finally:
        # In a thread: files that nobody has mapped give their memory back now.
        await asyncio.to_thread(landing.end)


class _Landing:
    """One version on its way from the store into a folder."""

    def __init__(self, update: WeightUpdate, replica: int, deadline: float, get: Get) -> None:
        self._update = update
        self._replica = replica
        self._deadline = deadline
        self._get = get
        self._lock = threading.Lock()
        self._folder: PrivateFolder | None = None
        self._is_running = False
        self._has_ended = False

    def run(self, nodes: Callable[[], tuple[str, ...]] | None) -> WeightUpdate:
        """Fetch and write everything; runs in a thread, and gives up at the next file when :meth:`end` was called."""
        from ray.exceptions import RayError

        with self._lock:
            self._is_running = True
        try:
            if nodes is not None:
                self._require_one_machine(nodes())
            return self._land(StoredVersion.from_payload(self._update.payload))
        except RayError as error:
            raise self._error(_explain(error)) from error
        except OSError as error:
            reason = f"weights of {self._update.num_bytes} bytes cannot be written on its machine ({error})"
            raise self._error(f"{reason}: free space in /dev/shm or in the temporary folder") from error
        finally:
            with self._lock:
                self._is_running = False
                has_ended = self._has_ended
            if has_ended:
                self.end()

    def end(self) -> None:
        """Remove the files, or have the thread that is writing do it: between two files nobody adds one. Idempotent."""
        with self._lock:
            self._has_ended = True
            if self._is_running:
                return
            folder, self._folder = self._folder, None
        if folder is not None:
            folder.remove()

    def _land(self, stored: StoredVersion) -> WeightUpdate:
        references = stored.shards.references
        if not references:
            raise self._error("the trainer has let this version go, its transport was closed: refit again")
        self._require_wanted()
        # Twice: the store lies in the same memory and takes it only as it fills, with these very objects for one.
        self._folder = PrivateFolder("rl_vllm-landed-", 2 * self._update.num_bytes)
        path = self._folder.path
        for number, (name, reference) in enumerate(references.items(), start=1):
            left_s = self._deadline - time.monotonic()
            if left_s <= 0:
                raise self._error(f"out of time after {number - 1} of {len(references)} shards: raise stage_timeout_s")
            (path / name).write_bytes(np.ascontiguousarray(self._get(reference, left_s)).data)
            self._require_wanted()
        (path / WeightManifest.FILE_NAME).write_bytes(stored.manifest.encode())
        payload = {"folder": str(path), "writer": stored.writer, "manifest_crc32": stored.manifest_crc32}
        return replace(self._update, transport="shared_storage", payload=payload)

    def _require_wanted(self) -> None:
        with self._lock:
            has_ended = self._has_ended
        if has_ended:
            raise self._error("staging was given up")

    def _require_one_machine(self, nodes: tuple[str, ...]) -> None:
        if len(nodes) == 1:
            return
        where = f"on {len(nodes)} machines" if nodes else "on machines that Ray does not name"
        raise self._error(
            f"its workers are {where}, and what comes through the object store lands on one: use "
            "transport='shared_storage' with a folder that all machines see, or transport='broadcast'"
        )

    def _error(self, reason: str) -> RefitError:
        return RefitError(self._update.version, "stage", (self._replica,), reason)


def _ray_get(reference: object, timeout_s: float) -> Bytes:
    import ray

    # Zero-copy: the array is over the store's own memory on this machine.
    data: Bytes = ray.get(reference, timeout=timeout_s)
    return data


def _explain(error: Exception) -> str:
    from ray import exceptions

    first_line = str(error).strip().partition("\n")[0]
    words = f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
    if isinstance(error, exceptions.GetTimeoutError):
        return f"a shard did not come within stage_timeout_s ({words}): raise it, or use smaller shards (shard_bytes)"
    if isinstance(error, exceptions.OwnerDiedError):
        return f"the process that put the weights into the object store is gone ({words}): refit from the one that runs"
    if isinstance(error, exceptions.ObjectLostError):
        return f"a shard is lost, with the machine that held it or because the store dropped it ({words}): refit again"
    if isinstance(error, exceptions.ObjectStoreFullError | exceptions.OutOfDiskError):
        return (
            f"the object store of its machine has no room for a shard ({words}): give it more "
            "(ray start --object-store-memory), lower shard_bytes, or use transport='broadcast'"
        )
    return f"Ray could not fetch a shard: {words}"

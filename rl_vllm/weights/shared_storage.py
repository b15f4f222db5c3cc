"""Weights through a folder that trainer and engines both see: tmpfs on one machine, a network file system on several.

A version is written aside, checksummed, flushed and renamed, so a reader sees all of it or nothing. Readers map the
files; a collected version stays readable for who has it open.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import socket
import time
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import torch

from rl_vllm.config import require_at_least
from rl_vllm.errors import BadInputError, ConfigError, RefitError
from rl_vllm.protocols import WeightSource
from rl_vllm.protocols.private_folder import PrivateFolder
from rl_vllm.types import WeightManifest, WeightUpdate, digest_of
from rl_vllm.weights.shard_writer import ShardPlan, in_time, plan_shards, sync_folder, write_shards

LOCK_FILE = ".rl_vllm-writer.lock"


class SharedStorageTransport:
    """Stages weights as safetensors shards with a manifest.

    Args:
        folder: Where versions go, seen by every engine under the same path; ``~`` is the home folder; kept when the
            transport closes, and to be used by one run, or by a later one whose versions are higher. None means
            a private folder, made by the first :meth:`stage`: in memory when that has room for ``keep_versions + 1``
            versions, else in the temporary folder. It goes with :meth:`close` or with this process, however that ends.
        keep_versions: Versions kept by :meth:`retire`, at least 1.
        shard_bytes: Largest file, unless one tensor is larger.
        checksum: Whether trainer and engines each compute a checksum of every tensor. Without, a file damaged after it
            was written is not noticed; names, shapes, dtypes, sizes, the manifest and finite values are still checked.

    Raises:
        ConfigError: A value is out of range.
    """

    name = "shared_storage"

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        keep_versions: int = 2,
        shard_bytes: int = 2 << 30,
        checksum: bool = True,
    ) -> None:
        require_at_least("keep_versions", keep_versions, 1)
        require_at_least("shard_bytes", shard_bytes, 1)
        self._folder = None if folder is None else _absolute(folder)
        self._keep_versions = keep_versions
        self._shard_bytes = shard_bytes
        self._checksum = checksum
        self._writer = uuid.uuid4().hex[:12]
        self._lock: BinaryIO | None = None
        self._private: PrivateFolder | None = None

    @property
    def folder(self) -> Path | None:
        """Where versions go, or None before the first :meth:`stage` of a transport with a private folder."""
        return self._folder

    def stage(self, source: WeightSource, version: int, *, timeout_s: float) -> WeightUpdate:
        """Write one version and rename it into place.

        Cost: one copy of the weights, one read for the checksum and one for the check that all are finite, on up to
        eight cores; of tensors made for us (gathered or cast) up to 256 MB at a time.

        Raises:
            RefitError: The disk is full, another trainer uses the folder, the version is there already, the folder
                holds versions of an ended run that this run would come to (found by the first call), a weight is NaN or
                infinite (phase "check"), or ``timeout_s`` passed. Nothing is left behind.
        """
        deadline = time.monotonic() + timeout_s
        plans = plan_shards(source.specs(), self._shard_bytes)
        needed = sum(plan.num_bytes for plan in plans)
        try:
            folder = self._open(version, needed)
            _require_room(folder, version, needed)
            final = folder / _version_name(version)
            if final.exists():
                raise RefitError(
                    version, "stage", (), f"{final} exists already: remove it, or use a folder of this run's own"
                )
            aside = folder / f".staging-{_version_name(version)}-{self._writer}"
            try:
                update = self._write(aside, final, plans, iter(source), version, deadline)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
        except BadInputError as error:
            raise RefitError(version, "check", (), str(error)) from error
        except OSError as error:
            raise RefitError(version, "stage", (), _explain(error, needed, self._folder)) from error
        return update

    def retire(self, version: int) -> None:
        """Remove the versions that no replica needs now, except the newest ``keep_versions`` up to ``version``."""
        if self._folder is None or self._lock is None:
            return
        found = sorted(
            old for path in self._folder.iterdir() if (old := _version_of(path)) is not None and old <= version
        )
        for old in found[: -self._keep_versions]:
            shutil.rmtree(self._folder / _version_name(old))

    def discard(self, update: WeightUpdate) -> None:
        """Remove a version that will not be committed; a replica that has mapped it keeps its pages."""
        shutil.rmtree(str(update.payload["folder"]), ignore_errors=True)

    def close(self) -> None:
        """Unlock the folder; remove it when it is private. Idempotent."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        if self._private is not None:
            self._private.remove()
            self._private = None
            self._folder = None

    def _open(self, version: int, needed: int) -> Path:
        """The folder, made and locked by the first call."""
        if self._folder is not None and self._lock is not None:
            return self._folder
        if self._folder is None:
            self._private = PrivateFolder("rl_vllm-weights-", (self._keep_versions + 1) * needed)
            self._folder = self._private.path
        self._folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(self._folder, self._writer, version)
        try:
            _refuse_leftovers(self._folder, self._writer, version)
        except BaseException:
            # Unlocked again, the next call looks once more: the versions may be gone by then.
            lock.close()
            raise
        self._lock = lock
        for leftover in self._folder.glob(".staging-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        return self._folder

    def _write(
        self,
        aside: Path,
        final: Path,
        plans: tuple[ShardPlan, ...],
        tensors: Iterator[tuple[str, torch.Tensor]],
        version: int,
        deadline: float,
    ) -> WeightUpdate:
        aside.mkdir()
        entries = tuple(in_time(write_shards(aside, plans, tensors, checksum=self._checksum), version, deadline))
        manifest = WeightManifest(version=version, writer=self._writer, entries=entries).to_json().encode()
        with (aside / WeightManifest.FILE_NAME).open("wb") as file:
            file.write(manifest)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(aside)
        aside.rename(final)
        sync_folder(final.parent)
        return WeightUpdate(
            version=version,
            transport=self.name,
            payload={"folder": str(final), "writer": self._writer, "manifest_crc32": zlib.crc32(manifest)},
            num_tensors=len(entries),
            num_bytes=sum(plan.num_bytes for plan in plans),
            checksum=digest_of(entries),
        )


def _version_name(version: int) -> str:
    return f"v{version:06d}"


def _version_of(path: Path) -> int | None:
    """The version a folder holds, or None for what is not one of ours."""
    match = re.fullmatch(r"v(\d{6,})", path.name)
    return int(match[1]) if match else None


def _absolute(folder: str | os.PathLike[str]) -> Path:
    try:
        return Path(folder).expanduser().absolute()
    except RuntimeError as error:
        raise ConfigError(f"folder {os.fspath(folder)!r} names a home that is not known: give the full path") from error


def _refuse_leftovers(folder: Path, writer: str, version: int) -> None:
    """Raise while versions of another writer, who has ended because the caller holds the lock, are in the way."""
    found = sorted(
        old
        for path in folder.iterdir()
        if (old := _version_of(path)) is not None and old >= version and _writer_of(path) != writer
    )
    if found:
        names = ", ".join(map(_version_name, found))
        reason = (
            f"{folder} holds {names} of an ended run, and this run begins with version {version} and would come to "
            "them: choose another folder, or delete them"
        )
        raise RefitError(version, "stage", (), reason)


def _writer_of(path: Path) -> str | None:
    """Who wrote a version, or None when its manifest does not say."""
    try:
        return WeightManifest.from_json((path / WeightManifest.FILE_NAME).read_text()).writer
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _lock(folder: Path, writer: str, version: int) -> BinaryIO:
    """Take the folder for this trainer; the kernel gives the lock back when its holder dies, so none is ever stale.

    Raises:
        RefitError: A living trainer has it.
    """
    file = (folder / LOCK_FILE).open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        holder = file.read().decode()
        file.close()
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        reason = f"{folder} is in use by another trainer, {holder}: give each trainer its own folder"
        raise RefitError(version, "stage", (), reason) from error
    file.truncate(0)
    file.write(json.dumps({"writer": writer, "pid": os.getpid(), "host": socket.gethostname()}).encode())
    file.flush()
    return file


def _require_room(folder: Path, version: int, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        reason = f"{folder} has {free} bytes free and the weights need {needed}: free space or choose another folder"
        raise RefitError(version, "stage", (), reason)


def _explain(error: OSError, needed: int, folder: Path | None) -> str:
    if error.errno == errno.ENOSPC and folder is not None:
        free = shutil.disk_usage(folder).free
        return f"{folder} is full: {free} bytes free, the weights need {needed}: free space or choose another folder"
    return f"{folder} cannot be written: {error}"

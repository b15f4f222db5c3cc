"""Versions of an adapter as folders in PEFT's format, written aside and renamed into place."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rl_vllm.protocols.private_folder import PrivateFolder
from rl_vllm.types import AdapterUpdate, hash_of_bytes, weights_digest
from rl_vllm.weights.shard_writer import bytes_of, sync_folder
from rl_vllm.weights.source import spec_of

if TYPE_CHECKING:
    from peft import LoraConfig

# A private folder holds the version that serves, the next one, and what requests in flight still use.
_VERSIONS_AT_ONCE = 4


class AdapterFolder:
    """Where the versions of one service's adapters lie.

    Args:
        folder: Seen by every engine under the same path, and kept at the end; None means a private folder, in memory
            when it has room, which goes with this object or with the process, however that ends.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        # Two runs in one folder never meet.
        self._writer = uuid.uuid4().hex[:12]
        self._written: dict[str, Path] = {}
        # Held: it goes with this object.
        self._private: PrivateFolder | None = None

    def write(
        self, name: str, version: int, tensors: Mapping[str, torch.Tensor], config: LoraConfig, *, checksum: bool
    ) -> AdapterUpdate:
        """Write one version; a reader sees all of it or nothing.

        Raises:
            OSError: It cannot be written; nothing is left behind.
        """
        from safetensors.torch import save_file

        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        folder = self._open(num_bytes)
        final = folder / f"{name}-v{version:06d}-{self._writer}"
        aside = folder / f".staging-{final.name}"
        try:
            aside.mkdir()
            save_file(dict(tensors), aside / "adapter_model.safetensors", metadata={"format": "pt"})
            config.save_pretrained(str(aside))
            for path in aside.iterdir():
                _sync_file(path)
            sync_folder(aside)
            aside.rename(final)
            sync_folder(folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        specs = ((spec_of(key, tensor), tensor) for key, tensor in tensors.items())
        update = AdapterUpdate(
            name=name,
            version=version,
            path=str(final),
            num_tensors=len(tensors),
            num_bytes=num_bytes,
            checksum=weights_digest((spec, hash_of_bytes(bytes_of(tensor))) for spec, tensor in specs)
            if checksum
            else None,
        )
        self._written[update.full_name] = final
        return update

    def keep(self, full_names: Collection[str]) -> None:
        """Remove every version but these; what an engine has loaded stays loaded."""
        for full_name in [name for name in self._written if name not in full_names]:
            shutil.rmtree(self._written.pop(full_name), ignore_errors=True)

    def _open(self, num_bytes: int) -> Path:
        if self._folder is None:
            self._private = PrivateFolder("rl_vllm-weights-", _VERSIONS_AT_ONCE * num_bytes)
            self._folder = self._private.path
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())

"""What the two ends of a refit over an object store agree on: the payload of its updates.

A version is the files that shared storage would hold, each an object: one uint8 array with the bytes of a safetensors
file. The engine's end writes them into a folder of its own machine, where workers read them as shared storage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

NAME = "object_store"

Bytes: TypeAlias = NDArray[np.uint8]
# Stores an array and returns a reference, as ``ray.put`` does.
Put: TypeAlias = Callable[[Bytes], object]
# The array of a reference, which is there within so many seconds; raises Ray's errors.
Get: TypeAlias = Callable[[object, float], Bytes]


class StoredShards:
    """References to the objects of one version, by file name; while this process holds them, the objects stay.

    An update is remembered for as long as a late replica may ask for it, and by more than one; its objects must not be.
    So all copies of an update in the trainer's process share this, and the transport empties it.

    Args:
        references: In the order of the files.
    """

    def __init__(self, references: Mapping[str, object]) -> None:
        self._references = dict(references)

    @property
    def references(self) -> Mapping[str, object]:
        """By file name; empty once they were dropped."""
        return self._references

    def add(self, file: str, reference: object) -> None:
        """One more, the last in the order of the files."""
        self._references[file] = reference

    def drop(self) -> None:
        """Let the objects go. Idempotent."""
        self._references = {}

    def __reduce__(self) -> tuple[type[StoredShards], tuple[dict[str, object]]]:
        return StoredShards, (self._references,)

    def __repr__(self) -> str:
        return f"StoredShards({list(self._references)})"


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """The payload of an update.

    Attributes:
        shards: Its files.
        manifest: The text of its :class:`~rl_vllm.types.WeightManifest`.
        manifest_crc32: Checksum of that text.
        writer: Identifies the trainer.
    """

    shards: StoredShards
    manifest: str
    manifest_crc32: int
    writer: str

    def to_payload(self) -> dict[str, object]:
        # Not ``asdict``, which would copy references outside Ray's sight.
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_payload(cls, payload: Mapping[str, object]) -> StoredVersion:
        """Inverse of :meth:`to_payload`; other entries, such as the replica's index, are passed over."""
        known: dict[str, object] = {name: payload[name] for name in cls.__slots__}
        return cls(**known)  # type: ignore[arg-type]

"""Values of a refit: what the engine expects, what is sent, what was proven."""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace

import xxhash


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor under its checkpoint name.

    Attributes:
        name: Hugging Face checkpoint name, for example ``model.layers.0.mlp.up_proj.weight``.
        dtype: torch's name without the prefix, for example ``bfloat16``.
        shape: Full shape, before any sharding.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


def hash_of_bytes(data: bytes | memoryview) -> int:
    """64-bit XXH3 of some bytes, as a signed integer: what torch can send. The interpreter is free meanwhile."""
    return int.from_bytes(xxhash.xxh3_64_digest(data), "big", signed=True)


def weights_digest(tensors: Iterable[tuple[TensorSpec, int]]) -> str:
    """Digest of a whole set of weights, from each tensor's spec and hash (:func:`hash_of_bytes`), in any order.

    Trainer and engines compute it each from the bytes in its own hands; equal digests mean equal weights.
    """
    lines = sorted(f"{spec.name} {spec.dtype} {list(spec.shape)} {number}" for spec, number in tensors)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


class InFlight(enum.Enum):
    """What happens to running requests when new weights are committed."""

    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"


class KVCache(enum.Enum):
    """What happens to KV computed under the old weights when a refit is committed.

    ``SEPARATE`` stands in the receipts of adapter refits only: every version of an adapter has KV of its own, so none
    was forgotten and none of another version is read.
    """

    RECOMPUTE = "recompute"
    REUSE = "reuse"
    SEPARATE = "separate"


class Sending(enum.Enum):
    """Which call on the engines a transport's trainer sends its bytes during."""

    WHILE_STAGING = "while staging"
    WHILE_COMMITTING = "while committing"


class Verify(enum.Enum):
    """How a refit is proven.

    ``CHECKSUM``: every worker's digest of what it loaded equals the trainer's digest of what it sent. ``LOGPROBS``: in
    addition every replica scores a probe batch as the trainer's model does. ``NONE``: neither is computed.
    """

    NONE = "none"
    CHECKSUM = "checksum"
    LOGPROBS = "logprobs"


@dataclass(frozen=True, slots=True)
class WeightReceiver:
    """One replica that takes part in a refit.

    Attributes:
        replica: Its index.
        num_workers: Its worker processes, over tensor, pipeline and data parallel ranks.
        hosts: The machines its workers run on, each once, its engine's own first; ``THIS_HOST`` is the caller's.
            Empty when nobody knows.
    """

    replica: int
    num_workers: int
    hosts: tuple[str, ...] = ()

    THIS_HOST = "localhost"

    @property
    def is_here(self) -> bool:
        """Whether all of it is known to run on the caller's machine."""
        return self.hosts == (self.THIS_HOST,)

    @property
    def is_on_one_host(self) -> bool:
        """Whether all of it is known to run on one machine."""
        return len(self.hosts) == 1


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """Where one tensor lies in shared storage.

    Attributes:
        spec: Name, dtype and shape.
        file: File name inside the version's folder.
        xxh3: :func:`hash_of_bytes` of the tensor's bytes, or None when the trainer computed no checksums.
    """

    spec: TensorSpec
    file: str
    xxh3: int | None


def digest_of(entries: Iterable[ShardEntry]) -> str | None:
    """The :func:`weights_digest` of stored tensors, or None when their checksums were not computed."""
    known = [(entry.spec, entry.xxh3) for entry in entries]
    if any(xxh3 is None for _, xxh3 in known):
        return None
    return weights_digest((spec, xxh3) for spec, xxh3 in known if xxh3 is not None)


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """Contents of one staged version; the file ``manifest.json`` in its folder.

    Attributes:
        version: The version these weights are.
        writer: Identifies the trainer that wrote the folder.
        entries: One per tensor.
    """

    version: int
    writer: str
    entries: tuple[ShardEntry, ...]

    FILE_NAME = "manifest.json"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WeightManifest:
        raw = json.loads(text)
        entries = tuple(
            ShardEntry(
                spec=TensorSpec(item["spec"]["name"], item["spec"]["dtype"], tuple(item["spec"]["shape"])),
                file=item["file"],
                xxh3=item["xxh3"],
            )
            for item in raw["entries"]
        )
        return cls(version=raw["version"], writer=raw["writer"], entries=entries)


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """One staged version, as every engine is told of it.

    Attributes:
        version: Above every version committed before.
        transport: Name of the transport that knows how to read ``payload``, for example ``shared_storage``.
        payload: The transport's own facts; JSON values by the time workers are told.
        num_tensors: Tensors in the update.
        num_bytes: Their bytes.
        checksum: The trainer's :func:`weights_digest` of what it sent, or None when the transport cannot know it.
        is_kept: Whether a replica that starts later can still have it.
        double_buffer: See :class:`~rl_vllm.config.RefitConfig`.
        workers_per_host: Workers that stage on one machine at once, at most, and share its memory.
    """

    version: int
    transport: str
    payload: Mapping[str, object]
    num_tensors: int
    num_bytes: int
    checksum: str | None = None
    is_kept: bool = True
    double_buffer: bool | None = None
    workers_per_host: int = 1

    def addressed_to(self, replica: int) -> WeightUpdate:
        """As one replica gets it: its payload holds the index too, so that its workers know their places in a group."""
        return replace(self, payload={**self.payload, "replica": replica})


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterUpdate:
    """One version of a trained adapter, as a service is told of it.

    Attributes:
        name: What trainer and requests call the adapter, ``policy`` for example.
        version: Above every version committed before, of weights or of an adapter.
        path: Folder in PEFT's format, readable on every replica's host.
        num_tensors: Tensors in it.
        num_bytes: Their bytes.
        checksum: The trainer's :func:`weights_digest` of them, which every engine compares with what it reads; None
            compares nothing.
    """

    name: str
    version: int
    path: str
    num_tensors: int
    num_bytes: int
    checksum: str | None = None

    @staticmethod
    def full_name_of(name: str, version: int) -> str:
        """What the engines call a version of an adapter: ``policy@v7``."""
        return f"{name}@v{version}"

    @property
    def full_name(self) -> str:
        return self.full_name_of(self.name, self.version)


@dataclass(frozen=True, slots=True)
class CommitReport:
    """What one engine did when it committed an update.

    Attributes:
        version: The version it serves now.
        stall_s: Seconds during which it made no token.
        checksum: Digest of all loaded tensors over its workers; equal on all replicas.
        prefix_cache_reset: Whether cached KV of the old weights is gone.
        is_double_buffered: Whether all its workers had loaded the weights before it paused, and only swapped them.
    """

    version: int
    stall_s: float
    checksum: str
    prefix_cache_reset: bool
    is_double_buffered: bool = False


@dataclass(frozen=True, slots=True)
class RefitReceipt:
    """Proof of a refit that took on every replica.

    Attributes:
        version: The version every replica serves now.
        transport: How the bytes moved.
        in_flight: What happened to running requests.
        kv: What happened to KV of the old weights.
        num_replicas: Replicas refitted.
        num_tensors: Tensors sent.
        num_bytes: Bytes sent.
        phase_s: Seconds of "check", "stage" and "commit", and of "verify" when logprobs were compared.
        stall_s: Longest time a replica made no token, in seconds; of an adapter at most that, being the time that the
            slowest replica took to load it.
        checksum: Digest that all replicas agree on; empty with ``Verify.NONE``.
        num_rpcs: Calls made to each replica to refit it; scoring a probe batch is not counted.
        is_double_buffered: Whether every replica loaded the weights while staging and only swapped them in the stall.
        logprob_max_difference: Largest difference between a replica's and the trainer's logprob of one probe token, in
            nats; None unless ``Verify.LOGPROBS``.
        logprob_mean_difference: Its mean over all replicas and tokens, in nats.
    """

    version: int
    transport: str
    in_flight: InFlight
    kv: KVCache
    num_replicas: int
    num_tensors: int
    num_bytes: int
    phase_s: Mapping[str, float] = field(default_factory=dict)
    stall_s: float = 0.0
    checksum: str = ""
    num_rpcs: int = 0
    is_double_buffered: bool = False
    logprob_max_difference: float | None = None
    logprob_mean_difference: float | None = None

    @property
    def total_s(self) -> float:
        return sum(self.phase_s.values())

    def as_metrics(self, prefix: str = "refit/") -> dict[str, float]:
        """Numbers for a logger, by ``prefix`` and name: what is not known is left out.

        ``version``, ``num_replicas``, ``num_tensors``, ``num_bytes``, ``num_rpcs``, ``is_double_buffered`` (1 or 0),
        ``check_s``, ``stage_s``, ``commit_s``, ``verify_s``, ``total_s``, ``stall_s``, ``stage_gb_per_s`` (1e9 bytes),
        ``logprob_max_difference`` and ``logprob_mean_difference`` (nats).
        """
        values: dict[str, float | None] = {
            "version": self.version,
            "num_replicas": self.num_replicas,
            "num_tensors": self.num_tensors,
            "num_bytes": self.num_bytes,
            "num_rpcs": self.num_rpcs,
            "is_double_buffered": self.is_double_buffered,
            **{f"{phase}_s": seconds for phase, seconds in self.phase_s.items()},
            "total_s": self.total_s,
            "stall_s": self.stall_s,
            "logprob_max_difference": self.logprob_max_difference,
            "logprob_mean_difference": self.logprob_mean_difference,
        }
        stage_s = self.phase_s.get("stage", 0.0)
        if stage_s > 0:
            values["stage_gb_per_s"] = self.num_bytes / 1e9 / stage_s
        return {f"{prefix}{name}": float(value) for name, value in values.items() if value is not None}

    def __str__(self) -> str:
        phases = " ".join(f"{name}={seconds:.3f}s" for name, seconds in self.phase_s.items())
        difference = ""
        if self.logprob_max_difference is not None and self.logprob_mean_difference is not None:
            difference = (
                f" logprob_max={self.logprob_max_difference:.3g} logprob_mean={self.logprob_mean_difference:.3g}"
            )
        return (
            f"version={self.version} transport={self.transport} replicas={self.num_replicas} "
            f"tensors={self.num_tensors} MB={self.num_bytes / 1e6:.1f} {phases} stall={self.stall_s:.3f}s "
            f"in_flight={self.in_flight.value} kv={self.kv.value} "
            f"double_buffered={'yes' if self.is_double_buffered else 'no'} checksum={self.checksum or '-'}"
            f"{difference}"
        )

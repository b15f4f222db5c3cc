"""What the two ends of a broadcast agree on: the invitation, the keys they meet under, and the group they form.

One refit, told by the keys of its store::

    specs            the trainer's specs, in the order of their bytes
    here/RANK        a worker has found the specs right and will take part, or
    refused/RANK     why it will not
    go | cancel      the trainer's answer: the group is formed only when all are here
    failed           why a worker gave up later
    done/RANK        a worker has everything, and it was what the trainer sent

The bytes are those of all tensors one after the other, each from a multiple of ``ALIGNMENT`` on, cut into buckets
without regard to where a tensor ends; only the last bucket is shorter.

When vLLM forms the group and moves the bytes (:mod:`rl_vllm.engine.vllm_nccl`), ``go`` carries how to join, the bytes
are cut as vLLM packs them (:func:`packed_chunks`), and there are two more keys::

    joined/RANK      a worker is in the group
    hashes             the hash of each tensor, once the last is on its way
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from rl_vllm.types import TensorSpec, WeightReceiver, hash_of_bytes

Hold = Literal["host", "none"]
Store = TCPStore
# Called again and again during a wait; what it raises ends the wait.
Check = Callable[[], None]

SPECS = "specs"
GO = "go"
CANCEL = "cancel"
FAILED = "failed"
HASHES = "hashes"

# A tensor can be looked at where its bytes came to lie, whatever its dtype.
ALIGNMENT = 16

# One is under way while the trainer fills, and a worker reads, another.
BUCKETS_IN_FLIGHT = 2
# A group forms in milliseconds once all have been heard of; one who dies in between is not waited for longer.
FORMING_S = 30.0
# How long closing waits for an operation that a peer's silence holds up; it then ends in the background.
LEAVING_S = 1.0

_FIRST_POLL_S = 0.0005
_LONGEST_POLL_S = 0.005


def here(rank: int) -> str:
    return f"here/{rank}"


def refused(rank: int) -> str:
    return f"refused/{rank}"


def joined(rank: int) -> str:
    return f"joined/{rank}"


def done(rank: int) -> str:
    return f"done/{rank}"


@dataclass(frozen=True, slots=True)
class Invitation:
    """The payload of an update.

    Attributes:
        host: Where the trainer's store listens.
        port: Its port.
        group: Names this refit; no two refits share one.
        first_ranks: Rank of each replica's first worker, by its index as a string (JSON has no other keys). The
            trainer's rank is 0.
        world_size: The trainer and all workers.
        backend: ``gloo`` or ``nccl``.
        bucket_bytes: Length of all buckets but the last.
        hold: Whether workers keep the whole version in host memory before it is loaded.
        timeout_s: Limit for each wait of a worker.
        checksum: Whether the hash of each tensor is sent after the last bucket.
    """

    host: str
    port: int
    group: str
    first_ranks: Mapping[str, int]
    world_size: int
    backend: str
    bucket_bytes: int
    hold: Hold
    timeout_s: float
    checksum: bool

    def to_payload(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_payload(cls, payload: Mapping[str, object]) -> Invitation:
        """Inverse of :meth:`to_payload`; other entries, such as the replica's index, are passed over."""
        known: dict[str, object] = {name: payload[name] for name in cls.__slots__}
        return cls(**known)  # type: ignore[arg-type]


def specs_to_json(specs: Sequence[TensorSpec]) -> str:
    return json.dumps([[spec.name, spec.dtype, list(spec.shape)] for spec in specs])


def specs_from_json(text: str) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in json.loads(text))


def dtype_of(spec: TensorSpec) -> torch.dtype:
    dtype: torch.dtype = vars(torch)[spec.dtype]
    return dtype


def size_bytes(spec: TensorSpec) -> int:
    count = dtype_of(spec).itemsize
    for length in spec.shape:
        count *= length
    return count


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's own memory as one row of uint8; a copy when it is not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def hash_of(tensor: torch.Tensor) -> int:
    """Hash of a tensor's bytes, which are copied to the host when they are not there."""
    return hash_of_bytes(flat_bytes(tensor).cpu().numpy().data)


def starts_of(specs: Sequence[TensorSpec]) -> list[int]:
    """Where each tensor begins in the stream, and in the end where the last one's padding ends."""
    starts = [0]
    for spec in specs:
        starts.append(-(-(starts[-1] + size_bytes(spec)) // ALIGNMENT) * ALIGNMENT)
    return starts


def bucket_lengths(num_bytes: int, bucket_bytes: int) -> list[int]:
    """Lengths of the buckets that carry ``num_bytes``."""
    whole, rest = divmod(num_bytes, bucket_bytes)
    return [bucket_bytes] * whole + ([rest] if rest else [])


def packed_chunks(specs: Sequence[TensorSpec], chunk_bytes: int) -> list[list[TensorSpec]]:
    """The tensors of each of vLLM's packed broadcasts: a chunk ends with the tensor that takes it above its size."""
    chunks: list[list[TensorSpec]] = [[]]
    num_bytes = 0
    for spec in specs:
        if num_bytes > chunk_bytes:
            chunks.append([])
            num_bytes = 0
        chunks[-1].append(spec)
        num_bytes += size_bytes(spec)
    return chunks


def ranks_of(receivers: Sequence[WeightReceiver]) -> tuple[dict[str, int], int]:
    """Rank of each replica's first worker, by its index as a string, and the world size; the trainer's rank is 0."""
    first_ranks: dict[str, int] = {}
    world_size = 1
    for receiver in receivers:
        first_ranks[str(receiver.replica)] = world_size
        world_size += receiver.num_workers
    return first_ranks, world_size


class Deadline:
    """A moment by which everything must have happened.

    Args:
        timeout_s: Seconds from now.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._at = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds left, never below a millisecond: a limit of zero means none to some of those who take it."""
        return max(self._at - time.monotonic(), 0.001)

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._at


def wait_until(ready: Callable[[], bool], check: Callable[[], None], deadline: Deadline) -> bool:
    """Wait for ``ready``; ``check`` raises what ends the wait before.

    Returns:
        False when the deadline came first.
    """
    pause = threading.Event()
    pause_s = _FIRST_POLL_S
    while not ready():
        check()
        if deadline.is_over:
            return False
        pause.wait(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_POLL_S)
    return True


class Meeting:
    """One refit's keys in the trainer's store.

    Args:
        store: The trainer's, or a connection to it.
        group: The refit's name.
    """

    def __init__(self, store: Store, group: str) -> None:
        self._store = PrefixStore(group, store)
        self.group_store = PrefixStore(f"{group}/group", store)

    def put(self, key: str, value: str) -> None:
        """Write a key.

        Raises:
            ConnectionError: The trainer is gone.
        """
        try:
            self._store.set(key, value)
        except RuntimeError as error:
            raise ConnectionError(f"the trainer's store is gone: {error}") from error

    def read(self, key: str) -> str | None:
        """A key's value, or None while there is none; never waits.

        Raises:
            ConnectionError: The trainer is gone.
        """
        try:
            return self._store.get(key).decode() if self._store.check([key]) else None
        except RuntimeError as error:
            raise ConnectionError(f"the trainer's store is gone: {error}") from error

    def forget(self) -> None:
        """Remove the one large key."""
        self._store.delete_key(SPECS)


class Group:
    """A process group of its own, in which rank 0 broadcasts; unknown to torch's registry of groups.

    Args:
        meeting: Whose store the members find each other in.
        backend: ``gloo`` or ``nccl``.
        rank: This member's.
        world_size: All members.
        address: Where the others reach this member (gloo).
        deadline: Limit for everything that is done in it.

    Raises:
        ConnectionError: A member did not come.
    """

    def __init__(
        self, meeting: Meeting, *, backend: str, rank: int, world_size: int, address: str, deadline: Deadline
    ) -> None:
        self._deadline = deadline
        self._pending: list[dist.Work] = []
        try:
            self._backend: dist.ProcessGroupGloo | dist.ProcessGroupNCCL | None = (
                _nccl(meeting, rank, world_size, deadline)
                if backend == "nccl"
                else _gloo(meeting, rank, world_size, address, deadline)
            )
        except RuntimeError as error:
            raise ConnectionError(f"the group did not form: {error}") from error
        self.device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")

    def broadcast(self, bucket: torch.Tensor) -> None:
        """Begin to send or receive one bucket.

        Raises:
            ConnectionError: A member went away.
        """
        assert self._backend is not None
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=self._deadline.left_s)
        try:
            self._pending.append(self._backend.broadcast([bucket], options))  # type: ignore[union-attr]
        except RuntimeError as error:
            raise ConnectionError(f"a member of the group went away: {error}") from error

    def finish_oldest(self, check: Callable[[], None]) -> None:
        """Wait until the oldest bucket under way has arrived, or may be filled again.

        Raises:
            ConnectionError: A member went away.
            TimeoutError: The deadline passed.
            Exception: What ``check``, called again and again, raises.
        """
        # No local name for it: an error's traceback would keep it, and with it the connections, beyond close().
        if not wait_until(lambda: self._pending[0].is_completed(), check, self._deadline):
            raise TimeoutError(f"a bucket was not through after {self._deadline.timeout_s:g} s")
        try:
            self._pending[0].wait()
        except RuntimeError as error:
            raise ConnectionError(f"a member of the group went away: {error}") from error
        del self._pending[0]

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def close(self) -> None:
        """Leave; whoever waits for this member is told by the end of its connections. Idempotent."""
        backend, self._backend = self._backend, None
        if backend is None:
            return
        held: list[object] = [backend, *self._pending]
        self._pending.clear()
        backend.abort()
        del backend
        # The last reference goes in a thread: gloo's destructor waits for operations under way, which end when the
        # peers leave too or at the deadline, and abort does not end them.
        thread = threading.Thread(target=held.clear, name="rl_vllm-leave-group", daemon=True)
        thread.start()
        del held
        thread.join(LEAVING_S)


def _gloo(meeting: Meeting, rank: int, world_size: int, address: str, deadline: Deadline) -> dist.ProcessGroupGloo:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._threads = 2
    options._timeout = timedelta(seconds=min(deadline.left_s, FORMING_S))
    return dist.ProcessGroupGloo(meeting.group_store, rank, world_size, options)


def _nccl(meeting: Meeting, rank: int, world_size: int, deadline: Deadline) -> dist.ProcessGroupNCCL:
    """Needs GPUs: covered by the tests that need them only."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=deadline.left_s)
    return dist.ProcessGroupNCCL(meeting.group_store, rank, world_size, options)

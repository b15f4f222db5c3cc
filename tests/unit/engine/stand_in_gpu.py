"""GPUs that are not there: NCCL between threads, IPC handles within one process, and a service made of bare workers.

All else is the code that runs on GPUs, vLLM's senders and receivers included.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.storage import TypedStorage

from rl_vllm.engine import transfer
from rl_vllm.engine.transfer import RefitTransferEngine, RefitUpdateInfo
from rl_vllm.errors import RefitError
from rl_vllm.protocols import gpu, ipc_handles, wire
from rl_vllm.types import CommitReport, InFlight, KVCache, TensorSpec, WeightReceiver, WeightUpdate

LIMIT_S = 60.0
NO_GPU = torch.device("cpu", 99)


def nothing(*_: object) -> None: ...


class Bus:
    """One group's collectives, in the order in which rank 0 makes them."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.joined: set[int] = set()
        self.sent: list[torch.Tensor] = []
        self.taken: list[int] = []


class StandInNccl:
    """What vLLM asks of its ``PyNcclCommunicator``; as there, only :meth:`destroy` ends a wait."""

    buses: ClassVar[dict[int, Bus]] = {}
    made: ClassVar[list[StandInNccl]] = []
    # Ranks that do not come, or do not take what is sent.
    absent: ClassVar[set[int]] = set()
    deaf: ClassVar[set[int]] = set()
    damaging: ClassVar[set[int]] = set()
    # Whether the other members are in this process.
    is_whole: ClassVar[bool] = True

    @classmethod
    def reset(cls) -> None:
        cls.buses, cls.made, cls.is_whole = {}, [], True
        cls.absent, cls.deaf, cls.damaging = set(), set(), set()

    def __init__(self, group: Any, device: object) -> None:
        self.rank, self.world_size = group.rank, group.world_size
        self._bus = self.buses.setdefault(group.store.port, Bus())
        self._at = 0
        self.is_left = False
        self.made.append(self)
        with self._bus.changed:
            if self.rank not in self.absent:
                self._bus.joined.add(self.rank)
                self._bus.changed.notify_all()
            self._wait(lambda: not self.is_whole or len(self._bus.joined) == self.world_size)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: object = None) -> None:
        assert src == 0
        if self.is_left:
            return
        bus, at = self._bus, self._at
        self._at += 1
        with bus.changed:
            if self.rank == 0:
                bus.sent.append(tensor.clone())
                bus.taken.append(0)
                bus.changed.notify_all()
                self._wait(lambda: bus.taken[at] == self.world_size - 1)
                return
            self._wait(lambda: len(bus.sent) > at and self.rank not in self.deaf)
            if not self.is_left:
                tensor.copy_(bus.sent[at])
                if self.rank in self.damaging:
                    tensor[0] ^= 1
                bus.taken[at] += 1
                bus.changed.notify_all()

    def destroy(self) -> None:
        with self._bus.changed:
            self.is_left = True
            self._bus.changed.notify_all()

    def _wait(self, ready: Callable[[], bool]) -> None:
        assert self._bus.changed.wait_for(lambda: ready() or self.is_left or self.rank in self.absent, LIMIT_S)
        if self.rank in self.absent:
            self._bus.changed.wait_for(lambda: self.is_left or self.rank not in self.absent, LIMIT_S)


class Handles:
    """IPC handles that live as long as the memory they name."""

    def __init__(self) -> None:
        self._shared: dict[bytes, weakref.ref[torch.Tensor]] = {}

    def reduce(self, tensor: torch.Tensor) -> tuple[object, tuple[Any, ...]]:
        handle = f"handle {len(self._shared)}".encode()
        self._shared[handle] = weakref.ref(tensor)
        place = (tensor.size(), tensor.stride(), 0, TypedStorage, tensor.dtype, 0)
        return None, (torch.Tensor, *place, handle, tensor.nbytes, 0, False, b"refs", 0, b"event", True)

    def rebuild(self, *arguments: Any) -> torch.Tensor:
        shared = self._shared[arguments[7]]()
        if shared is None:
            raise RuntimeError("invalid resource handle")
        assert (arguments[1], arguments[2], arguments[5]) == (shared.size(), shared.stride(), shared.dtype)
        return shared.view(shared.shape)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Handles:
    """The trainer is on GPU 0; a device ``cpu:N`` is GPU N, but for ``NO_GPU``."""
    handles = Handles()
    StandInNccl.reset()
    monkeypatch.setattr(gpu, "require_gpu", nothing)
    monkeypatch.setattr(gpu, "this_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(gpu, "gpu_uuid", lambda device: "" if device == NO_GPU else f"GPU-{device.index or 0}")
    monkeypatch.setattr(ipc_handles.reductions, "reduce_tensor", handles.reduce)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"GPU-{index}"))
    path = "vllm.distributed"
    monkeypatch.setattr(f"{path}.device_communicators.pynccl.PyNcclCommunicator", StandInNccl)
    stream = SimpleNamespace(synchronize=nothing)
    monkeypatch.setattr(f"{path}.weight_transfer.packed_tensor._get_streams", lambda _index, count: (stream,) * count)
    monkeypatch.setattr(f"{path}.weight_transfer.ipc_engine.rebuild_cuda_tensor", handles.rebuild)
    return handles


class Model:
    """What one worker has loaded, and the tensor at which its next load breaks."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.breaks_at: str | None = None

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == self.breaks_at:
                self.breaks_at = None
                raise RuntimeError("out of memory")
            self.tensors[name] = tensor.clone()


class Workers:
    """The refit part of a service over bare workers, all in this process.

    Args:
        specs: What the model has.
        num_workers: By replica.
        world_size: Workers in one data parallel copy.
        first_gpu: GPU of the first worker, the others have the following ones; None for no GPUs.
    """

    def __init__(
        self,
        specs: tuple[TensorSpec, ...],
        num_workers: dict[int, int],
        *,
        world_size: int | None = None,
        first_gpu: int | None = 1,
    ) -> None:
        self.specs = specs
        self.weight_version = 0
        self.absent: set[int] = set()
        self.models: dict[tuple[int, int], Model] = {}
        self.engines: dict[tuple[int, int], RefitTransferEngine] = {}
        self._num_workers = num_workers
        for replica, count in num_workers.items():
            copy_size = world_size or count
            for rank in range(count):
                parallel = SimpleNamespace(
                    rank=rank % copy_size, world_size=copy_size, data_parallel_index=rank // copy_size
                )
                index = None if first_gpu is None else first_gpu + len(self.models)
                device = NO_GPU if index is None else torch.device("cpu", index)
                model = self.models[replica, rank] = Model()
                config = SimpleNamespace(parallel_config=parallel, model_config=None)
                engine = RefitTransferEngine(None, config, device, model)
                engine._expected = specs
                self.engines[replica, rank] = engine

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        return self.specs

    def weight_receivers(self) -> tuple[WeightReceiver, ...]:
        return tuple(WeightReceiver(*item) for item in self._num_workers.items())

    def stage_weights(self, update: WeightUpdate, *, timeout_s: float) -> None:
        present = {place: engine for place, engine in self.engines.items() if place[0] not in self.absent}
        for (replica, _), engine in present.items():
            engine.stage(update.addressed_to(replica))

        def state(engine: RefitTransferEngine) -> str:
            ready, failure = engine.stage_state()
            return failure or ("" if ready else "not yet")

        def is_over() -> bool:
            return all(state(engine) != "not yet" for engine in present.values())

        # Workers have the same limit, and say more.
        assert wire.wait_until(is_over, lambda: None, wire.Deadline(LIMIT_S))
        failures = {place: state(engine) for place, engine in present.items() if state(engine)}
        if failures:
            for engine in present.values():
                engine.discard()
            raise RefitError(update.version, "stage", tuple(sorted({r for r, _ in failures})), str(failures))

    def commit_weights(
        self, update: WeightUpdate, *, in_flight: InFlight, kv: KVCache, timeout_s: float
    ) -> tuple[CommitReport, ...]:
        def one(engine: RefitTransferEngine) -> str:
            engine.start_weight_update()
            engine.receive_weights(RefitUpdateInfo(update.version))
            return engine.loaded_checksum()

        with ThreadPoolExecutor(len(self.engines)) as pool:
            calls = {place: pool.submit(one, engine) for place, engine in self.engines.items()}
        failures = {place: str(call.exception()) for place, call in calls.items() if call.exception() is not None}
        if failures:
            raise RefitError(update.version, "commit", tuple(sorted({r for r, _ in failures})), str(failures))
        self.weight_version = update.version
        return tuple(CommitReport(update.version, 0.0, call.result(), True) for call in calls.values())


@pytest.fixture
def whole_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a model is another test's; here it takes what comes."""
    monkeypatch.setattr(transfer.reload, "load_whole_model", lambda model, _config, weights: model.load(weights))

"""Weights from an object store land in files that workers can map, and nothing of them stays behind."""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.exceptions import GetTimeoutError, ObjectLostError, OwnerDiedError, RaySystemError
from vllm.v1.engine.async_llm import AsyncLLM

from rl_vllm.engine import landing, vllm_engine
from rl_vllm.engine.landing import landed
from rl_vllm.engine.shared_storage import StagedFolder
from rl_vllm.engine.vllm_engine import VLLMEngine
from rl_vllm.errors import DeadlineError, RefitError
from rl_vllm.protocols import private_folder
from rl_vllm.protocols.private_folder import PrivateFolder
from rl_vllm.types import TensorSpec, WeightUpdate
from tests.unit.processes import wait_for_the_end_of
from tests.unit.weights.fake_store import FakeStore

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b": torch.tensor([1.5, -2.0, 0.25], dtype=torch.bfloat16),
    "c": torch.tensor(7, dtype=torch.int64),
}
SPECS = (TensorSpec("a", "float32", (2, 3)), TensorSpec("b", "bfloat16", (3,)), TensorSpec("c", "int64", ()))
OBJECT_ID = "ab" * 28


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands for the machine's memory."""
    monkeypatch.setattr(private_folder, "MEMORY_FOLDER", tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def no_folder_goes_by_itself(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder also goes with its object: here that is remembered, so that only who removes it does."""
    made: list[PrivateFolder] = []

    def make(prefix: str, wanted_bytes: int) -> PrivateFolder:
        made.append(PrivateFolder(prefix, wanted_bytes))
        return made[-1]

    monkeypatch.setattr(landing, "PrivateFolder", make)
    yield
    made.clear()


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def update(store: FakeStore) -> WeightUpdate:
    """Three tensors in two shards, as replica 3 is told of them."""
    # The trainer's side; the engine's own code does not know it.
    from rl_vllm.weights import ModuleSource, ObjectStoreTransport

    transport = ObjectStoreTransport(shard_bytes=32, put=store.put)
    return transport.stage(ModuleSource(TENSORS), 5, timeout_s=30.0).addressed_to(3)


def names_in(memory: Path) -> list[str]:
    return [path.name for path in memory.iterdir()]


def verified(update: WeightUpdate) -> StagedFolder:
    staged = StagedFolder(update)
    staged.verify(SPECS, threading.Event())
    return staged


async def land(update: WeightUpdate, store: FakeStore, *, timeout_s: float = 30.0, **options: Any) -> StagedFolder:
    async with landed(update, replica=3, timeout_s=timeout_s, get=store.get, **options) as (local, _):
        return verified(local)


async def test_what_landed_is_read_bit_for_bit_and_outlives_its_folder(
    update: WeightUpdate, store: FakeStore, memory: Path
) -> None:
    async with landed(update, replica=3, timeout_s=30.0, get=store.get) as (local, left_s):
        folder = Path(str(local.payload["folder"]))
        assert folder.parent == memory
        assert 0 < left_s <= 30.0
        assert all(0 < wait <= 30.0 for wait in store.waits)
        # It can be told to workers: no reference is left in it.
        assert sorted(local.payload) == ["folder", "manifest_crc32", "writer"]
        staged = verified(local)
    assert names_in(memory) == []
    read = dict(staged)
    assert list(read) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
    assert (local.version, local.num_tensors, staged.checksum) == (5, 3, update.checksum)


@pytest.mark.parametrize(("free", "is_in_memory"), [(76, False), (77, True)])
async def test_files_are_in_memory_only_where_the_store_can_hold_the_same_bytes_too(
    update: WeightUpdate,
    store: FakeStore,
    memory: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    is_in_memory: bool,
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.setattr("tempfile.tempdir", str(elsewhere))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    async with landed(update, replica=3, timeout_s=30.0, get=store.get) as (local, _):
        folder = Path(str(local.payload["folder"]))
    assert folder.parent == (memory if is_in_memory else elsewhere)
    assert names_in(folder.parent) == []


async def test_an_update_of_another_transport_is_passed_on_as_it_is(memory: Path) -> None:
    update = WeightUpdate(5, "shared_storage", {"folder": "/mnt/w"}, 1, 1)
    async with landed(update, replica=3, timeout_s=30.0, nodes=lambda: ("a", "b")) as (local, left_s):
        assert local is update
        assert left_s == 30.0
        assert names_in(memory) == []


async def test_a_torn_shard_is_refused_and_nothing_stays(update: WeightUpdate, store: FakeStore, memory: Path) -> None:
    store.tear(1)
    with pytest.raises(RefitError, match=r"shard-00001.* torn"):
        await land(update, store)
    assert names_in(memory) == []


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ObjectLostError(OBJECT_ID, "", ""), r"a shard is lost.*ObjectLostError.*refit again"),
        (OwnerDiedError(OBJECT_ID, "", ""), "process that put the weights .* is gone .*refit from the one that runs"),
        (GetTimeoutError("2 of 2 objects"), "did not come within stage_timeout_s .*raise it"),
        (RaySystemError("no raylet"), "Ray could not fetch a shard: RaySystemError"),
        (OSError(errno.ENOSPC, "No space left on device"), "weights of 38 bytes .*No space left.*free space"),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_a_shard_that_does_not_come_is_reported_with_the_replica_and_nothing_stays(
    update: WeightUpdate, store: FakeStore, memory: Path, error: Exception, words: str
) -> None:
    def fail(number: int) -> None:
        if number == 1:
            assert len(list(memory.glob("*/shard-*"))) == 1
            raise error

    store.before_get = fail
    with pytest.raises(RefitError, match=words) as caught:
        await land(update, store)
    # As it comes out of a Ray actor.
    there = pickle.loads(pickle.dumps(caught.value))
    assert (there.version, there.phase, there.replicas) == (5, "stage", (3,))
    assert there.reason == caught.value.reason
    assert names_in(memory) == []


async def test_no_shard_is_asked_for_after_the_deadline(update: WeightUpdate, store: FakeStore, memory: Path) -> None:
    with pytest.raises(RefitError, match="out of time after 0 of 2 shards: raise stage_timeout_s"):
        await land(update, store, timeout_s=0.0)
    assert (store.waits, names_in(memory)) == ([], [])


async def test_a_version_that_the_trainer_let_go_is_refused(update: WeightUpdate, store: FakeStore) -> None:
    update.payload["shards"].drop()  # type: ignore[attr-defined]
    with pytest.raises(RefitError, match="the trainer has let this version go"):
        await land(pickle.loads(pickle.dumps(update)), store)


@pytest.mark.parametrize(
    ("nodes", "where"), [(("n1", "n2"), "on 2 machines"), ((), "on machines that Ray does not name")]
)
async def test_a_replica_that_spans_machines_is_refused_before_a_byte_moves(
    update: WeightUpdate, store: FakeStore, nodes: tuple[str, ...], where: str
) -> None:
    with pytest.raises(RefitError, match=f"its workers are {where}, .*'shared_storage' .*'broadcast'") as caught:
        await land(update, store, nodes=lambda: nodes)
    assert (caught.value.phase, caught.value.replicas, store.waits) == ("stage", (3,), [])
    await land(update, store, nodes=lambda: ("n1",))


@pytest.mark.parametrize("number", [0, 1], ids=["first shard", "last shard"])
def test_a_staging_that_is_cancelled_leaves_nothing_when_its_thread_has_ended(
    update: WeightUpdate, store: FakeStore, memory: Path, number: int
) -> None:
    fetching, go_on = threading.Event(), threading.Event()

    def wait_at(seen: int) -> None:
        if seen == number:
            fetching.set()
            assert go_on.wait(30.0)

    store.before_get = wait_at

    async def cancel_while_fetching() -> None:
        task = asyncio.create_task(land(update, store))
        assert await asyncio.to_thread(fetching.wait, 30.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(names_in(memory)) == 1
        go_on.set()

    # Ends when the threads have.
    asyncio.run(cancel_while_fetching())
    assert names_in(memory) == []
    assert len(store.waits) == number + 1


def test_what_landed_goes_with_an_engine_that_is_killed(memory: Path) -> None:
    script = (
        "import asyncio, os, pathlib, signal, sys, torch\n"
        "from rl_vllm.engine.landing import landed\n"
        "from rl_vllm.protocols import private_folder\n"
        "from rl_vllm.weights import ModuleSource, ObjectStoreTransport\n"
        "from tests.unit.weights.fake_store import FakeStore\n"
        "memory = private_folder.MEMORY_FOLDER = pathlib.Path(sys.argv[1])\n"
        "made = []\n"
        "make = private_folder.PrivateFolder.__init__\n"
        "def remember(self, *args):\n"
        "    make(self, *args)\n"
        "    made.append(self)\n"
        "private_folder.PrivateFolder.__init__ = remember\n"
        "store = FakeStore()\n"
        "transport = ObjectStoreTransport(put=store.put)\n"
        "update = transport.stage(ModuleSource({'a': torch.ones(2)}), 1, timeout_s=30.0)\n"
        "async def main():\n"
        "    async with landed(update, replica=0, timeout_s=30.0, get=store.get):\n"
        "        print(made[0].guardian, *(path.name for path in memory.glob('*/*')), flush=True)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    dead = subprocess.run(
        [sys.executable, "-c", script, str(memory)],
        timeout=120,
        check=False,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [".", os.environ.get("PYTHONPATH")]))},
    )
    assert dead.returncode == -signal.SIGKILL
    guardian, *files = dead.stdout.split()
    assert sorted(files) == ["manifest.json", "shard-00000.safetensors"]
    wait_for_the_end_of(int(guardian))
    assert names_in(memory) == []


class StubLLM(AsyncLLM):
    """Workers that play by a script: what they say when asked for the state of staging."""

    def __init__(self, backend: str | None, states: list[tuple[bool, str | None]]) -> None:
        parallel = SimpleNamespace(data_parallel_size=1, distributed_executor_backend=backend)
        self.vllm_config = SimpleNamespace(parallel_config=parallel)
        self.engine_core = SimpleNamespace(resources=SimpleNamespace(engine_dead=False), shutdown=lambda **_: None)
        self.output_handler = None
        self.states = states
        self.told: list[dict[str, Any]] = []
        self.mapped: StagedFolder | None = None

    async def collective_rpc(self, method: str, *_: object, args: tuple[Any, ...] = ()) -> list[Any]:  # type: ignore[override]
        if method == "rl_vllm_stage":
            self.told.append(args[0])
            self.mapped = verified(WeightUpdate(**args[0]))
        return [self.states[0]]


def engine_over(llm: StubLLM) -> VLLMEngine:
    engine = object.__new__(VLLMEngine)
    engine._llm, engine._replica = llm, 3
    return engine


async def test_an_engines_workers_are_told_of_files_that_go_when_they_are_ready(
    update: WeightUpdate, store: FakeStore, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(landing, "_ray_get", store.get)
    llm = StubLLM("mp", [(True, None)])
    await engine_over(llm).stage_weights(update, timeout_s=30.0)
    assert [told["transport"] for told in llm.told] == ["shared_storage"]
    assert names_in(memory) == []
    assert llm.mapped is not None
    assert torch.equal(dict(llm.mapped)["a"], TENSORS["a"])


async def test_files_go_when_a_worker_cannot_use_them(
    update: WeightUpdate, store: FakeStore, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(landing, "_ray_get", store.get)
    llm = StubLLM(None, [(False, "it is torn")])
    with pytest.raises(RefitError, match="it is torn"):
        await engine_over(llm).stage_weights(update, timeout_s=30.0)
    assert len(llm.told) == 1
    assert names_in(memory) == []


async def test_workers_have_what_fetching_left_of_the_time_and_files_go_when_they_are_late(
    update: WeightUpdate, store: FakeStore, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(landing, "_ray_get", store.get)
    # Each of the two shards takes 10 s.
    monkeypatch.setattr(landing, "time", SimpleNamespace(monotonic=lambda: 10.0 * len(store.waits)))
    llm = StubLLM(None, [(False, None)])
    with pytest.raises(DeadlineError, match=r"gave up after 0\.01 s"):
        await engine_over(llm).stage_weights(update, timeout_s=20.01)
    assert store.waits == [20.01, pytest.approx(10.01)]
    assert len(llm.told) == 1
    assert names_in(memory) == []


async def test_only_an_engine_whose_workers_ray_starts_asks_where_they_are(
    update: WeightUpdate, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(landing, "_ray_get", store.get)
    monkeypatch.setattr(vllm_engine, "own_nodes", lambda: ("n1", "n2"))
    await engine_over(StubLLM("mp", [(True, None)])).stage_weights(update, timeout_s=30.0)
    with pytest.raises(RefitError, match="on 2 machines"):
        await engine_over(StubLLM("ray", [(True, None)])).stage_weights(update, timeout_s=30.0)

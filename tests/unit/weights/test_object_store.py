"""Weights in an object store: the files of a shared folder, kept for as long as late replicas may ask."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from ray.exceptions import ObjectStoreFullError, RaySystemError

from rl_vllm import AsyncVLLM, EngineConfig
from rl_vllm.errors import ConfigError, RefitError
from rl_vllm.protocols.object_store import StoredShards, StoredVersion
from rl_vllm.testing import FakeEngine, FakeExecutor, FakeScript, FakeService
from rl_vllm.types import WeightManifest, WeightUpdate
from rl_vllm.weights import ModuleSource, ObjectStoreTransport, SharedStorageTransport, object_store, refit
from tests.unit.weights.fake_store import FakeStore

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b": torch.tensor([1.5, -2.0, 0.25], dtype=torch.bfloat16),
    "c": torch.tensor(7, dtype=torch.int64),
    "d": torch.arange(4, dtype=torch.float16),
    "e": torch.empty(0, 3),
}
SHARD_BYTES = 32


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def transport(store: FakeStore) -> Iterator[ObjectStoreTransport]:
    transport = ObjectStoreTransport(shard_bytes=SHARD_BYTES, put=store.put)
    yield transport
    transport.close()


def stage(transport: ObjectStoreTransport, version: int = 1, **changed: torch.Tensor) -> WeightUpdate:
    return transport.stage(ModuleSource(TENSORS | changed), version, timeout_s=30.0)


def test_the_objects_are_the_files_of_shared_storage_byte_for_byte(
    transport: ObjectStoreTransport, store: FakeStore, tmp_path: Path
) -> None:
    update = stage(transport)
    files = SharedStorageTransport(tmp_path / "weights", shard_bytes=SHARD_BYTES)
    same = files.stage(ModuleSource(TENSORS), 1, timeout_s=30.0)
    stored = StoredVersion.from_payload(update.payload)
    written = sorted(Path(str(same.payload["folder"])).glob("*.safetensors"))
    assert list(stored.shards.references) == [path.name for path in written]
    for path, reference in zip(written, stored.shards.references.values(), strict=True):
        assert store.get(reference, 1.0).tobytes() == path.read_bytes()
    ours = WeightManifest.from_json(stored.manifest)
    theirs = WeightManifest.from_json((written[0].parent / WeightManifest.FILE_NAME).read_text())
    assert ours.entries == theirs.entries
    assert (update.num_tensors, update.num_bytes, update.checksum) == (5, 46, same.checksum)
    files.close()


def test_an_object_is_an_ordinary_safetensors_file(transport: ObjectStoreTransport, store: FakeStore) -> None:
    shards = StoredVersion.from_payload(stage(transport).payload).shards
    loaded = [safetensors.torch.load(store.get(reference, 1.0).tobytes()) for reference in shards.references.values()]
    # 24 + 6 bytes fit into 32; the scalar, the last numbers and the tensor without any into a second one.
    assert [sorted(shard) for shard in loaded] == [["a", "b"], ["c", "d", "e"]]
    assert torch.equal(loaded[0]["b"], TENSORS["b"])


def test_one_shard_at_a_time_is_outside_the_store(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    alive_when_made: list[int] = []

    class Watched(object_store._Shard):
        def __init__(self, num_bytes: int) -> None:
            alive_when_made.append(store.num_given_alive)
            super().__init__(num_bytes)

    monkeypatch.setattr(object_store, "_Shard", Watched)
    stage(ObjectStoreTransport(shard_bytes=8, put=store.put))
    assert alive_when_made == [0, 0, 0, 0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name_and_nothing_stays(
    transport: ObjectStoreTransport, store: FakeStore, value: float
) -> None:
    with pytest.raises(RefitError, match="d holds NaN or infinity") as caught:
        stage(transport, d=torch.tensor([0.0, value], dtype=torch.float16))
    assert (caught.value.phase, caught.value.replicas) == ("check", ())
    # The first shard had been stored; the error is still held here, and does not hold that.
    assert store.num_puts == 1
    assert transport.versions == ()
    assert len(store.objects) == 0


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            ObjectStoreFullError("no space left"),
            r"no room for weights of 46 bytes \(.*--object-store-memory.*broadcast",
        ),
        (RaySystemError("the raylet is gone"), "could not store the weights: RaySystemError"),
        (MemoryError("Unable to allocate 32 bytes"), "no memory for a shard .*lower shard_bytes"),
    ],
)
def test_a_store_that_refuses_is_reported_and_nothing_stays(
    transport: ObjectStoreTransport, store: FakeStore, error: Exception, message: str
) -> None:
    def refuse(number: int) -> None:
        if number == 1:
            raise error

    store.before_put = refuse
    with pytest.raises(RefitError, match=message) as caught:
        stage(transport)
    assert (caught.value.version, caught.value.phase, caught.value.replicas) == (1, "stage", ())
    assert len(store.objects) == 0
    store.before_put = lambda _number: None
    stage(transport)


def test_an_expired_deadline_is_reported_and_nothing_stays(transport: ObjectStoreTransport, store: FakeStore) -> None:
    with pytest.raises(RefitError, match="out of time after 1 tensors: raise stage_timeout_s"):
        transport.stage(ModuleSource(TENSORS), 1, timeout_s=0.0)
    assert (transport.versions, len(store.objects)) == ((), 0)


def test_retiring_keeps_the_newest_versions_and_lets_the_others_go_whoever_remembers_them(
    transport: ObjectStoreTransport, store: FakeStore
) -> None:
    updates = [stage(transport, version) for version in (1, 2, 3, 4)]
    assert len(store.objects) == 8
    transport.retire(3)
    # Two up to 3, and 4, which no replica serves yet.
    assert transport.versions == (2, 3, 4)
    assert [len(StoredVersion.from_payload(update.payload).shards.references) for update in updates] == [0, 2, 2, 2]
    assert len(store.objects) == 6


def test_a_discarded_version_goes_and_the_others_stay(transport: ObjectStoreTransport, store: FakeStore) -> None:
    first, second = stage(transport, 1), stage(transport, 2)
    transport.discard(second.addressed_to(1))
    transport.discard(second)
    assert transport.versions == (1,)
    assert len(store.objects) == len(StoredVersion.from_payload(first.payload).shards.references) == 2


def test_closing_empties_the_store_though_updates_are_remembered(
    transport: ObjectStoreTransport, store: FakeStore
) -> None:
    updates = [stage(transport, 1), stage(transport, 2).addressed_to(0)]
    transport.close()
    transport.close()
    assert (transport.versions, len(store.objects), len(updates)) == ((), 0, 2)


def test_a_version_that_is_stored_already_is_refused_and_kept(
    transport: ObjectStoreTransport, store: FakeStore
) -> None:
    stage(transport)
    with pytest.raises(RefitError, match="version 1 is in the store already: give each service a transport"):
        stage(transport)
    assert (transport.versions, len(store.objects)) == ((1,), 2)


def test_an_update_crosses_to_another_process_with_its_references_and_without_those_that_were_dropped() -> None:
    stored = StoredVersion(StoredShards({"shard-00000": 5, "shard-00001": 6}), "{}", 7, "me")
    update = WeightUpdate(1, "object_store", stored.to_payload(), 1, 4).addressed_to(2)
    there = pickle.loads(pickle.dumps(update))
    assert StoredVersion.from_payload(there.payload).shards.references == {"shard-00000": 5, "shard-00001": 6}
    assert (there.payload["replica"], there.payload["manifest_crc32"]) == (2, 7)
    stored.shards.drop()
    assert StoredVersion.from_payload(pickle.loads(pickle.dumps(update)).payload).shards.references == {}


def test_a_late_replica_is_told_of_objects_that_are_still_there(
    transport: ObjectStoreTransport, store: FakeStore
) -> None:
    source = ModuleSource(TENSORS)
    executor = FakeExecutor([FakeEngine(0, specs=source.specs())])
    with AsyncVLLM(EngineConfig(model="fake"), executor=executor) as service:
        refit(service, source, transport)
        (late,) = service.add_replicas(1)
        engine = executor.engines[late]
        assert isinstance(engine, FakeEngine)
        (update,) = engine.staged
        references = StoredVersion.from_payload(update.payload).shards.references
        assert (update.version, set(references.values())) == (1, set(store.objects))
        assert [committed.version for committed in engine.committed] == [1]


def test_without_ray_it_says_what_to_do_and_starts_none() -> None:
    import ray

    with pytest.raises(ConfigError, match=r"connected to the engines' Ray: .*ray\.init\(\).*'shared_storage'"):
        stage(ObjectStoreTransport())
    assert not ray.is_initialized()


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="keep_versions"):
        ObjectStoreTransport(keep_versions=0)
    with pytest.raises(ConfigError, match="shard_bytes"):
        ObjectStoreTransport(shard_bytes=0)


def test_refits_keep_two_versions_and_one_that_fails_leaves_none_of_its_own(
    transport: ObjectStoreTransport, store: FakeStore
) -> None:
    source = ModuleSource(TENSORS)
    service = FakeService(specs=source.specs())
    receipts = [refit(service, source, transport) for _ in range(3)]
    assert [receipt.transport for receipt in receipts] == ["object_store"] * 3
    assert receipts[0].checksum == service.commit_calls[0].update.checksum
    assert transport.versions == (2, 3)
    service.script = FakeScript(commit_error=RefitError(4, "commit", (0,), "out of memory"))
    with pytest.raises(RefitError, match="out of memory"):
        refit(service, source, transport)
    assert transport.versions == (2, 3)
    assert len(store.objects) == 4

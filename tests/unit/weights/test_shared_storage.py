"""A folder between trainer and engines: whole versions or nothing, one writer, no leftovers."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from rl_vllm.engine.shared_storage import StagedFolder
from rl_vllm.errors import ConfigError, RefitError
from rl_vllm.protocols import private_folder
from rl_vllm.types import TensorSpec, WeightManifest, WeightUpdate
from rl_vllm.weights import shared_storage
from rl_vllm.weights.shared_storage import SharedStorageTransport
from rl_vllm.weights.source import ModuleSource
from tests.unit.processes import wait_for_the_end_of

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b": torch.tensor([1.5, -2.0, 0.25], dtype=torch.bfloat16),
    "c": torch.tensor(7, dtype=torch.int64),
    "d": torch.arange(4, dtype=torch.float16),
}
SPECS = ModuleSource(TENSORS).specs()


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[SharedStorageTransport]:
    transport = SharedStorageTransport(tmp_path / "weights", shard_bytes=32)
    yield transport
    transport.close()


def stage(transport: SharedStorageTransport, version: int = 1) -> WeightUpdate:
    return transport.stage(ModuleSource(TENSORS), version, timeout_s=30.0)


def verified(update: WeightUpdate, specs: tuple[TensorSpec, ...] = SPECS) -> StagedFolder:
    staged = StagedFolder(update)
    staged.verify(specs, threading.Event())
    return staged


def folder_of(update: WeightUpdate) -> Path:
    return Path(str(update.payload["folder"]))


def test_what_was_staged_is_read_bit_for_bit(transport: SharedStorageTransport) -> None:
    update = stage(transport)
    staged = verified(update)
    read = dict(staged)
    assert list(read) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
    assert (update.num_tensors, update.num_bytes) == (4, 24 + 6 + 8 + 8)
    assert staged.checksum == update.checksum


def test_files_are_ordinary_safetensors_of_bounded_size(transport: SharedStorageTransport) -> None:
    files = sorted(folder_of(stage(transport)).glob("*.safetensors"))
    # 24 + 6 bytes fit into 32, the scalar and the last tensor into a second file.
    assert [list(load_file(file)) for file in files] == [["a", "b"], ["c", "d"]]
    assert torch.equal(load_file(files[1])["d"], TENSORS["d"])


def test_a_loader_that_writes_into_its_tensors_does_not_change_the_file(transport: SharedStorageTransport) -> None:
    update = stage(transport)
    dict(verified(update))["a"].fill_(0.0)
    assert torch.equal(dict(verified(update))["a"], TENSORS["a"])


def test_mapped_tensors_outlive_their_folder(transport: SharedStorageTransport) -> None:
    update = stage(transport)
    staged = verified(update)
    transport.discard(update)
    assert not folder_of(update).exists()
    assert torch.equal(dict(staged)["a"], TENSORS["a"])


def test_checksums_tell_different_weights_apart_and_not_their_order(transport: SharedStorageTransport) -> None:
    first = stage(transport, 1)
    other = ModuleSource(TENSORS | {"a": TENSORS["a"] + 1})
    reordered = ModuleSource(dict(reversed(TENSORS.items())))
    assert transport.stage(other, 2, timeout_s=30.0).checksum != first.checksum
    assert transport.stage(reordered, 3, timeout_s=30.0).checksum == first.checksum


def test_a_torn_shard_is_refused(transport: SharedStorageTransport) -> None:
    update = stage(transport)
    shard = folder_of(update) / "shard-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(RefitError, match=r"shard-00001.* torn"):
        verified(update)


@pytest.mark.parametrize("size", [0, 4, 40])
def test_a_shard_torn_in_its_header_is_refused(transport: SharedStorageTransport, size: int) -> None:
    update = stage(transport)
    shard = folder_of(update) / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:size])
    with pytest.raises(RefitError, match="torn"):
        verified(update)


def test_a_flipped_bit_is_refused_and_the_tensor_named(transport: SharedStorageTransport) -> None:
    update = stage(transport)
    shard = folder_of(update) / "shard-00001.safetensors"
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(damaged)
    with pytest.raises(RefitError, match=r"d in shard-00001.safetensors has a wrong checksum"):
        verified(update)


def test_a_missing_shard_is_refused(transport: SharedStorageTransport) -> None:
    update = stage(transport)
    (folder_of(update) / "shard-00000.safetensors").unlink()
    with pytest.raises(RefitError, match=r"shard-00000.*No such file"):
        verified(update)


def test_a_missing_manifest_is_refused(transport: SharedStorageTransport) -> None:
    update = stage(transport)
    (folder_of(update) / WeightManifest.FILE_NAME).unlink()
    with pytest.raises(RefitError, match="is the folder shared with this machine"):
        StagedFolder(update)


def test_another_versions_manifest_is_refused(transport: SharedStorageTransport) -> None:
    first, second = stage(transport, 1), stage(transport, 2)
    mixed = WeightUpdate(2, second.transport, first.payload, second.num_tensors, second.num_bytes)
    with pytest.raises(RefitError, match="is of version 1"):
        StagedFolder(mixed)


def test_a_manifest_that_changed_after_it_was_announced_is_refused(transport: SharedStorageTransport) -> None:
    update = stage(transport)
    path = folder_of(update) / WeightManifest.FILE_NAME
    changed = json.loads(path.read_text()) | {"writer": "somebody"}
    path.write_text(json.dumps(changed))
    with pytest.raises(RefitError, match="not the manifest that the trainer wrote"):
        StagedFolder(update)


def test_tensors_that_are_not_the_models_are_refused(transport: SharedStorageTransport) -> None:
    wanted = (*SPECS[:3], TensorSpec("d", "float16", (5,)))
    with pytest.raises(RefitError, match=r"1 tensors are not the model's: d: .*\(4,\).*\(5,\)"):
        verified(stage(transport), wanted)


def test_verification_stops_when_it_is_given_up(transport: SharedStorageTransport) -> None:
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(RefitError, match="given up"):
        StagedFolder(stage(transport)).verify(SPECS, cancelled)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name_and_nothing_stays(
    transport: SharedStorageTransport, value: float
) -> None:
    broken = TENSORS | {"d": torch.tensor([0.0, value], dtype=torch.float16)}
    with pytest.raises(RefitError, match="d holds NaN or infinity") as caught:
        transport.stage(ModuleSource(broken), 1, timeout_s=30.0)
    assert (caught.value.phase, caught.value.replicas) == ("check", ())
    assert transport.folder is not None
    assert [path.name for path in transport.folder.iterdir()] == [shared_storage.LOCK_FILE]


def test_a_version_that_exists_is_refused_and_kept(transport: SharedStorageTransport) -> None:
    update = stage(transport)
    with pytest.raises(RefitError, match="v000001 exists already"):
        stage(transport)
    verified(update)


def test_a_living_trainers_folder_is_refused_with_its_pid(transport: SharedStorageTransport, tmp_path: Path) -> None:
    stage(transport)
    second = SharedStorageTransport(tmp_path / "weights")
    with pytest.raises(RefitError, match=rf'in use by another trainer.*"pid": {os.getpid()}'):
        stage(second, 2)
    transport.close()
    stage(second, 2)
    second.close()


def test_a_killed_trainers_folder_is_taken_over_and_its_unfinished_version_removed(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    script = (
        "import os, signal, sys, torch\n"
        "from rl_vllm.weights.shared_storage import SharedStorageTransport\n"
        "from rl_vllm.weights.source import ModuleSource\n"
        "SharedStorageTransport(sys.argv[1]).stage(ModuleSource({'a': torch.ones(2)}), 1, timeout_s=30.0)\n"
        "os.mkdir(sys.argv[1] + '/.staging-v000002-dead')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    dead = subprocess.run([sys.executable, "-c", script, str(folder)], timeout=120, check=False)
    assert dead.returncode == -signal.SIGKILL
    heir = SharedStorageTransport(folder)
    stage(heir, 2)
    assert sorted(path.name for path in folder.glob("*v0*")) == ["v000001", "v000002"]
    assert not (folder / ".staging-v000002-dead").exists()
    heir.close()


def test_versions_of_an_ended_run_that_this_run_would_come_to_are_refused_at_once(
    transport: SharedStorageTransport,
) -> None:
    for version in (1, 6, 7):
        stage(transport, version)
    transport.close()
    heir = SharedStorageTransport(transport.folder)
    for _ in range(2):
        with pytest.raises(
            RefitError, match=r"weights holds v000006, v000007 .* version 2 .*another folder, or delete"
        ):
            stage(heir, 2)
    assert transport.folder is not None
    assert sorted(path.name for path in transport.folder.glob("v*")) == ["v000001", "v000006", "v000007"]
    for version in (6, 7):
        shutil.rmtree(transport.folder / f"v{version:06d}")
    stage(heir, 2)
    heir.close()


def test_a_version_without_a_readable_manifest_is_in_the_way_too(transport: SharedStorageTransport) -> None:
    assert transport.folder is not None
    for name, text in {"v000003": "[]", "v000004": "{}", "v000005": "{"}.items():
        (transport.folder / name).mkdir(parents=True)
        (transport.folder / name / WeightManifest.FILE_NAME).write_text(text)
    (transport.folder / "v000006").mkdir()
    with pytest.raises(RefitError, match="holds v000003, v000004, v000005, v000006 of an ended run"):
        stage(transport, 1)


def test_a_folder_is_given_back_when_its_versions_are_in_the_way(transport: SharedStorageTransport) -> None:
    stage(transport, 5)
    transport.close()
    heir, other = SharedStorageTransport(transport.folder), SharedStorageTransport(transport.folder)
    with pytest.raises(RefitError, match="v000005"):
        stage(heir, 1)
    stage(other, 6)
    other.close()


def test_a_closed_transports_own_versions_are_not_in_its_way(transport: SharedStorageTransport) -> None:
    stage(transport, 3)
    transport.close()
    stage(transport, 2)


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert SharedStorageTransport("~/w").folder == tmp_path / "w"
    with pytest.raises(ConfigError, match="'~no-such-user/w' names a home that is not known"):
        SharedStorageTransport("~no-such-user/w")


def test_a_private_folder_goes_with_close(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(private_folder, "MEMORY_FOLDER", tmp_path)
    transport = SharedStorageTransport()
    update = stage(transport)
    assert folder_of(update).parent.parent == tmp_path
    transport.close()
    transport.close()
    assert list(tmp_path.iterdir()) == []


def test_a_private_folder_goes_with_a_killed_trainer(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, signal, sys, torch\n"
        "from rl_vllm.protocols import private_folder\n"
        "from rl_vllm.weights import shared_storage\n"
        "from rl_vllm.weights.source import ModuleSource\n"
        "private_folder.MEMORY_FOLDER = pathlib.Path(sys.argv[1])\n"
        "transport = shared_storage.SharedStorageTransport()\n"
        "transport.stage(ModuleSource({'a': torch.ones(2)}), 1, timeout_s=30.0)\n"
        "print(transport._private.guardian, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    dead = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], timeout=120, check=False, stdout=subprocess.PIPE, text=True
    )
    assert dead.returncode == -signal.SIGKILL
    wait_for_the_end_of(int(dead.stdout))
    assert list(tmp_path.iterdir()) == []


def test_retiring_keeps_the_newest_versions(transport: SharedStorageTransport) -> None:
    for version in (1, 2, 3, 4):
        stage(transport, version)
    assert transport.folder is not None
    (transport.folder / "v1-notes").mkdir()
    transport.retire(3)
    # Two up to 3, and 4, which no replica serves yet.
    assert sorted(path.name for path in transport.folder.glob("v*")) == ["v000002", "v000003", "v000004", "v1-notes"]


def test_too_little_room_is_found_before_a_byte_is_written(
    transport: SharedStorageTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=100, used=90, free=10))
    with pytest.raises(RefitError, match="10 bytes free and the weights need 46"):
        stage(transport)
    assert transport.folder is not None
    assert list(transport.folder.glob("*v0*")) == []


def test_a_disk_that_fills_up_meanwhile_is_reported_and_cleaned(
    transport: SharedStorageTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RefitError, match=r"is full: .* the weights need 46"):
        stage(transport)
    assert transport.folder is not None
    assert list(transport.folder.glob("*v0*")) == []


def test_an_expired_deadline_is_reported_and_cleaned(transport: SharedStorageTransport) -> None:
    with pytest.raises(RefitError, match="out of time"):
        transport.stage(ModuleSource(TENSORS), 1, timeout_s=0.0)
    assert transport.folder is not None
    assert list(transport.folder.glob("*v0*")) == []


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="keep_versions"):
        SharedStorageTransport(keep_versions=0)
    with pytest.raises(ConfigError, match="shard_bytes"):
        SharedStorageTransport(shard_bytes=0)

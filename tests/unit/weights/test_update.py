"""One refit from end to end, against a service that can be told to fail."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rl_vllm.config import RefitConfig
from rl_vllm.errors import DeadlineError, RefitError, WeightsMismatchError
from rl_vllm.testing.fake_service import FakeScript, FakeService
from rl_vllm.types import CommitReport, InFlight, KVCache, TensorSpec, WeightUpdate
from rl_vllm.weights.shared_storage import SharedStorageTransport
from rl_vllm.weights.source import ModuleSource
from rl_vllm.weights.update import refit

WEIGHTS = {"a": torch.tensor([1.0, 2.0]), "b": torch.ones(2, 2)}
SPECS = (TensorSpec("a", "bfloat16", (2,)), TensorSpec("b", "float32", (2, 2)))


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[SharedStorageTransport]:
    transport = SharedStorageTransport(tmp_path)
    yield transport
    transport.close()


@pytest.fixture
def service() -> FakeService:
    return FakeService(specs=SPECS, num_replicas=3)


def versions_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*v0*"))


class OddReplica(FakeService):
    """Its second replica reports something else."""

    def __init__(self, **changes: object) -> None:
        super().__init__(specs=SPECS, num_replicas=3)
        self._changes = changes

    def commit_weights(
        self, update: WeightUpdate, *, in_flight: InFlight, kv: KVCache, timeout_s: float
    ) -> tuple[CommitReport, ...]:
        first, second, third = super().commit_weights(update, in_flight=in_flight, kv=kv, timeout_s=timeout_s)
        return first, replace(second, **self._changes), third  # type: ignore[arg-type]


def test_a_refit_is_staged_in_the_engines_dtypes_committed_and_told(
    service: FakeService, transport: SharedStorageTransport
) -> None:
    config = RefitConfig(in_flight=InFlight.WAIT, kv=KVCache.REUSE)
    receipt = refit(service, ModuleSource(WEIGHTS), transport, config=config)
    assert service.weight_version == 1
    assert (receipt.version, receipt.num_replicas, receipt.num_tensors) == (1, 3, 2)
    # Two bfloat16 and four float32 values.
    assert receipt.num_bytes == 2 * 2 + 4 * 4
    assert receipt.checksum == service.stage_calls[0].update.checksum
    assert set(receipt.phase_s) == {"check", "stage", "commit"}
    assert (service.commit_calls[0].in_flight, service.commit_calls[0].kv) == (InFlight.WAIT, KVCache.REUSE)
    assert (receipt.in_flight, receipt.kv) == (InFlight.WAIT, KVCache.REUSE)


def test_versions_count_up_and_older_files_go(
    service: FakeService, transport: SharedStorageTransport, tmp_path: Path
) -> None:
    versions = [refit(service, ModuleSource(WEIGHTS), transport).version for _ in range(4)]
    assert versions == [1, 2, 3, 4]
    assert versions_in(tmp_path) == ["v000003", "v000004"]


def test_a_version_that_no_int32_holds_is_refused_with_its_value(
    service: FakeService, transport: SharedStorageTransport
) -> None:
    with pytest.raises(RefitError, match=r"at most 2147483647, .* and 2147483653 is above") as caught:
        refit(service, ModuleSource(WEIGHTS), transport, version=2**31 + 5)
    assert caught.value.phase == "check"
    assert refit(service, ModuleSource(WEIGHTS), transport, version=2**31 - 1).version == 2147483647
    with pytest.raises(RefitError, match="2147483648 is above"):
        refit(service, ModuleSource(WEIGHTS), transport)
    assert service.weight_version == 2147483647


@pytest.mark.parametrize("version", [5, 4])
def test_a_version_that_is_not_above_the_last_is_refused(
    service: FakeService, transport: SharedStorageTransport, version: int
) -> None:
    refit(service, ModuleSource(WEIGHTS), transport, version=5)
    with pytest.raises(RefitError, match="versions only grow and 5 has been used"):
        refit(service, ModuleSource(WEIGHTS), transport, version=version)
    assert service.weight_version == 5


def test_a_mismatch_moves_nothing(service: FakeService, transport: SharedStorageTransport, tmp_path: Path) -> None:
    with pytest.raises(WeightsMismatchError):
        refit(service, ModuleSource({"a": torch.ones(3)}), transport)
    assert service.stage_calls == []
    assert list(tmp_path.iterdir()) == []


def test_a_failed_stage_removes_the_files_and_the_number_is_used_again(
    service: FakeService, transport: SharedStorageTransport, tmp_path: Path
) -> None:
    service.script = FakeScript(stage_error=RefitError(1, "stage", (1,), "shape"))
    with pytest.raises(RefitError, match=r"version 1 failed in stage on replicas \[1\]: shape"):
        refit(service, ModuleSource(WEIGHTS), transport)
    assert versions_in(tmp_path) == []
    service.script = FakeScript()
    assert refit(service, ModuleSource(WEIGHTS), transport).version == 1


def test_a_failed_commit_removes_the_files_and_burns_the_number(
    service: FakeService, transport: SharedStorageTransport, tmp_path: Path
) -> None:
    service.script = FakeScript(commit_error=RefitError(1, "commit", (2,), "died"))
    with pytest.raises(RefitError, match="died"):
        refit(service, ModuleSource(WEIGHTS), transport)
    assert versions_in(tmp_path) == []
    service.script = FakeScript()
    # Replicas 0 and 1 may serve version 1: other weights must not carry its label.
    assert refit(service, ModuleSource(WEIGHTS), transport).version == 2


def test_a_replica_with_other_weights_is_named(transport: SharedStorageTransport) -> None:
    with pytest.raises(RefitError, match="other weights: checksum bad") as caught:
        refit(OddReplica(checksum="bad"), ModuleSource(WEIGHTS), transport)
    assert (caught.value.phase, caught.value.replicas) == ("commit", (1,))


def test_a_replica_with_another_version_is_named(transport: SharedStorageTransport) -> None:
    with pytest.raises(RefitError, match="they report version 0") as caught:
        refit(OddReplica(version=0), ModuleSource(WEIGHTS), transport)
    assert caught.value.replicas == (1,)


def test_the_longest_stall_is_told(transport: SharedStorageTransport) -> None:
    assert refit(OddReplica(stall_s=1.5), ModuleSource(WEIGHTS), transport).stall_s == 1.5


def test_a_refit_is_double_buffered_when_every_replica_was(
    service: FakeService, transport: SharedStorageTransport
) -> None:
    assert not refit(OddReplica(is_double_buffered=True), ModuleSource(WEIGHTS), transport).is_double_buffered
    config = RefitConfig(double_buffer=True)
    refit(service, ModuleSource(WEIGHTS), transport, version=5, config=config)
    assert service.stage_calls[-1].update.double_buffer is True


@pytest.mark.parametrize(
    ("hosts", "workers"), [((), 3), (("a",), 3), (("a", "b"), 3)], ids=["unknown", "one machine", "two machines"]
)
def test_engines_are_told_how_many_workers_share_their_memory(
    transport: SharedStorageTransport, hosts: tuple[str, ...], workers: int
) -> None:
    service = FakeService(specs=SPECS, num_replicas=3, hosts=hosts)
    refit(service, ModuleSource(WEIGHTS), transport)
    assert service.stage_calls[-1].update.workers_per_host == workers


def test_not_finite_weights_are_refused_before_any_replica_hears_of_them(
    service: FakeService, transport: SharedStorageTransport
) -> None:
    # Finite in float32, above the largest float16.
    service = FakeService(specs=(TensorSpec("a", "float16", (2,)),))
    with pytest.raises(RefitError, match="a holds NaN or infinity") as caught:
        refit(service, ModuleSource({"a": torch.tensor([1.0, 1e6])}), transport)
    assert caught.value.phase == "check"
    assert service.stage_calls == []


class GatedService(FakeService):
    """Holds every commit until the gate opens."""

    def __init__(self) -> None:
        super().__init__(specs=SPECS)
        self.entered = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)

    def commit_weights(
        self, update: WeightUpdate, *, in_flight: InFlight, kv: KVCache, timeout_s: float
    ) -> tuple[CommitReport, ...]:
        self.entered.release()
        assert self.gate.acquire(timeout=60)
        return super().commit_weights(update, in_flight=in_flight, kv=kv, timeout_s=timeout_s)


def test_refits_of_one_service_wait_for_each_other(tmp_path: Path) -> None:
    service = GatedService()
    transports = [SharedStorageTransport(tmp_path / str(index)) for index in range(2)]
    receipts: list[int] = []

    def run(transport: SharedStorageTransport) -> None:
        receipts.append(refit(service, ModuleSource(WEIGHTS), transport).version)

    threads = [threading.Thread(target=run, args=(transport,)) for transport in transports]
    threads[0].start()
    try:
        assert service.entered.acquire(timeout=60)
        threads[1].start()
        with pytest.raises(DeadlineError, match="another refit"):
            refit(
                service,
                ModuleSource(WEIGHTS),
                transports[1],
                config=RefitConfig(stage_timeout_s=0.01, commit_timeout_s=0.01),
            )
        assert len(service.stage_calls) == 1, "a second refit began while the first was under way"
    finally:
        service.gate.release(2)
    for thread in threads:
        thread.join(timeout=60)
    assert sorted(receipts) == [1, 2]
    for transport in transports:
        transport.close()

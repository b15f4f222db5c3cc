"""TorchRL's weight-sync interface."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.collectors import Collector
from torchrl.testing.mocking_classes import ContinuousActionVecMockEnv
from torchrl.weight_update.weight_sync_schemes import WeightSyncScheme

from rl_vllm.config import RefitConfig
from rl_vllm.errors import BadInputError, ConfigError, RefitError, WeightsMismatchError
from rl_vllm.testing.fake_service import FakeScript, FakeService
from rl_vllm.types import InFlight, Sending, TensorSpec
from rl_vllm.weights import BroadcastTransport, ModuleSource, ObjectStoreTransport, SharedStorageTransport
from rl_vllm.weights.scheme import VLLMWeightSyncScheme

SPECS = (TensorSpec("weight", "float32", (2, 3)), TensorSpec("bias", "float32", (2,)))


@pytest.fixture
def service() -> FakeService:
    return FakeService(specs=SPECS)


@pytest.fixture
def scheme(service: FakeService, tmp_path: Path) -> Iterator[VLLMWeightSyncScheme]:
    scheme = VLLMWeightSyncScheme(service=service, folder=tmp_path)
    yield scheme
    scheme.shutdown()


class CountingCollector:
    def __init__(self) -> None:
        self.version = 0

    def increment_version(self) -> None:
        self.version += 1


def test_a_sender_installs_the_registered_model_and_counts_collector_versions(
    scheme: VLLMWeightSyncScheme, service: FakeService
) -> None:
    sender = scheme.create_sender()
    collectors = CountingCollector(), CountingCollector()
    sender.register_model(nn.Linear(3, 2))
    for collector in (*collectors, collectors[0]):
        sender.register_collector(collector)
    receipts = [sender.update_weights(), sender.update_weights()]
    assert [receipt.version for receipt in receipts] == [1, 2]
    assert service.weight_version == 2
    assert [collector.version for collector in collectors] == [2, 2]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("ckpt", "got 'ckpt': .*load a checkpoint first"),
        ([torch.zeros(2, 3)], "got a list"),
        (nn.Linear(3, 2).named_parameters(), r"got a generator: .*dict\(...\)"),
    ],
)
def test_what_holds_no_weights_is_refused(scheme: VLLMWeightSyncScheme, weights: object, message: str) -> None:
    sender = scheme.create_sender()
    with pytest.raises(BadInputError, match=message):
        sender.update_weights(weights)  # type: ignore[arg-type]
    with pytest.raises(BadInputError, match=message):
        sender.register_model(weights)  # type: ignore[arg-type]


def test_a_source_of_ones_own_is_taken_as_it_is(scheme: VLLMWeightSyncScheme) -> None:
    class Own:
        def specs(self) -> tuple[TensorSpec, ...]:
            return SPECS

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield "weight", torch.ones(2, 3)
            yield "bias", torch.ones(2)

    assert scheme.create_sender().update_weights(Own()).num_tensors == 2


def test_no_collector_moves_when_a_refit_fails(scheme: VLLMWeightSyncScheme, service: FakeService) -> None:
    sender, collector = scheme.create_sender(), CountingCollector()
    sender.register_model(nn.Linear(3, 2))
    sender.register_collector(collector)
    service.script = FakeScript(stage_error=RefitError(1, "stage", (0,), "no"))
    with pytest.raises(RefitError):
        sender.update_weights()
    with pytest.raises(WeightsMismatchError):
        sender.update_weights(nn.Linear(1, 1))
    assert collector.version == 0


@pytest.mark.parametrize("form", ["module", "state dict", "tensordict"])
def test_weights_given_to_the_call_replace_the_registered_ones(
    scheme: VLLMWeightSyncScheme, service: FakeService, form: str
) -> None:
    sender, other = scheme.create_sender(), nn.Linear(3, 2)
    sender.register_model(nn.Linear(3, 2))
    weights = {
        "module": other,
        "state dict": other.state_dict(),
        "tensordict": TensorDict(dict(other.state_dict())),
    }[form]
    registered = sender.update_weights().checksum
    assert sender.update_weights(weights).checksum != registered
    assert sender.update_weights(other).checksum == sender.update_weights(weights).checksum


def test_an_unknown_transport_is_refused_with_the_known_ones() -> None:
    known = "auto, broadcast, ipc, object_store, shared_storage, vllm_nccl"
    with pytest.raises(ConfigError, match=f"one of {known}, got 'pigeon'"):
        VLLMWeightSyncScheme("pigeon")


@pytest.mark.parametrize("transport", ["broadcast", "object_store"])
def test_a_folder_is_refused_where_it_would_be_ignored(transport: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is for transport='shared_storage' or 'auto'"):
        VLLMWeightSyncScheme(transport, folder=tmp_path)


def test_a_transport_that_was_named_or_given_says_so(tmp_path: Path) -> None:
    named = VLLMWeightSyncScheme("object_store").transport_choice
    assert named is not None
    assert (named.name, named.reason) == ("object_store", "transport='object_store' was named")
    given = VLLMWeightSyncScheme(SharedStorageTransport(tmp_path)).transport_choice
    assert given is not None
    assert (given.name, given.reason) == ("shared_storage", "transport='shared_storage' was given")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("broadcast", BroadcastTransport),
        ("object_store", ObjectStoreTransport),
        ("shared_storage", SharedStorageTransport),
    ],
)
def test_each_name_makes_its_transport(name: str, kind: type) -> None:
    scheme = VLLMWeightSyncScheme(name)
    assert isinstance(scheme.create_transport(), kind)
    scheme.shutdown()


def test_auto_chooses_at_the_first_refit_and_says_so_once(
    service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    scheme = VLLMWeightSyncScheme("auto", service=service)
    assert scheme.transport_choice is None
    with pytest.raises(ConfigError, match="chosen by the first refit"):
        scheme.create_transport()
    with caplog.at_level("INFO", "rl_vllm.weights.scheme"):
        receipts = [scheme.refit(nn.Linear(3, 2)) for _ in range(2)]
    assert [receipt.transport for receipt in receipts] == ["shared_storage"] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "transport='auto' is 'shared_storage': every replica is on the trainer's machine"
    ]
    chosen = scheme.transport_choice
    assert chosen is not None
    assert (chosen.name, chosen.reason) == ("shared_storage", "every replica is on the trainer's machine")
    scheme.shutdown()


def test_auto_uses_a_folder_that_was_named(tmp_path: Path) -> None:
    scheme = VLLMWeightSyncScheme("auto", service=FakeService(specs=SPECS, hosts=("node-b",)), folder=tmp_path)
    scheme.refit(nn.Linear(3, 2))
    assert [path.name for path in tmp_path.glob("v*")] == ["v000001"]
    scheme.shutdown()


def test_auto_with_weights_on_a_gpu_holds_nothing_on_the_engines_side(monkeypatch: pytest.MonkeyPatch) -> None:
    service = FakeService(specs=SPECS, hosts=("node-b",))
    scheme = VLLMWeightSyncScheme("auto", service=service)
    monkeypatch.setattr(ModuleSource, "is_on_gpu", True)
    # Where nobody joins a broadcast; what is chosen stays.
    service.script = FakeScript(commit_error=RefitError(1, "commit", (0,), "nobody is there"))
    with pytest.raises(RefitError, match=r"nobody is there|receivers went away"):
        scheme.refit(nn.Linear(3, 2))
    transport = scheme.create_transport()
    assert isinstance(transport, BroadcastTransport)
    assert transport.sending is Sending.WHILE_COMMITTING
    scheme.shutdown()


def test_auto_through_ray_uses_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "put", lambda data: "reference")
    scheme = VLLMWeightSyncScheme("auto", service=FakeService(specs=SPECS, hosts=("node-b",)))
    assert scheme.refit(nn.Linear(3, 2)).transport == "object_store"
    scheme.shutdown()


def test_auto_waits_for_a_replica_to_choose_by() -> None:
    service = FakeService(specs=SPECS, num_replicas=0)
    scheme = VLLMWeightSyncScheme("auto", service=service)
    with pytest.raises(RefitError, match="no replica is up") as caught:
        scheme.refit(nn.Linear(3, 2))
    assert (caught.value.version, caught.value.phase, scheme.transport_choice) == (1, "check", None)


def test_a_pickled_scheme_chooses_anew(service: FakeService) -> None:
    scheme = VLLMWeightSyncScheme("auto", service=service)
    scheme.refit(nn.Linear(3, 2))
    assert pickle.loads(pickle.dumps(scheme)).transport_choice is None
    named = VLLMWeightSyncScheme("broadcast")
    assert pickle.loads(pickle.dumps(named)).transport_choice == named.transport_choice
    scheme.shutdown()


def test_a_transport_of_your_own_is_used_and_closed_with_the_scheme(service: FakeService, tmp_path: Path) -> None:
    transport = SharedStorageTransport(tmp_path)
    scheme = VLLMWeightSyncScheme(transport, service=service)
    scheme.create_sender().update_weights(nn.Linear(3, 2))
    assert scheme.create_transport() is transport
    assert list(tmp_path.glob("v*"))
    scheme.shutdown()
    with pytest.raises(ConfigError, match="was shut down"):
        scheme.create_transport()


def test_missing_pieces_are_named() -> None:
    scheme = VLLMWeightSyncScheme()
    with pytest.raises(ConfigError, match="no service"):
        scheme.create_sender().update_weights(nn.Linear(3, 2))
    with pytest.raises(ConfigError, match="register_model"):
        scheme.create_sender(FakeService(specs=SPECS)).update_weights()
    with pytest.raises(ConfigError, match="another service"):
        scheme.create_receiver(FakeService(specs=SPECS))


def test_a_receiver_pushes_and_knows_the_version(service: FakeService, tmp_path: Path) -> None:
    scheme = VLLMWeightSyncScheme(folder=tmp_path)
    receiver = scheme.create_receiver(service)
    receiver.apply_weights(nn.Linear(3, 2))
    assert receiver.weight_version == 1
    scheme.shutdown()


def test_the_config_reaches_the_service(service: FakeService, tmp_path: Path) -> None:
    scheme = VLLMWeightSyncScheme(
        service=service, folder=tmp_path, config=RefitConfig(in_flight=InFlight.ABORT, keep_versions=1)
    )
    for _ in range(2):
        scheme.refit(nn.Linear(3, 2))
    assert service.commit_calls[0].in_flight is InFlight.ABORT
    assert [path.name for path in tmp_path.glob("v*")] == ["v000002"]
    scheme.shutdown()


def test_it_works_through_a_torchrl_collector(scheme: VLLMWeightSyncScheme, service: FakeService) -> None:
    model = nn.Linear(3, 2)
    scheme.register_model(model)
    collector = Collector(
        ContinuousActionVecMockEnv(),
        None,
        frames_per_batch=4,
        total_frames=4,
        weight_sync_schemes={"policy": scheme},
        track_policy_version=True,
    )
    assert isinstance(scheme, WeightSyncScheme)
    # Before any rollout the service has the trainer's weights.
    assert service.weight_version == 1
    first = service.commit_calls[0].update.checksum
    with torch.no_grad():
        model.weight += 1.0
    before = collector.policy_version
    collector.update_policy_weights_()
    assert service.weight_version == 2
    assert service.commit_calls[1].update.checksum != first
    assert collector.policy_version == before + 1
    collector.shutdown()


def test_a_collector_with_workers_is_refused(scheme: VLLMWeightSyncScheme) -> None:
    with pytest.raises(ConfigError, match="collector of one process"):
        scheme.init_on_sender(params_map={}, model_id="policy")
    with pytest.raises(ConfigError, match="nothing to receive"):
        scheme.init_on_receiver(model_id="policy")
    with pytest.raises(ConfigError, match="worker_ids=1"):
        scheme.send(nn.Linear(3, 2), worker_ids=1)


def test_a_pickled_scheme_keeps_its_settings_and_leaves_the_rest_behind(scheme: VLLMWeightSyncScheme) -> None:
    scheme.register_model(nn.Linear(3, 2))
    scheme.refit()
    copy = pickle.loads(pickle.dumps(scheme))
    with pytest.raises(ConfigError, match="no service"):
        copy.refit()

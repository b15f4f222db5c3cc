"""TorchRL's own senders, receivers and updaters, with its own classes, on a service over fake engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch
from tensordict import TensorDict
from torchrl.collectors.llm.weight_update.vllm import vLLMUpdater
from torchrl.collectors.llm.weight_update.vllm_v2 import vLLMUpdaterV2
from torchrl.weight_update.llm.vllm_double_buffer import VLLMDoubleBufferSyncScheme
from torchrl.weight_update.llm.vllm_nccl import VLLMWeightSyncScheme, get_model_metadata
from transformers import LlamaConfig, LlamaForCausalLM

from rl_vllm import AsyncVLLM
from rl_vllm.errors import BadInputError, ConfigError, ReplicaCallError, UnsupportedByEngineError, WeightsMismatchError
from rl_vllm.testing import FakeEngine, FakeExecutor
from rl_vllm.types import TensorSpec
from rl_vllm.weights import ModuleSource

from .conftest import service_config


def llama(*, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest) -> LlamaForCausalLM:
    return llama(tied=request.param)


@pytest.fixture
def fakes(model: LlamaForCausalLM) -> list[FakeEngine]:
    specs = tuple(
        TensorSpec(name, "float32", tuple(value.shape))
        for name, value in model.state_dict().items()
        if not (name == "lm_head.weight" and model.config.tie_word_embeddings)
    )
    return [FakeEngine(index, specs=specs) for index in range(2)]


@pytest.fixture
def service(fakes: list[FakeEngine]) -> Iterator[AsyncVLLM]:
    with AsyncVLLM.launch(service_config(2), executor=FakeExecutor(fakes)) as running:
        yield running


class CountingCollector:
    def __init__(self) -> None:
        self.version = 0

    def increment_version(self) -> None:
        self.version += 1


def checksums(fake: FakeEngine) -> list[str | None]:
    return [update.checksum for update in fake.committed]


def expected_checksum(service: AsyncVLLM, model: LlamaForCausalLM) -> str | None:
    """What our own refit of the model sends."""
    service.update_weights(ModuleSource(model))
    assert service.last_receipt is not None
    return service.last_receipt.checksum


# The updater


def test_every_way_to_push_is_one_refit_of_the_same_weights(
    service: AsyncVLLM, fakes: list[FakeEngine], model: LlamaForCausalLM
) -> None:
    updater = vLLMUpdater(vllm_engine=service, v2=True)
    assert isinstance(updater, vLLMUpdaterV2)
    collector = CountingCollector()
    updater.register_collector(collector)
    updater.init()
    updater.push_weights(iter(model.state_dict().items()))
    updater.push_weights(TensorDict.from_module(model))
    # As TorchRL's wrapper holds it.
    updater.push_weights_from_transformers(SimpleNamespace(model=model))
    updater._sync_weights_with_worker(server_weights=TensorDict(dict(model.state_dict())).flatten_keys("."))
    wanted = expected_checksum(service, model)
    assert [checksums(fake) for fake in fakes] == [[wanted] * 5] * 2
    assert collector.version == 4
    assert updater.get_tp_size() == 1
    assert service.weight_version == 5


def test_a_push_of_a_part_is_refused_whole(service: AsyncVLLM, fakes: list[FakeEngine], model: object) -> None:
    updater = vLLMUpdaterV2(service)
    updater.init()
    collector = CountingCollector()
    updater.register_collector(collector)
    (name, tensor), *_ = model.state_dict().items()  # type: ignore[attr-defined]
    with pytest.raises(WeightsMismatchError, match="missing"):
        updater.push_weights(iter([(name, tensor)]))
    with pytest.raises(WeightsMismatchError, match=r"every name lacks 'model\.'.*TransformersWrapper"):
        updater.push_weights_from_transformers(model)
    assert fakes[0].staged == []
    assert collector.version == 0


def test_a_head_that_differs_from_the_embedding_it_should_be_tied_to_is_reported() -> None:
    tied = llama(tied=True)
    specs = tuple(
        TensorSpec(name, "float32", tuple(value.shape))
        for name, value in tied.state_dict().items()
        if name != "lm_head.weight"
    )
    with AsyncVLLM.launch(service_config(1), executor=FakeExecutor([FakeEngine(specs=specs)])) as service:
        weights = dict(tied.state_dict()) | {"lm_head.weight": torch.ones(16, 8)}
        with pytest.raises(WeightsMismatchError, match=r"lm_head.weight: unexpected; the engine ties it"):
            service.update_weights(weights.items())
        weights["lm_head.weight"] = tied.state_dict()["lm_head.weight"].clone()
        service.update_weights(weights.items())
        assert service.weight_version == 1


# The double buffer


@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
@pytest.mark.filterwarnings("ignore:state_dict strategy is experimental")
def test_the_double_buffer_refits_every_replica_without_ray(
    service: AsyncVLLM, fakes: list[FakeEngine], model: LlamaForCausalLM, tmp_path: Path, strategy: str
) -> None:
    scheme = VLLMDoubleBufferSyncScheme(str(tmp_path), strategy=strategy)
    sender, receiver = scheme.create_sender(), scheme.create_receiver(service.as_local_llm())
    sender.register_model(model)
    sender.update_weights()
    assert receiver.poll_and_apply()
    first = expected_checksum(service, model)
    with torch.no_grad():
        model.model.norm.weight += 1.0
    sender.update_weights()
    assert receiver.poll_and_apply()
    second = expected_checksum(service, model)
    assert first != second
    assert [checksums(fake) for fake in fakes] == [[first, first, second, second]] * 2
    assert not ray.is_initialized()


def test_the_double_buffer_drives_a_service_on_ray_directly(
    service: AsyncVLLM,
    fakes: list[FakeEngine],
    model: LlamaForCausalLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheme = VLLMDoubleBufferSyncScheme(str(tmp_path))
    sender, receiver = scheme.create_sender(), scheme.create_receiver(service)
    sender.register_model(model)
    sender.update_weights()
    with pytest.raises(ConfigError, match=r"create_receiver\(service.as_local_llm"):
        receiver.poll_and_apply()
    assert fakes[0].staged == []
    # Of Ray the receiver wants only that it waits for what it is given.
    waited_for: list[object] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get", waited_for.append)
    assert receiver.poll_and_apply()
    assert waited_for == [[]]
    wanted = expected_checksum(service, model)
    assert [checksums(fake) for fake in fakes] == [[wanted] * 2] * 2


def test_a_folder_without_weights_is_named(service: AsyncVLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    with pytest.raises(BadInputError, match=r"nowhere holds no weights: call the sender's update_weights"):
        service.collective_rpc("load_weights_from_storage", args=(str(tmp_path / "nowhere"), 1))
    with pytest.raises(ConfigError, match="needs the folder"):
        service.collective_rpc("load_weights_from_storage")
    with pytest.raises(ReplicaCallError, match="no workers to call 'ping'"):
        service.collective_rpc("ping")


# TorchRL's NCCL scheme


def test_the_nccl_scheme_is_answered_with_what_to_use(
    service: AsyncVLLM, fakes: list[FakeEngine], model: LlamaForCausalLM
) -> None:
    pytest.importorskip("vllm")
    scheme = VLLMWeightSyncScheme(master_port=service.get_master_port(), num_replicas=2)
    receiver = scheme.create_receiver(service)
    # What does nothing there does nothing here.
    receiver.apply_weights(None)
    assert receiver.poll_and_apply() is False
    with pytest.raises(UnsupportedByEngineError, match=r"VLLMWeightSyncScheme\(transport=\"broadcast\"\)"):
        receiver.init_all_workers_group(get_model_metadata(model))
    assert not ray.is_initialized()
    assert fakes[0].staged == []
    assert service.actors == [0, 1]

"""The engine interface that TorchRL's scripts and updaters call."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torchrl.collectors.llm.weight_update.vllm_v2 import vLLMUpdaterV2
from torchrl.modules.llm.backends.vllm.base import RLvLLMEngine
from transformers import LlamaConfig, LlamaForCausalLM

import rl_vllm
from rl_vllm import AsyncVLLM, EngineConfig, ServiceConfig, make_async_vllm_engine
from rl_vllm.async_vllm.address import HeldPort, routable_address
from rl_vllm.errors import BadInputError, ConfigError, RefitError, ServiceNotRunningError, WeightsMismatchError
from rl_vllm.service import VLLMService
from rl_vllm.testing import FakeEngine, FakeEngineScript, FakeExecutor, FakeScript
from rl_vllm.types import TensorSpec

from .conftest import service_config

SPECS = (TensorSpec("a.weight", "bfloat16", (2, 3)), TensorSpec("b.bias", "float32", (3,)))


def tensors(scale: float = 1.0) -> list[tuple[str, torch.Tensor]]:
    return [("a.weight", torch.full((2, 3), scale)), ("b.bias", torch.arange(3.0) * scale)]


def launched(*fakes: FakeEngine, **settings: object) -> AsyncVLLM:
    return AsyncVLLM.launch(service_config(len(fakes), **settings), executor=FakeExecutor(fakes))


@pytest.fixture
def fakes() -> list[FakeEngine]:
    return [FakeEngine(index, specs=SPECS) for index in range(2)]


@pytest.fixture
def service(fakes):
    with launched(*fakes) as running:
        yield running


def test_a_service_is_what_torchrl_calls_an_engine(service):
    assert isinstance(service, RLvLLMEngine)
    assert isinstance(service, VLLMService)
    assert rl_vllm.AsyncVLLM is AsyncVLLM
    # Nothing of TorchRL's interface is left as the base class has it.
    for name in vars(RLvLLMEngine):
        if not name.startswith("_"):
            assert getattr(AsyncVLLM, name) is not getattr(RLvLLMEngine, name), name


def test_metadata_is_what_a_trainer_must_send(service):
    assert service.get_model_metadata() == {
        "a.weight": (torch.bfloat16, torch.Size([2, 3])),
        "b.bias": (torch.float32, torch.Size([3])),
    }
    assert service.get_tp_size() == 1


def test_the_address_is_reachable_and_the_port_is_held():
    address, port = routable_address(), HeldPort()
    if address not in ("127.0.0.1", "::1"):
        assert not address.startswith("127.")
    # An address of this host can be bound.
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as mine:
        mine.bind((address, 0))
    number = port.number
    assert port.number == number
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", number))
    port.release()
    port.release()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("", number))


def test_services_never_share_a_port(fakes):
    with launched(FakeEngine()) as one, launched(FakeEngine()) as two:
        assert one.get_master_port() != two.get_master_port()
        assert one.get_master_address() == two.get_master_address()


def test_a_group_that_is_named_is_kept(service):
    with pytest.raises(ConfigError, match="give both or neither"):
        service.init_weight_update_group("10.0.0.1")
    service.init_weight_update_group("10.0.0.1", 29_500)
    assert (service.get_master_address(), service.get_master_port()) == ("10.0.0.1", 29_500)
    service.init_weight_update_group()
    assert service.get_master_port() == 29_500


def test_an_update_reaches_every_replica_in_the_engines_dtypes(service, fakes):
    service.update_weights(iter(tensors()))
    assert [fake.committed[0].version for fake in fakes] == [1, 1]
    assert service.weight_version == 1
    # Two bytes for each of six values, four for each of three.
    assert fakes[0].committed[0].num_bytes == 6 * 2 + 3 * 4
    assert service.last_receipt.num_replicas == 2
    service.update_weights(iter(tensors(2.0)))
    assert service.weight_version == 2
    assert fakes[0].committed[0].checksum != fakes[0].committed[1].checksum


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ([("a.weight", torch.zeros(2, 3))], "b.bias: missing"),
        ([*tensors(), ("c", torch.zeros(1))], "c: unexpected"),
        ([("a.weight", torch.zeros(3, 2)), ("b.bias", torch.zeros(3))], r"a.weight: shape \[3, 2\]"),
        ([(f"model.{name}", tensor) for name, tensor in tensors()], "every name starts with 'model.'"),
    ],
    ids=["missing", "unknown", "shape", "prefix"],
)
def test_wrong_tensors_are_listed_before_a_byte_moves(service, fakes, sent, message):
    with pytest.raises(WeightsMismatchError, match=message):
        service.update_weights(iter(sent))
    assert fakes[0].staged == []
    assert service.weight_version == 0


def test_a_name_that_comes_twice_is_refused(service, fakes):
    with pytest.raises(BadInputError, match=r"a\.weight comes twice"):
        service.update_weights(iter([*tensors(), tensors()[0]]))
    with pytest.raises(BadInputError):
        service.update_weights(iter([("a.weight", [1.0])]))
    assert fakes[0].staged == []


def test_an_update_that_fails_raises_and_leaves_the_old_weights():
    broken = FakeEngine(1, specs=SPECS, script=FakeEngineScript(answers=FakeScript(stage_error=OSError("disk full"))))
    with launched(FakeEngine(0, specs=SPECS), broken) as service:
        with pytest.raises(RefitError, match="disk full") as raised:
            service.update_weights(iter(tensors()))
        assert raised.value.replicas == (1,)
        assert service.weight_version == 0
        assert service.last_receipt is None


def test_nothing_works_before_launch_or_after_shutdown(fakes):
    service = AsyncVLLM(service_config(2), executor=FakeExecutor(fakes))
    calls = [
        lambda: service.update_weights(iter(tensors())),
        service.init_weight_update_group,
        service.get_model_metadata,
        service.reset_prefix_cache,
    ]
    for call in calls:
        with pytest.raises(ServiceNotRunningError, match="not launched"):
            call()
    service.start()
    service.update_weights(iter(tensors()))
    service.shutdown()
    for call in calls:
        with pytest.raises(ServiceNotRunningError, match="shut down"):
            call()


def test_torchrls_updater_drives_the_service():
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            tie_word_embeddings=True,
        )
    )
    expected = tuple(
        TensorSpec(name, "float32", tuple(value.shape))
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    )
    fake = FakeEngine(specs=expected)
    with launched(fake) as service:
        updater = vLLMUpdaterV2(service)
        assert updater.master_port == service.get_master_port()
        assert updater.model_metadata["model.embed_tokens.weight"] == (torch.float32, torch.Size([16, 8]))
        updater.init()
        # It looks for the model in the attribute of this name, as TorchRL's wrapper has it.
        updater.push_weights_from_transformers(SimpleNamespace(model=model))
        updater.push_weights(iter(model.state_dict().items()))
    assert [update.version for update in fake.committed] == [1, 2]
    assert fake.committed[0].checksum == fake.committed[1].checksum


# What a user passes


def test_a_whole_services_config_says_how_many_replicas(fakes):
    config = ServiceConfig(engine=EngineConfig(model="fake"), num_replicas=2, request_timeout_s=7.0)
    with AsyncVLLM(config, executor=FakeExecutor(fakes)) as service:
        assert service.num_replicas == 2
        assert service.config is config
    with pytest.raises(ConfigError, match=r"num_replicas=3 contradicts ServiceConfig.num_replicas=2"):
        AsyncVLLM(config, 3)
    assert AsyncVLLM(config, 2).config is config


def test_prefix_caching_is_what_the_user_said_and_never_the_opposite():
    on, off = EngineConfig(model="fake"), EngineConfig(model="fake", enable_prefix_caching=False)
    for config, keyword, result in [(on, None, True), (on, False, False), (on, True, True), (off, None, False)]:
        service = AsyncVLLM(config, enable_prefix_caching=keyword)
        assert service.config.engine.enable_prefix_caching is result
        whole = AsyncVLLM(ServiceConfig(engine=config), enable_prefix_caching=keyword)
        assert whole.config.engine.enable_prefix_caching is result
    with pytest.raises(ConfigError, match=r"enable_prefix_caching=True contradicts the engine's settings"):
        AsyncVLLM(off, enable_prefix_caching=True)


def test_an_actor_class_is_for_ray():
    with pytest.raises(ConfigError, match="actor_class is for executor='ray', got executor='local'"):
        AsyncVLLM(EngineConfig(model="fake"), actor_class=FakeEngine, executor="local")
    AsyncVLLM(EngineConfig(model="fake"), actor_class=FakeEngine)


def test_a_name_is_not_settings():
    with pytest.raises(ConfigError, match=r"from_pretrained\('some/model'\) takes one"):
        AsyncVLLM("some/model")


@pytest.mark.parametrize("executor", ["slurm", 5], ids=str)
def test_an_unknown_executor_is_refused_when_it_starts(executor):
    with pytest.raises(ConfigError, match="executor must be 'ray', 'local' or an Executor"):
        AsyncVLLM(EngineConfig(model="fake"), executor=executor).start()


def test_one_call_from_a_name_to_a_running_service():
    executor = FakeExecutor([FakeEngine(0), FakeEngine(1)])
    service = make_async_vllm_engine(
        model_name="fake",
        num_devices=1,
        num_replicas=2,
        verbose=False,
        compile=False,
        enable_fp32_output=True,
        data_parallel_size=None,
        pipeline_parallel_size=1,
        max_model_len=64,
        request_timeout_s=9.0,
        executor=executor,
    )
    with service:
        config = service.config
        assert isinstance(service, AsyncVLLM)
        assert (config.num_replicas, config.request_timeout_s) == (2, 9.0)
        assert (config.engine.tensor_parallel_size, config.engine.data_parallel_size) == (1, 1)
        assert (config.engine.enable_fp32_output, config.engine.enforce_eager) == (True, True)
        assert config.engine.max_model_len == 64


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"num_devices": 2, "tensor_parallel_size": 4}, "num_devices=2 contradicts tensor_parallel_size=4"),
        ({"num_devices": 0}, "tensor_parallel_size must be an integer of at least 1, got 0"),
        ({"compile": True, "enforce_eager": True}, "compile and enforce_eager say the same thing"),
        ({"max_modle_len": 64}, "no setting 'max_modle_len'; did you mean max_model_len"),
        ({"request_timeout": 5.0}, "no setting 'request_timeout'; did you mean request_timeout_s"),
        ({"num_replicas": 0}, "num_replicas must be an integer of at least 1"),
    ],
    ids=str,
)
def test_contradictions_and_unknown_names_are_refused_before_anything_starts(keywords, message):
    executor = FakeExecutor([FakeEngine()])
    with pytest.raises(ConfigError, match=message):
        AsyncVLLM.from_pretrained("fake", executor=executor, **keywords)
    assert executor.events == []


def test_the_service_without_torchrl_imports_no_torchrl():
    for file in Path(rl_vllm.__file__).parent.joinpath("service").rglob("*.py"):
        imports = [line for line in file.read_text().splitlines() if line.strip().startswith(("import ", "from "))]
        assert not [line for line in imports if "torchrl" in line], file

"""Adapter refits over fake engines: what is sent, who answers by what, and what a failure leaves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from rl_vllm import AsyncVLLM, EngineConfig, SamplingConfig, ServiceConfig
from rl_vllm.config import HealthConfig, RefitConfig
from rl_vllm.errors import (
    AdapterMismatchError,
    AdapterRefitError,
    BadInputError,
    ConfigError,
    DeadlineError,
    RefitError,
    WeightsMismatchError,
)
from rl_vllm.testing import (
    FakeEngine,
    FakeEngineScript,
    FakeExecutor,
    FakeExecutorScript,
    FakeScript,
    FakeService,
    Gate,
)
from rl_vllm.types import BASE_MODEL, InFlight, KVCache, LoRALimits, PromptBatch, TensorSpec, Verify
from rl_vllm.weights import ModuleSource, SharedStorageTransport, VLLMWeightSyncScheme, refit, refit_adapter

from .conftest import llama

RANK = 4
TWO_TOKENS = SamplingConfig(max_tokens=2, ignore_eos=True)
LIMITS = LoRALimits(max_rank=8, max_loaded=3, max_running=2)
EVENTUALLY_S = 60.0


def peft_model(rank: int = RANK, targets: Sequence[str] = ("q_proj", "down_proj"), **settings: object) -> PeftModel:
    config = LoraConfig(r=rank, lora_alpha=8, target_modules=list(targets), **settings)
    model = get_peft_model(llama(tied=False), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.fill_(0.25)
    return model


def expected_of(model: PreTrainedModel) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(n, "float32", tuple(t.shape)) for n, t in model.state_dict().items())


SPECS = expected_of(llama(tied=False))


def engine(index: int = 0, **script: object) -> FakeEngine:
    return FakeEngine(index, script=FakeEngineScript(**{"lora_limits": LIMITS, **script}), specs=SPECS)


def launched(*fakes: FakeEngine, make: Callable[[int], FakeEngine] = engine, **settings: object) -> AsyncVLLM:
    config = ServiceConfig(engine=EngineConfig(model="fake"), num_replicas=len(fakes), **settings)
    return AsyncVLLM.launch(config, executor=FakeExecutor(fakes, script=FakeExecutorScript(make=make)))


@pytest.fixture
def fakes() -> list[FakeEngine]:
    return [engine(0), engine(1)]


@pytest.fixture
def service(fakes: list[FakeEngine]) -> Iterator[AsyncVLLM]:
    with launched(*fakes) as running:
        yield running


@pytest.fixture
def model() -> PeftModel:
    return peft_model()


def versions(service: AsyncVLLM, *loras: str | None) -> list[int]:
    """The label of each row's answer."""
    batch = replace(PromptBatch.from_rows([[5]] * len(loras)), loras=loras)
    answer = service.generate_batch(batch, TWO_TOKENS)
    labels = [set(answer.versions(index).tolist()) for index in range(len(loras))]
    assert all(len(each) == 1 for each in labels)
    return [each.pop() for each in labels]


def asked_of(fake: FakeEngine) -> tuple[str | None, ...] | None:
    """The adapters of the newest batch that an engine was given."""
    return fake.batches[-1].prompts.loras


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + EVENTUALLY_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {EVENTUALLY_S:g} s for {what}"
        time.sleep(0.002)


def names(fake: FakeEngine) -> list[str]:
    return sorted(fake.adapters)


# What a refit does


def test_the_adapter_alone_is_sent_and_answers_those_who_name_it_or_nothing(
    service: AsyncVLLM, fakes: list[FakeEngine], model: PeftModel, tmp_path: Path
) -> None:
    assert versions(service, None) == [0]
    receipt = refit_adapter(service, model, folder=tmp_path)
    assert [names(fake) for fake in fakes] == [["policy@v1"]] * 2
    assert versions(service, None, "policy", BASE_MODEL) == [1, 1, 0]
    asked = [name for fake in fakes for batch in fake.batches for name in batch.prompts.loras or ()]
    assert sorted(map(str, asked)) == ["None", "policy@v1", "policy@v1"]
    # Two layers of two modules of two matrices; q_proj is 8 from 8 and down_proj 8 from 16.
    assert receipt.num_tensors == 8
    assert receipt.num_bytes == 4 * 2 * RANK * ((8 + 8) + (8 + 16))
    assert (receipt.version, receipt.num_replicas, receipt.transport) == (1, 2, "adapter")
    assert (receipt.kv, receipt.in_flight) == (KVCache.SEPARATE, InFlight.KEEP)
    assert set(receipt.phase_s) == {"check", "stage", "commit"}
    assert service.weight_version == 1
    assert fakes[0].staged == []


def test_what_is_written_is_what_peft_reads(service: AsyncVLLM, fakes: list[FakeEngine], tmp_path: Path) -> None:
    model = peft_model(use_rslora=True)
    receipt = refit_adapter(service, model, folder=tmp_path)
    adapter = fakes[0].adapters["policy@v1"]
    assert Path(adapter.path).parent == tmp_path
    assert adapter.checksum == receipt.checksum != ""
    again = PeftModel.from_pretrained(llama(tied=False), adapter.path).eval()
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(again(ids).logits, model.eval()(ids).logits, rtol=0, atol=0)
    # The test can fail: without the adapter the logits are others.
    assert not torch.allclose(llama(tied=False)(ids).logits, again(ids).logits)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_values_are_those_of_the_moment_of_the_refit(
    service: AsyncVLLM, fakes: list[FakeEngine], model: PeftModel, tmp_path: Path
) -> None:
    first = refit_adapter(service, model, folder=tmp_path)
    path = Path(fakes[0].adapters["policy@v1"].path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(bool((tensor == 0.25).all()) for tensor in load_file(path / "adapter_model.safetensors").values())
    assert refit_adapter(service, model, folder=tmp_path).checksum != first.checksum


def test_an_idle_old_version_goes_from_the_engines_at_once_and_its_files_with_the_next_refit(
    service: AsyncVLLM, fakes: list[FakeEngine], model: PeftModel, tmp_path: Path
) -> None:
    numbers = set()
    for version in range(1, 6):
        assert refit_adapter(service, model, folder=tmp_path).version == version
        until(lambda: names(fakes[0]) == names(fakes[1]) == [f"policy@v{version}"], "the old version to go")  # noqa: B023
        numbers.add(fakes[0].adapters[f"policy@v{version}"].number)
        assert versions(service, None) == [version]
    # vLLM tells adapters apart by number: no two versions share one.
    assert len(numbers) == 5
    assert len(list(tmp_path.iterdir())) <= 2


def test_a_private_folder_is_the_default_and_goes_with_the_service(model: PeftModel) -> None:
    service = launched(fake := engine())
    refit_adapter(service, model)
    folder = Path(fake.adapters["policy@v1"].path).parent
    assert folder.is_dir()
    service.shutdown()
    from rl_vllm.weights import ledger

    del ledger._ledgers[id(service)]
    assert not folder.exists()


def test_several_adapters_are_trained_side_by_side_under_one_ledger(service: AsyncVLLM, model: PeftModel) -> None:
    assert refit_adapter(service, model).version == 1
    assert refit_adapter(service, model, name="judge", default=False).version == 2
    assert versions(service, None, "policy", "judge", BASE_MODEL) == [1, 1, 2, 0]
    assert refit_adapter(service, model).version == 3
    assert versions(service, None, "policy", "judge") == [3, 3, 2]
    assert service.adapter_state().trained == {"policy": 3, "judge": 2}


def test_a_trained_adapter_can_be_removed_and_the_base_model_answers_again(
    service: AsyncVLLM, fakes: list[FakeEngine], model: PeftModel
) -> None:
    refit_adapter(service, model)
    with pytest.raises(ConfigError, match="version of the trained adapter 'policy'"):
        service.remove_lora("policy@v1")
    with pytest.raises(ConfigError, match="names the base model or a trained adapter"):
        service.add_lora("policy", "/elsewhere")
    assert service.remove_lora("policy")
    assert not service.remove_lora("policy")
    assert versions(service, None) == [0]
    until(lambda: names(fakes[0]) == names(fakes[1]) == [], "the version to go")
    with pytest.raises(ConfigError, match="no adapter is called 'policy'"):
        versions(service, "policy")
    # Versions only grow.
    assert service.weight_version == 1
    assert refit_adapter(service, model).version == 2


# Requests in flight


def test_requests_in_flight_end_under_their_version_which_goes_after_them(model: PeftModel) -> None:
    gate = Gate()
    fake = engine(gate=lambda request: gate if request.lora == "policy@v1" else None)
    with launched(fake) as service:
        refit_adapter(service, model)
        name = service.add_request([5, 6], TWO_TOKENS)
        until(lambda: len(fake.batches) == 1, "the request to be sent")
        refit_adapter(service, model)
        assert versions(service, None) == [2]
        assert names(fake) == ["policy@v1", "policy@v2"]
        assert fake.aborted == []
        gate.open()
        output = service.get_request_output(name)
        assert [span.version for span in output.outputs[0].weight_versions] == [1]
        assert len(output.outputs[0].token_ids) == 2
        until(lambda: names(fake) == ["policy@v2"], "the old version to go")


def test_a_batch_in_flight_is_labelled_by_the_version_it_began_with(model: PeftModel) -> None:
    gate = Gate()
    fake = engine(gate=lambda request: gate if request.lora == "policy@v1" else None)
    with launched(fake) as service:
        refit_adapter(service, model)
        found: list[list[int]] = []
        caller = threading.Thread(target=lambda: found.append(versions(service, None, BASE_MODEL, "policy")))
        caller.start()
        until(lambda: len(fake.batches) == 1, "the batch to be sent")
        refit_adapter(service, model)
        gate.open()
        caller.join(EVENTUALLY_S)
        assert found == [[1, 0, 1]]
        assert versions(service, None) == [2]


def test_a_refit_waits_for_the_slot_that_requests_in_flight_hold(model: PeftModel) -> None:
    gates = {f"policy@v{version}": Gate() for version in (1, 2)}
    fake = engine(gate=lambda request: gates.get(request.lora or ""))
    with launched(fake) as service:
        requests = []
        for count in (1, 2):
            refit_adapter(service, model)
            requests.append(service.add_request([5, 6], TWO_TOKENS))
            until(lambda: len(fake.batches) == count, "the request to be sent")  # noqa: B023
        refit_adapter(service, model)
        # Three of three slots: the versions 1 and 2 in use, and 3 that serves.
        with pytest.raises(AdapterRefitError, match=r"no adapter slot became free .*policy@v1': 1") as raised:
            refit_adapter(service, model, config=RefitConfig(stage_timeout_s=0.05))
        assert (raised.value.version, raised.value.phase, raised.value.replicas) == (4, "stage", ())
        assert versions(service, None) == [3]
        gates["policy@v1"].open()
        assert refit_adapter(service, model).version == 5
        gates["policy@v2"].open()
        for version, request in enumerate(requests, start=1):
            spans = service.get_request_output(request).outputs[0].weight_versions
            assert [span.version for span in spans] == [version]
        until(lambda: names(fake) == ["policy@v5"], "the old versions to go")


def test_an_engine_that_still_sees_a_request_is_asked_again(model: PeftModel) -> None:
    class Slow(FakeEngine):
        refusals = 3

        async def remove_lora(self, name: str) -> bool:
            if self.refusals:
                self.refusals -= 1
                raise ConfigError(f"adapter {name!r} is used by 1 unfinished requests")
            return await super().remove_lora(name)

    limits = LoRALimits(max_rank=8, max_loaded=2, max_running=2)
    slow = Slow(script=FakeEngineScript(lora_limits=limits), specs=SPECS)
    with launched(slow) as service:
        for version in (1, 2, 3):
            assert refit_adapter(service, model).version == version
        assert slow.refusals == 0
        assert versions(service, None) == [3]


# Versions beside base refits


def test_versions_are_shared_with_base_refits_and_labels_are_right_after_both(model: PeftModel) -> None:
    transport = SharedStorageTransport()
    base = llama(tied=False)
    with launched(engine()) as service:
        assert refit(service, ModuleSource(base), transport).version == 1
        assert versions(service, None) == [1]
        assert refit_adapter(service, model).version == 2
        assert versions(service, None, BASE_MODEL) == [2, 1]
        assert refit(service, ModuleSource(base), transport).version == 3
        # The policy is now base 3 under adapter 2: its newest part names it.
        assert versions(service, None, BASE_MODEL) == [3, 3]
        assert refit_adapter(service, model).version == 4
        assert versions(service, None, BASE_MODEL) == [4, 3]
        with pytest.raises(RefitError, match="versions only grow and 4 has been used"):
            refit_adapter(service, model, version=4)
        with pytest.raises(RefitError, match="versions only grow and 4 has been used"):
            refit(service, ModuleSource(base), transport, version=4)
        assert refit_adapter(service, model, version=9).version == 9
    transport.close()


def test_a_response_over_a_base_refit_changes_its_label_only_while_its_adapter_is_the_newest(model: PeftModel) -> None:
    """Tokens: adapter 1 over base 0; then over base 2; then, with adapter 3 in between, over base 4."""
    transport, base = SharedStorageTransport(), llama(tied=False)
    labels = {0: 1, 2: 2, 4: 1}
    from rl_vllm.service.policies import PolicyVersion

    policy = PolicyVersion("policy", 1)
    assert policy.label(np.array([0, 2], np.int32)).tolist() == [1, 2]
    policy.next_version = 3
    assert policy.label(np.array(list(labels), np.int32)).tolist() == list(labels.values())

    gate = Gate()
    fake = engine(answers=FakeScript(next_version=(1, 2)), piece_gate=gate)
    with launched(fake) as service:
        refit_adapter(service, model)
        name = service.add_request([5, 6], TWO_TOKENS)
        until(lambda: len(fake.batches) == 1, "the request to be sent")
        refit(service, ModuleSource(base), transport)
        gate.open()
        spans = service.get_request_output(name).outputs[0].weight_versions
        assert [(span.version, span.start, span.end) for span in spans] == [(1, 0, 1), (2, 1, 2)]
    transport.close()


def test_merged_weights_are_refused_while_an_adapter_would_be_applied_to_them_again(
    service: AsyncVLLM, fakes: list[FakeEngine], model: PeftModel
) -> None:
    transport = SharedStorageTransport()
    refit_adapter(service, model)
    with pytest.raises(BadInputError, match="'policy' applied to them again"):
        refit(service, ModuleSource(model), transport)
    assert fakes[0].staged == []
    with model.disable_adapter():
        assert refit(service, ModuleSource(model), transport).version == 2
    service.remove_lora("policy")
    assert refit(service, ModuleSource(model), transport).version == 3
    transport.close()


# Checks


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (llama(tied=False), "one PeftModel, LlamaForCausalLM holds 0"),
        (nn.ModuleList([peft_model(), peft_model()]), "holds 2"),
        ({"weight": torch.zeros(1)}, "the PeftModel itself, got a dict"),
        (
            get_peft_model(llama(tied=False), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)),
            "takes LoRA alone",
        ),
    ],
    ids=["plain", "two", "state dict", "prompt"],
)
def test_what_is_no_adapter_is_refused(service: AsyncVLLM, given: nn.Module, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        refit_adapter(service, given)


def test_a_module_that_contains_the_model_will_do(service: AsyncVLLM, model: PeftModel) -> None:
    assert refit_adapter(service, nn.ModuleDict({"policy": model})).num_tensors == 8


def test_everything_that_is_wrong_is_in_one_error_and_nothing_is_written(tmp_path: Path) -> None:
    model = peft_model(rank=16, use_dora=True)
    with torch.no_grad():
        model.base_model.model.model.layers[0].self_attn.q_proj.lora_A["default"].weight[0, 0] = torch.nan
    limits = LoRALimits(max_rank=8, max_loaded=1, max_running=1, target_modules=("q_proj",))
    specs = tuple(
        replace(spec, shape=(4, 16)) if spec.name == "model.layers.1.mlp.down_proj.weight" else spec
        for spec in SPECS
        if spec.name != "model.layers.0.mlp.down_proj.weight"
    )
    fake = FakeEngine(script=FakeEngineScript(lora_limits=limits), specs=specs)
    with launched(fake) as service:
        service.add_lora("policy", "/poet")
        with pytest.raises(AdapterMismatchError) as raised:
            refit_adapter(service, model, folder=tmp_path)
        assert isinstance(raised.value, WeightsMismatchError)
        text = str(raised.value)
        for part in (
            "use_dora=True: vLLM does not apply it",
            "layers.0.self_attn.q_proj.lora_A.weight holds NaN or infinity",
            "the served model has no module 'model.layers.0.mlp.down_proj'",
            "layers.1.mlp.down_proj.lora_B.weight has shape [8, 16]; the served model's",
            "rank 16 is above the engines' max_lora_rank=8",
            "are outside the engines' target_modules=['q_proj']",
            "an adapter that add_lora() loaded is called 'policy'",
            "no slot is free: policy stay and the engines hold 1",
        ):
            assert part in text, part
        assert versions(service, None) == [0]
        assert names(fake) == ["policy"]
        assert list(tmp_path.iterdir()) == []


def test_a_service_without_lora_says_how_to_launch_it(model: PeftModel) -> None:
    with (
        launched(engine(lora_limits=None)) as service,
        pytest.raises(AdapterMismatchError, match="enable_lora=True, max_lora_rank=8, max_loras=2, max_cpu_loras=3"),
    ):
        refit_adapter(service, model)
    with pytest.raises(ConfigError, match="a FakeService takes no adapters"):
        refit_adapter(FakeService(), model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"config": RefitConfig(in_flight=InFlight.ABORT)}, "in_flight=InFlight.ABORT is for whole weights"),
        ({"config": RefitConfig(in_flight=InFlight.WAIT)}, "in_flight=InFlight.WAIT is for whole weights"),
        ({"config": RefitConfig(kv=KVCache.REUSE)}, "kv=KVCache.REUSE is for whole weights"),
        ({"name": "a/b"}, "got 'a/b'"),
        ({"name": BASE_MODEL}, "got '@base'"),
        ({"name": ""}, "got ''"),
    ],
    ids=str,
)
def test_settings_without_a_meaning_are_refused(
    service: AsyncVLLM, model: PeftModel, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        refit_adapter(service, model, **settings)  # type: ignore[arg-type]
    assert service.weight_version == 0


def test_the_receipts_word_for_kv_is_no_setting() -> None:
    with pytest.raises(ConfigError, match=r"KVCache.SEPARATE is what receipts"):
        RefitConfig(kv=KVCache.SEPARATE)


# Failures


def test_a_replica_that_cannot_load_leaves_the_old_version_everywhere(model: PeftModel, tmp_path: Path) -> None:
    well, broken = engine(0), engine(1)
    with launched(well, broken) as service:
        refit_adapter(service, model, folder=tmp_path)
        broken.script = replace(broken.script, adapter_error=ConfigError("no such folder"))
        with pytest.raises(AdapterRefitError, match=r"replica 1: no such folder .*still answers") as raised:
            refit_adapter(service, model, folder=tmp_path)
        assert (raised.value.version, raised.value.phase, raised.value.replicas) == (2, "stage", (1,))
        assert names(well) == names(broken) == ["policy@v1"]
        assert versions(service, None, None) == [1, 1]
        assert service.weight_version == 1
        assert [path.name[:14] for path in tmp_path.iterdir()] == ["policy-v000001"]
        broken.script = replace(broken.script, adapter_error=None)
        # The version that was tried is not given again.
        assert refit_adapter(service, model, folder=tmp_path).version == 3


def test_a_replica_that_does_not_answer_in_time_is_named(model: PeftModel) -> None:
    gate = Gate()
    well, late = engine(0), engine(1, adapter_gate=gate)
    with launched(well, late) as service:
        with pytest.raises(AdapterRefitError, match=r"replica 1: ") as raised:
            refit_adapter(service, model, config=RefitConfig(stage_timeout_s=1.5))
        assert raised.value.replicas == (1,)
        assert isinstance(raised.value.__cause__, DeadlineError)
        gate.open()
        assert names(well) == names(late) == []
        assert versions(service, None) == [0]


def test_nobody_gets_a_version_before_all_replicas_have_it(model: PeftModel) -> None:
    gate = Gate()
    fakes = [engine(0), engine(1, adapter_gate=gate)]
    with launched(*fakes) as service:
        trainer = threading.Thread(target=refit_adapter, args=(service, model))
        trainer.start()
        until(lambda: names(fakes[0]) == ["policy@v1"], "the first replica to load")
        assert versions(service, None, None) == [0, 0]
        gate.open()
        trainer.join(EVENTUALLY_S)
        assert versions(service, None, None) == [1, 1]


def test_a_folder_that_cannot_be_written_is_named(service: AsyncVLLM, model: PeftModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AdapterRefitError, match=r"on the trainer: the adapter cannot be written: .*file"):
        refit_adapter(service, model, folder=tmp_path / "file")
    assert service.adapter_state().loaded == ()


def test_logprobs_are_proven_before_anybody_gets_the_adapter(tmp_path: Path) -> None:
    model = peft_model()
    truth = {"policy@v1": model}

    def score(ids_T: np.ndarray, _version: int, _replica: int) -> np.ndarray:
        with torch.no_grad():
            logits = truth["policy@v1"].eval()(torch.tensor([ids_T.tolist()])).logits[0].log_softmax(-1)
        scores = logits[:-1].gather(1, torch.tensor(ids_T[1:].tolist())[:, None])[:, 0].numpy()
        return np.concatenate([[0.0], scores])

    specs = tuple(replace(s, shape=(64, 8)) if s.name.startswith(("lm_head", "model.embed")) else s for s in SPECS)
    fake = FakeEngine(script=FakeEngineScript(answers=FakeScript(score_prompt=score), lora_limits=LIMITS), specs=specs)
    fake._info = replace(fake._info, vocab_size=32)
    with launched(fake) as service:
        receipt = refit_adapter(service, model, folder=tmp_path, config=RefitConfig(verify=Verify.LOGPROBS))
        assert receipt.logprob_max_difference is not None
        assert receipt.logprob_max_difference < 1e-4
        assert asked_of(fake) == ("policy@v1",) * 4
        truth["policy@v1"] = llama(tied=False)
        with pytest.raises(AdapterRefitError, match="their logprobs differ") as raised:
            refit_adapter(service, model, folder=tmp_path, config=RefitConfig(verify=Verify.LOGPROBS))
        assert (raised.value.phase, raised.value.replicas) == ("verify", (0,))
        assert asked_of(fake) == ("policy@v2",) * 4
        assert versions(service, None) == [1]
        assert names(fake) == ["policy@v1"]
        assert [path.name[:14] for path in tmp_path.iterdir()] == ["policy-v000001"]
        assert refit_adapter(service, model, config=RefitConfig(verify=Verify.NONE)).checksum == ""


# Restarts


def test_a_replica_that_starts_again_has_the_adapter_before_it_serves(model: PeftModel) -> None:
    started: list[FakeEngine] = []

    def make(index: int) -> FakeEngine:
        started.append(engine(index))
        return started[-1]

    one, two = engine(0), engine(1)
    health = HealthConfig(heartbeat_period_s=0.02, restart_pause_s=0.001)
    with launched(one, two, make=make, health=health) as service:
        refit_adapter(service, model)
        refit_adapter(service, model)
        two.kill("out of memory")
        until(lambda: service.stats().counters.restarts == 1 and service.replica(1).is_running, "the restart")
        assert names(started[0]) == ["policy@v2"]
        assert versions(service, None, None, None, None) == [2] * 4
        (index,) = service.add_replicas(1)
        assert names(started[1]) == ["policy@v2"]
        answer = service.generate([[5]], TWO_TOKENS, use_tqdm=False, actor_index=index)
        assert [span.version for span in answer[0].outputs[0].weight_versions] == [2]


def test_a_version_that_comes_while_a_replica_starts_is_not_missed(model: PeftModel) -> None:
    """The replica has been given the adapters, and is being given weights, when the next version comes."""
    transport, gate = SharedStorageTransport(), Gate()
    started: list[FakeEngine] = []

    def make(index: int) -> FakeEngine:
        started.append(engine(index, commit_gate=gate))
        return started[-1]

    with launched(engine(0), make=make) as service:
        refit(service, ModuleSource(llama(tied=False)), transport)
        refit_adapter(service, model)
        adding = threading.Thread(target=service.add_replicas, args=(1,))
        adding.start()
        until(lambda: bool(started) and bool(started[0].staged), "the weights to be staged")
        assert names(started[0]) == ["policy@v2"]
        refit_adapter(service, model)
        gate.open()
        adding.join(EVENTUALLY_S)
        until(lambda: names(started[0]) == ["policy@v3"], "the newest version alone to be there")
        answer = service.generate([[5]], TWO_TOKENS, use_tqdm=False, actor_index=1)
        assert [span.version for span in answer[0].outputs[0].weight_versions] == [3]
    transport.close()


# TorchRL's interface


def test_a_scheme_sends_the_adapter_alone(service: AsyncVLLM, fakes: list[FakeEngine], tmp_path: Path) -> None:
    model = peft_model()
    scheme = VLLMWeightSyncScheme(service=service, adapter="policy", folder=tmp_path)
    sender = scheme.create_sender()
    sender.register_model(model)
    assert sender.update_weights().transport == "adapter"
    assert sender.update_weights(model).version == 2
    assert fakes[0].staged == []
    assert versions(service, None) == [2]
    with pytest.raises(BadInputError, match="the PeftModel itself, got a dict"):
        sender.update_weights(dict(model.state_dict()))
    with pytest.raises(BadInputError, match="holds 0"):
        sender.register_model(llama(tied=False))
    sender.shutdown()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"transport": "broadcast", "adapter": "policy"}, "use transport='shared_storage'"),
        ({"adapter": "@base"}, "got '@base'"),
        ({"adapter": "policy", "config": RefitConfig(in_flight=InFlight.WAIT)}, "is for whole weights"),
    ],
    ids=str,
)
def test_a_scheme_refuses_what_an_adapter_has_no_use_for(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VLLMWeightSyncScheme(**settings)  # type: ignore[arg-type]


def test_a_collector_uses_the_scheme_unchanged(service: AsyncVLLM, fakes: list[FakeEngine]) -> None:
    from torchrl.collectors import Collector
    from torchrl.testing.mocking_classes import ContinuousActionVecMockEnv

    scheme = VLLMWeightSyncScheme(service=service, adapter="policy")
    scheme.register_model(peft_model())
    collector = Collector(
        ContinuousActionVecMockEnv(),
        None,
        frames_per_batch=4,
        total_frames=4,
        weight_sync_schemes={"policy": scheme},
        track_policy_version=True,
    )
    # Before any rollout the service has the trainer's adapter.
    assert service.adapter_state().trained == {"policy": 1}
    collector.update_policy_weights_()
    assert service.adapter_state().trained == {"policy": 2}
    assert fakes[0].staged == []
    collector.shutdown()

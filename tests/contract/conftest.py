"""One service per implementation, alive while its tests run: the fake one, vLLM in this process, and vLLM on Ray."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rl_vllm import AsyncVLLM, EngineConfig, ServiceConfig
from rl_vllm.errors import ServiceNotRunningError
from rl_vllm.testing import FakeEngine, FakeExecutor
from rl_vllm.types import WeightUpdate
from tests.contract.subjects import PROMPTS, ModelTruth, StatedTruth, Subject, held

MAX_MODEL_LEN = 1024
ADAPTER = "poet"
REAL = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture(
    scope="package", params=["fake", pytest.param("local", marks=REAL), pytest.param("ray", marks=REAL)], autouse=True
)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """What a test is run on, with three vLLM engines in all: one in this process and two on Ray."""
    if request.param == "fake":
        running = fake()
    else:
        checkpoint = request.getfixturevalue("tiny_qwen3_tied")
        running = real(request.param, checkpoint, tmp_path_factory.mktemp("contract"))
    with running as subject:
        yield subject
        # The last of its tests, after which there is no service; the end of the block finds nothing to do.
        subject.service.shutdown()
        subject.service.shutdown()
        with pytest.raises(ServiceNotRunningError, match="shut down"):
            subject.service.generate([PROMPTS[0]], use_tqdm=False)


@contextmanager
def fake() -> Iterator[Subject]:
    engines = [FakeEngine(index) for index in range(2)]
    config = ServiceConfig(engine=EngineConfig(model="fake"), num_replicas=2)

    def update(version: int, trained: bool) -> WeightUpdate:
        return WeightUpdate(version=version, transport="none", payload={"trained": trained}, num_tensors=1, num_bytes=4)

    with AsyncVLLM(config, executor=FakeExecutor(engines)) as service:
        yield Subject(
            name="fake",
            service=service,
            truth=StatedTruth(),
            trained=StatedTruth(),
            update=update,
            # Of a version that is served already.
            broken_update=lambda _version: update(0, False),
            adapter=Path("/any/folder"),
            # The rule adds 17 for each letter of the adapter's name.
            adapter_truth=StatedTruth(shift=17 * len(ADAPTER)),
            holding=lambda: held(engines),
        )


@contextmanager
def real(executor: str, checkpoint: Path, folder: Path) -> Iterator[Subject]:
    from rl_vllm.weights.shared_storage import SharedStorageTransport
    from rl_vllm.weights.source import ModuleSource
    from tests.integration.truth import load_trainer, train_a_bit

    base, trained = load_trainer(checkpoint), load_trainer(checkpoint)
    train_a_bit(trained, seed=1)
    transport = SharedStorageTransport(folder / "weights", keep_versions=2)

    def update(version: int, is_trained: bool) -> WeightUpdate:
        return transport.stage(ModuleSource(trained if is_trained else base), version, timeout_s=60)

    def broken_update(version: int) -> WeightUpdate:
        whole = update(version, True)
        transport.discard(whole)
        return whole

    # With adapters on one of the two, so that both kinds of engine are seen.
    adapter = make_adapter(checkpoint, folder / "adapter") if executor == "local" else None
    engine = EngineConfig(
        model=str(checkpoint),
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        cpu_kv_cache_gib=0.25,
        engine_kwargs={"enable_lora": True, "max_lora_rank": 8} if adapter is not None else {},
    )
    try:
        with AsyncVLLM.launch(engine, num_replicas=1 if executor == "local" else 2, executor=executor) as service:
            yield Subject(
                name=executor,
                service=service,
                truth=ModelTruth(base),
                trained=ModelTruth(trained),
                update=update,
                broken_update=broken_update,
                adapter=adapter,
                adapter_truth=None if adapter is None else adapter_truth(checkpoint, adapter),
            )
    finally:
        transport.close()


def make_adapter(checkpoint: Path, folder: Path) -> Path:
    """A random LoRA that changes every logit."""
    import torch
    from peft import LoraConfig, get_peft_model

    from tests.integration.truth import load_trainer

    torch.manual_seed(0)
    model = get_peft_model(
        load_trainer(checkpoint), LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "o_proj"])
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def adapter_truth(checkpoint: Path, folder: Path) -> ModelTruth:
    from peft import PeftModel

    from tests.integration.truth import load_trainer

    return ModelTruth(PeftModel.from_pretrained(load_trainer(checkpoint), folder).eval())

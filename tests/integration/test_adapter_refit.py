"""Adapter refits on real engines, beside PEFT's own model."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from rl_vllm import AsyncVLLM, EngineConfig, RefitConfig, SamplingConfig
from rl_vllm.errors import AdapterMismatchError
from rl_vllm.types import BASE_MODEL, CompletionBatch, KVCache, PromptBatch, Verify
from rl_vllm.weights import ModuleSource, SharedStorageTransport, refit, refit_adapter
from tests.integration.truth import load_trainer, response_logprobs, train_a_bit

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

TOLERANCE_NATS = 1e-4
NUM_REPLICAS = 2
LONG = 440
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LIMITS = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 3, "max_lora_rank": 8}
SAMPLING = SamplingConfig(max_tokens=8, ignore_eos=True, seed=1)
ROWS = [[5 + (row * 7 + place * 3) % 200 for place in range(30 + row)] for row in range(4)]


@pytest.fixture(scope="module")
def service(tiny_qwen3_untied: Path) -> Iterator[AsyncVLLM]:
    """Two replicas that take adapters."""
    config = EngineConfig(
        model=str(tiny_qwen3_untied), dtype="float32", max_model_len=512, cpu_kv_cache_gib=0.25, engine_kwargs=LIMITS
    )
    with AsyncVLLM.launch(config, num_replicas=NUM_REPLICAS) as running:
        yield running


@pytest.fixture
def trainer(tiny_qwen3_untied: Path) -> PeftModel:
    return get_peft_model(
        load_trainer(tiny_qwen3_untied), LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS)
    ).eval()


@pytest.fixture(autouse=True)
def untrained(service: AsyncVLLM) -> Iterator[None]:
    """Every test leaves the service without a trained adapter."""
    yield
    service.remove_lora("policy")


def step(model: PeftModel, seed: int) -> None:
    """Move the adapter far enough that an old one left behind costs more than any tolerance."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


def answers(service: AsyncVLLM, replica: int, lora: str | None = None) -> CompletionBatch:
    prompts = replace(PromptBatch.from_rows(ROWS), loras=(lora,) * len(ROWS))
    return service.generate_batch(prompts, SAMPLING, actor_index=replica)


def worst_error(model: torch.nn.Module, batch: CompletionBatch) -> float:
    """Largest difference between the service's logprobs and the model's."""
    worst = 0.0
    for index, row in enumerate(ROWS):
        expected = response_logprobs(model, row, batch.tokens(index).tolist())
        worst = max(worst, float((torch.tensor(batch.logprobs(index)) - expected).abs().max()))
    return worst


def labels(batch: CompletionBatch) -> set[int]:
    return set(batch.versions_T.tolist())


def test_after_each_of_three_refits_every_replica_answers_as_the_peft_model_does(
    service: AsyncVLLM, trainer: PeftModel, tiny_qwen3_untied: Path
) -> None:
    base, previous = load_trainer(tiny_qwen3_untied), load_trainer(tiny_qwen3_untied)
    for seed in (1, 2, 3):
        step(trainer, seed)
        receipt = refit_adapter(service, trainer)
        assert receipt.kv is KVCache.SEPARATE
        assert receipt.num_replicas == NUM_REPLICAS
        assert receipt.checksum
        for replica in range(NUM_REPLICAS):
            batch = answers(service, replica)
            assert worst_error(trainer, batch) < TOLERANCE_NATS
            assert labels(batch) == {receipt.version}
            # The test can fail: no older adapter explains them.
            assert worst_error(previous, batch) > 100 * TOLERANCE_NATS
            # The same prompts find no KV of another adapter, nor of none.
            assert worst_error(base, answers(service, replica, BASE_MODEL)) < TOLERANCE_NATS
        previous = copy.deepcopy(trainer)


def test_requests_in_flight_finish_under_their_old_adapter(service: AsyncVLLM, trainer: PeftModel) -> None:
    step(trainer, 4)
    first = refit_adapter(service, trainer)
    old = copy.deepcopy(trainer)
    # Long enough to be at work when the refit ends: looked at below.
    long = replace(SAMPLING, max_tokens=LONG)
    streams = [service.stream_generate(ROWS[replica], long, actor_index=replica) for replica in range(NUM_REPLICAS)]
    begun = [next(iter(stream)) for stream in streams]
    step(trainer, 5)
    second = refit_adapter(service, trainer)
    assert f"policy@v{first.version}" in [adapter.name for adapter in service.list_loras()]
    for replica in range(NUM_REPLICAS):
        batch = answers(service, replica)
        assert worst_error(trainer, batch) < TOLERANCE_NATS
        assert labels(batch) == {second.version}
    for row, beginning, stream in zip(ROWS, begun, streams, strict=False):
        pieces = [beginning, *stream]
        tokens = [token for piece in pieces for token in piece.outputs[0].token_ids]
        found = [score for piece in pieces for score in logprobs_of(piece.outputs[0])]
        assert len(tokens) == LONG
        assert {span.version for piece in pieces for span in piece.outputs[0].weight_versions} == {first.version}
        expected = response_logprobs(old, row, tokens)
        assert float((torch.tensor(found) - expected).abs().max()) < TOLERANCE_NATS


def logprobs_of(sample: object) -> Sequence[float]:
    """Of each token that was sampled."""
    scores = sample.logprobs  # type: ignore[attr-defined]
    assert scores is not None, "ask for them"
    return [each[token].logprob for token, each in zip(sample.token_ids, scores, strict=True)]  # type: ignore[attr-defined]


def test_logprobs_prove_an_adapter_and_a_base_refit_below_it(
    service: AsyncVLLM, trainer: PeftModel, tiny_qwen3_untied: Path
) -> None:
    step(trainer, 6)
    proof = RefitConfig(verify=Verify.LOGPROBS)
    receipt = refit_adapter(service, trainer, config=proof)
    assert receipt.logprob_max_difference is not None
    assert receipt.logprob_max_difference < TOLERANCE_NATS
    transport = SharedStorageTransport()
    try:
        base = load_trainer(tiny_qwen3_untied)
        train_a_bit(base, 7)
        committed = refit(service, ModuleSource(base), transport, config=proof)
        adapted = get_peft_model(copy.deepcopy(base), LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS)).eval()
        step(adapted, 6)
        for replica in range(NUM_REPLICAS):
            batch = answers(service, replica)
            assert worst_error(adapted, batch) < TOLERANCE_NATS
            assert labels(batch) == {committed.version}
    finally:
        refit(service, ModuleSource(load_trainer(tiny_qwen3_untied)), transport)
        transport.close()


def test_an_adapter_that_does_not_fit_is_refused_and_the_old_one_answers(
    service: AsyncVLLM, trainer: PeftModel, tiny_qwen3_untied: Path
) -> None:
    step(trainer, 8)
    receipt = refit_adapter(service, trainer)
    wide = get_peft_model(load_trainer(tiny_qwen3_untied), LoraConfig(r=16, target_modules=["q_proj"]))
    with pytest.raises(AdapterMismatchError, match="rank 16 is above the engines' max_lora_rank=8"):
        refit_adapter(service, wide)
    batch = answers(service, 0)
    assert worst_error(trainer, batch) < TOLERANCE_NATS
    assert labels(batch) == {receipt.version}

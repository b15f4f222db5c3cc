"""Trainer to policy: refits through the scheme on two replicas, against the trainer's own model."""

from __future__ import annotations

import copy
import threading
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torchrl.modules.llm.policies import Tokens

from rl_vllm import AsyncVLLM, SamplingConfig, VLLMPolicy, VLLMWeightSyncScheme
from rl_vllm.errors import RefitError, WeightsMismatchError
from rl_vllm.types import PromptBatch
from tests.integration.truth import load_trainer, response_logprobs, train_a_bit

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

PROMPTS = torch.tensor([[7, 3, 300, 41, row] for row in range(8)])
TOLERANCE_NATS = 1e-4

on_each_transport = pytest.mark.parametrize("transport", ["shared_storage", "broadcast", "object_store"])


def worst_error(policy: VLLMPolicy, model: torch.nn.Module, version: int) -> float:
    """Largest difference between the policy's response logprobs and the model's; checks the version labels."""
    prompts = Tokens(prompt=PROMPTS, padded=True, batch_size=[8])
    result = policy(TensorDict({"tokens": prompts}, batch_size=[8]))
    mask = result["masks", "all_assistant_mask"]
    assert result["policy_version"][mask].unique().tolist() == [version]
    worst = 0.0
    for row in range(8):
        response = result["tokens", "full"][row][mask[row]].tolist()
        ours = result["log_probs", "full"][row][mask[row]]
        theirs = response_logprobs(model, PROMPTS[row].tolist(), response)
        worst = max(worst, float((ours - theirs).abs().max()))
    return worst


@on_each_transport
def test_policy_logprobs_follow_the_trainer_through_three_refits(
    service: AsyncVLLM, tiny_qwen3_tied: Path, transport: str
) -> None:
    model = load_trainer(tiny_qwen3_tied)
    policy = VLLMPolicy(service, input_mode="tokens", sampling=SamplingConfig(max_tokens=24, ignore_eos=True))
    scheme = VLLMWeightSyncScheme(transport=transport, service=service)
    sender = scheme.create_sender()
    sender.register_model(model)
    try:
        for seed in range(4):
            receipt = sender.update_weights()
            assert receipt.num_replicas == 2
            assert receipt.transport == transport
            assert receipt.version == service.weight_version
            assert receipt.num_rpcs <= 3
            assert worst_error(policy, model, receipt.version) < TOLERANCE_NATS
            train_a_bit(model, seed)
        # The test can fail: the last change has not been sent.
        assert worst_error(policy, model, service.weight_version) > 100 * TOLERANCE_NATS
    finally:
        scheme.shutdown()


@on_each_transport
def test_tokens_in_flight_across_a_refit_are_explained_by_their_labels(
    service: AsyncVLLM, tiny_qwen3_tied: Path, transport: str
) -> None:
    old = load_trainer(tiny_qwen3_tied)
    new = copy.deepcopy(old)
    train_a_bit(new, 7)
    scheme = VLLMWeightSyncScheme(transport=transport, service=service)
    sender = scheme.create_sender()
    try:
        before = sender.update_weights(old).version
        rows = [[7, 3, 300, 41, row] for row in range(8)]
        results = []
        sampling = SamplingConfig(max_tokens=450, ignore_eos=True)
        generating = threading.Thread(
            target=lambda: results.append(service.generate_batch(PromptBatch.from_rows(rows), sampling))
        )
        made = sum(m.generated_tokens for m in service.metrics() if m is not None)
        generating.start()
        while sum(m.generated_tokens for m in service.metrics() if m is not None) < made + 100:
            assert generating.is_alive()
        after = sender.update_weights(new).version
        generating.join(120)
    finally:
        scheme.shutdown()
    batch = results[0]
    mixed = 0
    for index in range(8):
        tokens, versions = batch.tokens(index).tolist(), batch.versions(index)
        assert set(versions.tolist()) <= {before, after}
        mixed += len(batch.spans(index)) == 2
        for version, model in ((before, old), (after, new)):
            expected = response_logprobs(model, rows[index], tokens)
            labelled = torch.tensor(versions == version)
            error = (torch.tensor(batch.logprobs(index)) - expected)[labelled].abs()
            assert error.numel() == 0 or float(error.max()) < TOLERANCE_NATS
    assert mixed == 8


def test_a_model_of_another_shape_is_refused_before_a_byte_moves(service: AsyncVLLM, tiny_llama: Path) -> None:
    version = service.weight_version
    scheme = VLLMWeightSyncScheme(transport="shared_storage", service=service)
    try:
        with pytest.raises(WeightsMismatchError):
            scheme.create_sender().update_weights(load_trainer(tiny_llama))
    finally:
        scheme.shutdown()
    assert service.weight_version == version


def test_nan_weights_are_refused_and_the_old_ones_serve(service: AsyncVLLM, tiny_qwen3_tied: Path) -> None:
    model = load_trainer(tiny_qwen3_tied)
    scheme = VLLMWeightSyncScheme(transport="shared_storage", service=service)
    sender = scheme.create_sender()
    policy = VLLMPolicy(service, input_mode="tokens", sampling=SamplingConfig(max_tokens=8, ignore_eos=True))
    try:
        version = sender.update_weights(model).version
        broken = copy.deepcopy(model)
        with torch.no_grad():
            broken.model.norm.weight[3] = torch.nan
        with pytest.raises(RefitError, match=r"model\.norm\.weight"):
            sender.update_weights(broken)
    finally:
        scheme.shutdown()
    assert worst_error(policy, model, version) < TOLERANCE_NATS

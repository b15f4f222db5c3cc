"""Weights through Ray's object store: three refits on two replicas, and a replica that is killed catches up."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from rl_vllm import AsyncVLLM, SamplingConfig, VLLMWeightSyncScheme
from rl_vllm.protocols.private_folder import MEMORY_FOLDER
from rl_vllm.types import PromptBatch, WeightReceiver
from rl_vllm.weights import ObjectStoreTransport
from tests.integration.truth import load_trainer, response_logprobs, train_a_bit

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

ROWS = [[7, 3, 300, 41, row] for row in range(4)]
SAMPLING = SamplingConfig(max_tokens=24, ignore_eos=True)
TOLERANCE_NATS = 1e-4
# Small against the tiny model, so that a version has several.
SHARD_BYTES = 64 << 10
RESTARTED_WITHIN_S = 240.0
# Whoever else lands weights on this machine meanwhile removes them soon.
GONE_WITHIN_S = 30.0


def worst_errors(service: AsyncVLLM, model: torch.nn.Module, version: int) -> list[float]:
    """Of each replica, the largest difference of its logprobs from the model's; checks the version labels."""
    errors = []
    for receiver in service.weight_receivers():
        batch = service.generate_batch(PromptBatch.from_rows(ROWS), SAMPLING, actor_index=receiver.replica)
        assert set(batch.versions_T.tolist()) == {version}
        worst = 0.0
        for index, row in enumerate(ROWS):
            expected = response_logprobs(model, row, batch.tokens(index).tolist())
            worst = max(worst, float((torch.tensor(batch.logprobs(index)) - expected).abs().max()))
        errors.append(worst)
    return errors


def landed_folders() -> set[Path]:
    return {path for parent in (MEMORY_FOLDER, Path(tempfile.gettempdir())) for path in parent.glob("rl_vllm-landed-*")}


def engine_cores() -> list[int]:
    """Processes of this session's engines in which the model runs."""
    family = psutil.Process().children(recursive=True)
    return sorted(process.pid for process in family if process.name().startswith("VLLM::EngineCore"))


def wait_for(condition: Callable[[], bool], within_s: float, what: str) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {within_s} s for {what}"
        time.sleep(0.05)


@pytest.fixture(autouse=True)
def no_landed_folder_stays() -> Iterator[None]:
    before = landed_folders()
    yield
    wait_for(lambda: landed_folders() <= before, GONE_WITHIN_S, "the folders of landed weights to go")


@pytest.mark.slow
def test_three_refits_and_a_restart_follow_the_trainer(service: AsyncVLLM, tiny_qwen3_tied: Path) -> None:
    model = load_trainer(tiny_qwen3_tied)
    transport = ObjectStoreTransport(shard_bytes=SHARD_BYTES)
    scheme = VLLMWeightSyncScheme(transport, service=service)
    sender = scheme.create_sender()
    sender.register_model(model)
    try:
        versions = []
        for seed in range(3):
            train_a_bit(model, seed)
            # The test can fail: the last change has not been sent.
            assert min(worst_errors(service, model, service.weight_version)) > 100 * TOLERANCE_NATS
            receipt = sender.update_weights()
            assert (receipt.transport, receipt.num_replicas) == ("object_store", 2)
            assert receipt.num_rpcs <= 3
            assert receipt.checksum
            errors = worst_errors(service, model, receipt.version)
            assert len(errors) == 2
            assert max(errors) < TOLERANCE_NATS
            versions.append(receipt.version)
        assert transport.versions == tuple(versions[-2:])

        restarts = service.stats().counters.restarts
        cores = engine_cores()
        assert len(cores) == 2
        os.kill(cores[0], signal.SIGKILL)
        wait_for(
            lambda: service.stats().counters.restarts > restarts and service.stats().num_serving == 2,
            RESTARTED_WITHIN_S,
            "both replicas to serve again",
        )
        errors = worst_errors(service, model, versions[-1])
        assert len(errors) == 2
        assert max(errors) < TOLERANCE_NATS
    finally:
        scheme.shutdown()


def test_the_name_alone_is_enough(service: AsyncVLLM, tiny_qwen3_tied: Path) -> None:
    model = load_trainer(tiny_qwen3_tied)
    scheme = VLLMWeightSyncScheme(transport="object_store", service=service)
    try:
        receipt = scheme.create_sender().update_weights(model)
        assert receipt.transport == "object_store"
        assert max(worst_errors(service, model, receipt.version)) < TOLERANCE_NATS
    finally:
        scheme.shutdown()


def test_auto_sees_that_all_replicas_are_on_this_machine(service: AsyncVLLM, tiny_qwen3_tied: Path) -> None:
    receivers = service.weight_receivers()
    assert [(receiver.num_workers, receiver.hosts) for receiver in receivers] == [(1, (WeightReceiver.THIS_HOST,))] * 2
    model = load_trainer(tiny_qwen3_tied)
    scheme = VLLMWeightSyncScheme(transport="auto", service=service)
    try:
        receipt = scheme.create_sender().update_weights(model)
        choice = scheme.transport_choice
        assert choice is not None
        assert receipt.transport == choice.name == "shared_storage"
        assert max(worst_errors(service, model, receipt.version)) < TOLERANCE_NATS
    finally:
        scheme.shutdown()

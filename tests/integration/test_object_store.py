"""Weights through Ray's object store: three refits on two replicas, and a replica that is killed catches up."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_vllm import AsyncVLLM, VLLMWeightSyncScheme
from rl_vllm.protocols.private_folder import MEMORY_FOLDER
from rl_vllm.types import WeightReceiver
from rl_vllm.weights import ObjectStoreTransport
from tests.integration.refit_checks import engine_cores, errors_by_replica, wait_for
from tests.integration.truth import load_trainer, train_a_bit

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

TOLERANCE_NATS = 1e-4
# Small against the tiny model, so that a version has several.
SHARD_BYTES = 64 << 10
RESTARTED_WITHIN_S = 240.0
# Whoever else lands weights on this machine meanwhile removes them soon.
GONE_WITHIN_S = 30.0


def landed_folders() -> set[Path]:
    return {path for parent in (MEMORY_FOLDER, Path(tempfile.gettempdir())) for path in parent.glob("rl_vllm-landed-*")}


@pytest.fixture(autouse=True)
def no_landed_folder_stays() -> Iterator[None]:
    before = landed_folders()
    yield
    wait_for(lambda: landed_folders() <= before, "the folders of landed weights to go", GONE_WITHIN_S)


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
            assert min(errors_by_replica(service, {service.weight_version: model})) > 100 * TOLERANCE_NATS
            receipt = sender.update_weights()
            assert (receipt.transport, receipt.num_replicas) == ("object_store", 2)
            assert receipt.num_rpcs <= 3
            assert receipt.checksum
            errors = errors_by_replica(service, {receipt.version: model})
            assert len(errors) == 2
            assert max(errors) < TOLERANCE_NATS
            versions.append(receipt.version)
        assert transport.versions == tuple(versions[-2:])

        restarts = service.stats().counters.restarts
        cores = engine_cores()
        assert len(cores) == 2
        cores[0].kill()
        wait_for(
            lambda: service.stats().counters.restarts > restarts and service.stats().num_serving == 2,
            "both replicas to serve again",
            RESTARTED_WITHIN_S,
        )
        errors = errors_by_replica(service, {versions[-1]: model})
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
        assert max(errors_by_replica(service, {receipt.version: model})) < TOLERANCE_NATS
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
        assert max(errors_by_replica(service, {receipt.version: model})) < TOLERANCE_NATS
    finally:
        scheme.shutdown()

"""One engine is killed and another hangs in the middle of a batch: every sequence comes back, once, and so do they."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from rl_vllm import AsyncVLLM, EngineConfig, SamplingConfig, VLLMWeightSyncScheme
from rl_vllm.config import HealthConfig, ServiceConfig
from rl_vllm.service.observe.stats import ServiceStats
from rl_vllm.types import CompletionBatch, FinishReason, PromptBatch
from tests.integration.truth import load_trainer, response_logprobs, train_a_bit

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

NUM_REQUESTS, NUM_SAMPLES, NUM_TOKENS = 200, 2, 128
PROMPTS = [[7, 3, 300, 41, row] for row in range(NUM_REQUESTS)]
SAMPLING = SamplingConfig(n=NUM_SAMPLES, max_tokens=NUM_TOKENS, ignore_eos=True)
TOLERANCE_NATS = 1e-4
# Long against the engine's longest step, so that a slow machine is no hang.
HEALTH = HealthConfig(heartbeat_period_s=1.0, heartbeat_timeout_s=20.0, max_failures=1)


@dataclass
class Aftermath:
    """What the chaos left.

    Attributes:
        service: Still running.
        batch: The answer to all requests.
        stats: When two replicas served again.
        log: What the service logged meanwhile.
        trained: The model whose weights were installed before.
    """

    service: AsyncVLLM
    batch: CompletionBatch
    stats: ServiceStats
    log: list[str]
    trained: torch.nn.Module


class Lines(logging.Handler):
    """Keeps what is logged from every thread."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture(scope="module")
def aftermath(tiny_qwen3_tied: Path) -> Iterator[Aftermath]:
    # Few sequences at a time, so that they finish one after the other and not all in the last step.
    engine = EngineConfig(
        model=str(tiny_qwen3_tied),
        dtype="float32",
        max_model_len=512,
        cpu_kv_cache_gib=0.25,
        engine_kwargs={"max_num_seqs": 16},
    )
    config = ServiceConfig(engine=engine, num_replicas=2, health=HEALTH, shutdown_timeout_s=5.0)
    others = engine_cores()
    model = load_trainer(tiny_qwen3_tied)
    train_a_bit(model, seed=5)
    with AsyncVLLM(config) as service:
        scheme = VLLMWeightSyncScheme(transport="shared_storage", service=service)
        try:
            scheme.create_sender().update_weights(model)
            logger, lines = logging.getLogger("rl_vllm"), Lines()
            level = logger.level
            logger.setLevel(logging.INFO)
            logger.addHandler(lines)
            try:
                batch = generate_through_chaos(service, sorted(engine_cores() - others))
                wait_for(lambda: service.stats().num_serving == 2, 240, "both replicas to serve again")
                stats = service.stats()
            finally:
                logger.removeHandler(lines)
                logger.setLevel(level)
            yield Aftermath(service, batch, stats, lines.lines, model)
        finally:
            scheme.shutdown()


def generate_through_chaos(service: AsyncVLLM, cores: list[int]) -> CompletionBatch:
    """All requests, with one engine core killed at 30 % and the other stopped at 60 %."""
    killed, stopped = cores
    results: list[CompletionBatch] = []
    work = threading.Thread(
        target=lambda: results.append(service.generate_batch(PromptBatch.from_rows(PROMPTS), SAMPLING, timeout_s=400.0))
    )
    work.start()

    def answered(share: float) -> bool:
        assert work.is_alive(), "the requests were over before anything happened"
        return service.stats().counters.completed >= share * NUM_REQUESTS

    wait_for(lambda: answered(0.3), 120, "30 % of the answers")
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: answered(0.6), 120, "60 % of the answers")
    os.kill(stopped, signal.SIGSTOP)
    work.join(400)
    assert results, "the requests did not come back"
    return results[0]


def engine_cores() -> set[int]:
    """Processes of this session's engines in which the model runs."""
    family = psutil.Process().children(recursive=True)
    return {process.pid for process in family if title(process).startswith("VLLM::EngineCore")}


def title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def wait_for(condition: Callable[[], bool], within_s: float, what: str) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {within_s} s for {what}"
        time.sleep(0.02)


def test_every_sequence_comes_back_exactly_once(aftermath: Aftermath) -> None:
    batch = aftermath.batch
    assert batch.failures == ()
    assert list(zip(batch.numbers_N.tolist(), batch.samples_N.tolist(), strict=True)) == [
        (row, sample) for row in range(NUM_REQUESTS) for sample in range(NUM_SAMPLES)
    ]
    assert batch.lengths_N.tolist() == [NUM_TOKENS] * (NUM_REQUESTS * NUM_SAMPLES)
    assert set(batch.finish_N.tolist()) == {FinishReason.LENGTH}
    assert set(batch.versions_T.tolist()) == {1}
    assert np.isfinite(batch.logprobs_T).all()
    assert (batch.logprobs_T <= 0).all()


def test_logprobs_are_those_of_the_refitted_model_whoever_made_them(aftermath: Aftermath) -> None:
    batch = aftermath.batch
    for index in range(0, len(batch), 20):
        expected = response_logprobs(aftermath.trained, PROMPTS[index // NUM_SAMPLES], batch.tokens(index).tolist())
        assert float((torch.tensor(batch.logprobs(index)) - expected).abs().max()) < TOLERANCE_NATS


def test_both_replicas_serve_again_after_a_restart_each(aftermath: Aftermath) -> None:
    stats = aftermath.stats
    assert (stats.counters.deaths, stats.counters.restarts) == (2, 2)
    assert stats.counters.rerouted > 0
    assert stats.outstanding_requests == 0
    assert stats.version == 1


def test_a_restarted_replica_serves_the_refitted_weights(aftermath: Aftermath) -> None:
    for replica in aftermath.stats.replicas:
        output = aftermath.service.generate(
            [7, 3, 300], SamplingConfig(max_tokens=24, ignore_eos=True), actor_index=replica.replica, use_tqdm=False
        ).outputs[0]
        made = [output.logprobs[i][token].logprob for i, token in enumerate(output.token_ids)]
        expected = response_logprobs(aftermath.trained, [7, 3, 300], output.token_ids)
        assert float((torch.tensor(made) - expected).abs().max()) < TOLERANCE_NATS


def test_the_log_tells_the_story_in_under_ten_lines(aftermath: Aftermath) -> None:
    log = aftermath.log
    assert len(log) < 10, "\n".join(log)
    for index in (0, 1):
        story = [line for line in log if f"replica {index}" in line]
        assert re.search(r"(healthy|suspect) -> dead \(.+\)", "\n".join(story))
        assert re.search(r"restarting -> healthy \(.+ version 1\)", story[-1])
    assert any("health check" in line for line in log), "\n".join(log)

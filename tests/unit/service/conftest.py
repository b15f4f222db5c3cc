from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rl_vllm import AsyncVLLM
from rl_vllm.config import EngineConfig, ServiceConfig
from rl_vllm.service.router import warm_up
from rl_vllm.testing import FakeEngine, FakeEngineScript, FakeExecutor, FakeScript
from rl_vllm.types import CompletionBatch, PromptBatch, SamplingConfig, WeightUpdate

# Two tokens, always: the answer does not depend on which replica gives it.
TWO_TOKENS = SamplingConfig(max_tokens=2, ignore_eos=True)


@pytest.fixture(scope="session", autouse=True)
def routing_is_compiled() -> None:
    """Fakes start at once: the first test must not pay for what real engines' start hides."""
    warm_up()


def engines(count: int, **script: object) -> list[FakeEngine]:
    """Fakes that share one script."""
    return [FakeEngine(index, script=FakeEngineScript(**script)) for index in range(count)]


def answering(**script: object) -> FakeEngineScript:
    """A script that departs from the default in its answers only."""
    return FakeEngineScript(answers=FakeScript(**script))


def service_config(num_replicas: int, **settings: object) -> ServiceConfig:
    return ServiceConfig(engine=EngineConfig(model="fake"), num_replicas=num_replicas, **settings)


@contextmanager
def running(*fakes: FakeEngine, **settings: object) -> Iterator[AsyncVLLM]:
    with AsyncVLLM(service_config(len(fakes), **settings), executor=FakeExecutor(fakes)) as service:
        yield service


def prompts(*rows: list[int]) -> PromptBatch:
    return PromptBatch.from_rows(rows)


def update(version: int) -> WeightUpdate:
    return WeightUpdate(version=version, transport="shared_storage", payload={}, num_tensors=1, num_bytes=4)


def first_tokens(batch: CompletionBatch) -> list[int]:
    return [int(batch.tokens(index)[0]) for index in range(len(batch))]

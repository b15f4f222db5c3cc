"""One running service for all tests of this folder: starting engines is what costs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_vllm import AsyncVLLM, EngineConfig

MAX_MODEL_LEN = 512


@pytest.fixture(scope="session")
def service(tiny_qwen3_tied: Path) -> Iterator[AsyncVLLM]:
    """Two replicas of a tiny Qwen3 with tied head, in float32, on Ray."""
    config = EngineConfig(
        model=str(tiny_qwen3_tied), dtype="float32", max_model_len=MAX_MODEL_LEN, cpu_kv_cache_gib=0.25
    )
    with AsyncVLLM.launch(config, num_replicas=2) as running:
        yield running

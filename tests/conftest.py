"""What every test session needs: no network, no telemetry, nothing left behind, and small models."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.leaks import Snapshot

# Before any test module imports the libraries that read them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Engines and Ray's own processes need a moment to end after they were told to.
LEFTOVERS_END_WITHIN_S = 20.0


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fail the session when an engine, a Ray process, a shared-memory file or a listening port of it remains."""
    snapshot = Snapshot.take()
    with snapshot.watching():
        yield
    leftovers = snapshot.leftovers(within_s=LEFTOVERS_END_WITHIN_S)
    assert not leftovers, "the tests left behind:\n" + "\n".join(leftovers)


def _tiny(tmp_path_factory: pytest.TempPathFactory, family: str, *, tied: bool) -> Path:
    # Imported here so that tests without a model do not wait for transformers.
    from rl_vllm.testing.models import build_tiny_model

    return build_tiny_model(tmp_path_factory.mktemp("models") / family, family, tied=tied)


@pytest.fixture(scope="session")
def tiny_qwen3_tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of a random two-layer Qwen3 whose output head is its embedding, with a tokenizer."""
    return _tiny(tmp_path_factory, "qwen3", tied=True)


@pytest.fixture(scope="session")
def tiny_qwen3_untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of a random two-layer Qwen3 with its own output head, with a tokenizer."""
    return _tiny(tmp_path_factory, "qwen3", tied=False)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of a random two-layer Llama with its own output head, with a tokenizer."""
    return _tiny(tmp_path_factory, "llama", tied=False)

"""Engines of several workers on CPUs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.integration.facts import found_by

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.slow]

TOLERANCE_NATS = 1e-4
RUN_TIMEOUT_S = 280.0


def serve(model: Path, *arguments: str) -> dict[str, Any]:
    """What the script found; see there."""
    return found_by("tensor_parallel_script", str(model), *arguments, timeout_s=RUN_TIMEOUT_S)


@pytest.fixture(scope="module")
def on_ray(tiny_qwen3_tied: Path) -> dict[str, Any]:
    """One life of a replica with two workers: started, refitted, killed, cleaned up."""
    return serve(tiny_qwen3_tied, "ray", "refit", "kill")


def test_each_worker_computes_on_a_core_of_its_lease(on_ray: dict[str, Any]) -> None:
    assert [len(cores) for cores in on_ray["cores"]] == [1, 1]
    assert {core for cores in on_ray["cores"] for core in cores} <= os.sched_getaffinity(0)


def test_two_workers_answer_as_the_whole_model_does(on_ray: dict[str, Any]) -> None:
    assert on_ray["error"] < TOLERANCE_NATS
    # The test can fail: a model trained a little further does not explain the answers.
    assert on_ray["wrong_model_error"] > 100 * TOLERANCE_NATS


def test_a_refit_in_flight_reaches_both_workers_between_two_tokens(on_ray: dict[str, Any]) -> None:
    assert on_ray["refit"]["spans"] == [2] * 8
    assert on_ray["refit"]["error"] < TOLERANCE_NATS


def test_a_killed_worker_ends_its_requests_and_leaves_nothing(on_ray: dict[str, Any]) -> None:
    # It stays dead here, so nobody serves: a kind of EngineDiedError.
    assert on_ray["death"] in ("EngineDiedError", "NoReplicaServesError")
    assert on_ray["segments"] > 0
    assert on_ray["alive"] == []
    assert on_ray["segments_left"] == []


def test_two_workers_share_the_only_core_that_they_may_use(tiny_qwen3_tied: Path) -> None:
    core = min(os.sched_getaffinity(0))
    found = serve(tiny_qwen3_tied, "local", "one-core")
    assert found["cores"] == [[core], [core]]
    assert found["error"] < TOLERANCE_NATS

"""Refits of real engines that go wrong: who is named, what is served afterwards, and that the next refit takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.facts import found_by

# The kinds of fault are in the unit tests too, and a death under load in test_chaos.py.
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

TOLERANCE_NATS = 1e-4
RUN_TIMEOUT_S = 880.0
# What a fault's report may need beyond the refit's own limit: the other replicas' answers, and the trainer's way out.
GRACE_S = 10.0

# Phase, replicas, and words of the error.
EXPECTED = {
    "nan": ("check", [], "model.norm.weight holds NaN"),
    "nan in a broadcast": ("check", [], "model.norm.weight holds NaN"),
    "torn shard": ("stage", [0, 1], "torn"),
    "full disk": ("stage", [], "is full"),
    "another shape for one replica": ("stage", [1], "tensors are not the model's"),
    "trainer fails": ("RuntimeError", [], "the trainer fell over"),
    "late reader": ("stage", [1], "waiting for replica 1"),
    "late receiver": ("stage", [1], "replica 1, worker 0 did not come"),
    # The other replica fails too unless it had its last byte before the trainer stopped; the death is the reason.
    "killed while staging": ("stage", [1], "replica 1 died"),
    "killed while committing": ("commit", [1], "replica 1 died"),
}
KILLED = ("killed while staging", "killed while committing")


@pytest.fixture(scope="module")
def found(tiny_qwen3_tied: Path) -> dict[str, Any]:
    """What the script found; see there."""
    return found_by("refit_faults_script", str(tiny_qwen3_tied), timeout_s=RUN_TIMEOUT_S)


@pytest.mark.parametrize("fault", EXPECTED)
def test_the_error_names_the_culprit_in_time(found: dict[str, Any], fault: str) -> None:
    outcome = found[fault]
    phase, replicas, words = EXPECTED[fault]
    assert outcome["error"] is not None
    assert outcome["error"]["phase"] == phase
    if fault not in KILLED or outcome["error"]["replicas"] != [0, 1]:
        assert outcome["error"]["replicas"] == replicas
    assert words in outcome["error"]["reason"]
    assert outcome["seconds"] < outcome["limit_s"] + GRACE_S


@pytest.mark.parametrize("fault", EXPECTED)
def test_no_replica_serves_a_mixture_and_the_next_refit_reaches_both(found: dict[str, Any], fault: str) -> None:
    outcome = found[fault]
    # None stands for a replica that serves nothing, which it must not do for a fault before the commit.
    served = [error for error in outcome["after"] if error is not None]
    if fault == "killed while committing":
        # Replica 0 serves the new weights or, when it had only some of them, nothing.
        assert len(served) == 2 - len(outcome["error"]["replicas"])
    else:
        assert len(served) == (1 if fault in KILLED else 2)
    assert all(error < TOLERANCE_NATS for error in served)
    assert outcome["next"]["replicas"] == 2
    assert max(outcome["next"]["errors"]) < TOLERANCE_NATS

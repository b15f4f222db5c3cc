"""Fifty refits in a row while requests run: nothing grows, and the last one is as exact as the first."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.facts import found_by

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

TRANSPORTS = ("shared_storage", "broadcast", "object_store")
RUN_TIMEOUT_S = 880.0
TOLERANCE_NATS = 1e-4
# An allocator's own ups and downs, most of them while the trainer's model scores; the forty refits between would keep
# 1700 MB if each kept its version.
ALLOWED_BYTES = 400 << 20


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What the script found; see there."""
    return found_by("many_refits_script", *TRANSPORTS, timeout_s=RUN_TIMEOUT_S)


def grown(facts: dict[str, Any], what: str) -> dict[str, int]:
    before, after = facts["before"][what], facts["after"][what]
    return {process: after[process] - old for process, old in before.items()}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nothing_drifts(found: dict[str, Any], transport: str) -> None:
    facts = found[transport]
    assert len(facts["errors"]) == 6
    assert max(facts["errors"]) < TOLERANCE_NATS
    assert facts["is_double_buffered"]
    assert max(grown(facts, "memory").values()) < ALLOWED_BYTES, grown(facts, "memory")
    assert max(grown(facts, "handles").values()) <= 2, grown(facts, "handles")
    assert max(grown(facts, "threads").values()) <= 4, grown(facts, "threads")
    assert facts["after"]["segments"] <= facts["before"]["segments"]

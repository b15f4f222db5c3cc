"""Every transport, model family, tensor-parallel size and commit mode, against the trainer's own model.

The cells marked slow complete the matrix; the others meet every pair of two factors' values once at least.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.integration.facts import found_by

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

TOLERANCE_NATS = 1e-4
RUN_TIMEOUT_S = 1100.0
REFITS = 3

TRANSPORTS = ("shared_storage", "broadcast", "object_store")
MODELS = ("qwen3-tied", "llama-untied", "qwen3_moe-untied")
WORKERS = (1, 2)
MODES = ("keep", "wait", "abort")

PAIRWISE = {
    ("qwen3-tied", 1): ("shared_storage:keep", "object_store:abort"),
    ("qwen3-tied", 2): ("broadcast:wait",),
    ("llama-untied", 1): ("shared_storage:wait",),
    ("llama-untied", 2): ("broadcast:abort", "object_store:keep"),
    ("qwen3_moe-untied", 1): ("broadcast:keep", "object_store:wait"),
    ("qwen3_moe-untied", 2): ("shared_storage:abort",),
}
ENGINES = list(itertools.product(MODELS, WORKERS))
CELLS = [f"{transport}:{mode}" for transport, mode in itertools.product(TRANSPORTS, MODES)]

Facts = dict[str, Any]


def name_of(engine: tuple[str, int]) -> str:
    model, workers = engine
    return f"{model}-tp{workers}"


def run(engine: tuple[str, int], cells: list[str], folder: Path) -> Facts:
    """What the script found; see there."""
    from rl_vllm.testing.models import build_tiny_model

    model, workers = engine
    family, head = model.split("-")
    path = build_tiny_model(folder, family, tied=head == "tied")  # type: ignore[arg-type]
    return found_by("refit_matrix_script", str(path), str(workers), *cells, timeout_s=RUN_TIMEOUT_S)


def check(facts: Facts, cells: list[str], num_replicas: int) -> None:
    assert max(facts["before"]) < TOLERANCE_NATS
    for cell in cells:
        found, mode = facts[cell], cell.split(":")[1]
        assert len(found["errors"]) == REFITS, cell
        for errors in found["errors"]:
            assert len(errors) == num_replicas
            assert max(errors) < TOLERANCE_NATS, cell
        # Labels that name another model than the one that made a token would show here by nats.
        assert max(found["in_flight_errors"]) < TOLERANCE_NATS, cell
        assert max(found["rpcs"]) <= 3
        assert found["finish"] == (["ABORT"] if mode == "abort" else ["LENGTH"]), cell
        # Kept requests go on under the new weights; others end under the old ones.
        assert found["spans"] == [[2] if mode == "keep" else [1]] * REFITS * num_replicas, cell
    proof = facts["proof"]
    assert len(proof["proven"]) == 2
    assert max(proof["proven"]) < TOLERANCE_NATS
    assert max(proof["errors"]) < TOLERANCE_NATS
    assert proof["refused"] == ["verify", *range(num_replicas)]
    assert min(facts["wrong"]) > 100 * TOLERANCE_NATS


@pytest.mark.parametrize("engine", ENGINES, ids=name_of)
def test_pairwise(engine: tuple[str, int], tmp_path: Path) -> None:
    cells = list(PAIRWISE[engine])
    check(run(engine, cells, tmp_path / "model"), cells, num_replicas=2 if engine[1] == 1 else 1)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES, ids=name_of)
def test_the_rest(engine: tuple[str, int], tmp_path: Path) -> None:
    cells = [cell for cell in CELLS if cell not in PAIRWISE[engine]]
    check(run(engine, cells, tmp_path / "model"), cells, num_replicas=2 if engine[1] == 1 else 1)


def test_the_pairwise_cells_meet_every_pair() -> None:
    chosen = {(*engine, *cell.split(":")) for engine, cells in PAIRWISE.items() for cell in cells}
    factors = (MODELS, WORKERS, TRANSPORTS, MODES)
    for one, other in itertools.combinations(range(4), 2):
        met = {(cell[one], cell[other]) for cell in chosen}
        assert met == set(itertools.product(factors[one], factors[other]))

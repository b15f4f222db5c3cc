"""When a worker loads into a second set of parameters, and what becomes of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from rl_vllm.engine import transfer
from rl_vllm.engine.transfer import RefitTransferEngine, RefitUpdateInfo
from rl_vllm.types import TensorSpec, WeightUpdate
from tests.unit.engine.toy_model import Model, X, answer, weights

LIMIT_S = 60.0
MODEL_BYTES = 4 * (16 + 4 + 4)


class Weights:
    """A reader whose bytes are here; when it is held, its last tensor waits for :attr:`go_on`."""

    checksum = "proof"

    def __init__(self, *, is_here: bool = True, is_held: bool = False) -> None:
        self.is_here = is_here
        self.is_closed = False
        self.reached, self.go_on = threading.Event(), threading.Event()
        if not is_held:
            self.go_on.set()

    def verify(self, expected: tuple[TensorSpec, ...], cancelled: threading.Event) -> None: ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, pair in enumerate(weights(3.0).items()):
            if number == 2:
                self.reached.set()
                assert self.go_on.wait(LIMIT_S)
            yield pair

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def loaded_in_place(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(transfer.reload, "load_whole_model", lambda model, _config, each: found.append(len(list(each))))
    return found


def engine_over(model: Model) -> RefitTransferEngine:
    parallel = SimpleNamespace(rank=0, data_parallel_index=0, world_size=1)
    config: Any = SimpleNamespace(
        parallel_config=parallel, model_config=None, weight_transfer_config=SimpleNamespace(backend="rl_vllm")
    )
    engine = RefitTransferEngine(None, config, torch.device("cpu"), model)
    engine._expected = ()
    return engine


def update(**changes: Any) -> WeightUpdate:
    return WeightUpdate(version=1, transport="stated", payload={}, num_tensors=3, num_bytes=MODEL_BYTES, **changes)


def stage(
    engine: RefitTransferEngine, read: Weights, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> tuple[bool, str | None]:
    monkeypatch.setitem(transfer.READERS, "stated", lambda _update, _place: read)
    engine.stage(update(**changes))
    return settled(engine)


def settled(engine: RefitTransferEngine) -> tuple[bool, str | None]:
    deadline = time.monotonic() + LIMIT_S
    while engine.stage_state() == (False, None):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return engine.stage_state()


def available(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(transfer.psutil, "virtual_memory", lambda: SimpleNamespace(available=num_bytes))


def test_weights_are_loaded_while_staging_and_swapped_by_the_commit(
    model: Model, loaded_in_place: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, read, before = engine_over(model), Weights(), model(X).clone()
    assert stage(engine, read, monkeypatch) == (True, None)
    assert read.is_closed
    assert torch.equal(model(X), before)
    engine.receive_weights(RefitUpdateInfo(1))
    assert torch.equal(model(X), torch.full((1, 4), answer(3.0)))
    assert (engine.has_swapped(), engine.loaded_checksum(), loaded_in_place) == (True, "proof", [])


@pytest.mark.parametrize(
    ("num_bytes", "workers", "choice", "swaps"),
    [
        (2 * MODEL_BYTES + 1, 1, None, True),
        (2 * MODEL_BYTES, 1, None, False),
        (6 * MODEL_BYTES + 1, 3, None, True),
        (6 * MODEL_BYTES, 3, None, False),
        (0, 1, True, True),
        (10**12, 1, False, False),
    ],
)
def test_memory_decides_unless_the_user_does(
    model: Model,
    loaded_in_place: list[float],
    monkeypatch: pytest.MonkeyPatch,
    num_bytes: int,
    workers: int,
    choice: bool | None,
    swaps: bool,
) -> None:
    available(monkeypatch, num_bytes)
    engine = engine_over(model)
    assert stage(engine, Weights(), monkeypatch, double_buffer=choice, workers_per_host=workers) == (True, None)
    engine.receive_weights(RefitUpdateInfo(1))
    assert (engine.has_swapped(), len(loaded_in_place)) == (swaps, 0 if swaps else 1)


def test_bytes_that_come_while_committing_are_loaded_in_place(
    model: Model, loaded_in_place: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_over(model)
    assert stage(engine, Weights(is_here=False), monkeypatch, double_buffer=True) == (True, None)
    engine.receive_weights(RefitUpdateInfo(1))
    assert not engine.has_swapped()
    assert loaded_in_place == [3]


def test_a_version_given_up_while_it_is_loaded_leaves_the_model_alone(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, read, before = engine_over(model), Weights(is_held=True), model(X).clone()
    monkeypatch.setitem(transfer.READERS, "stated", lambda _update, _place: read)
    engine.stage(update())
    staging = engine._staging
    assert staging is not None
    assert read.reached.wait(LIMIT_S)
    engine.discard()
    read.go_on.set()
    assert staging.thread is not None
    staging.thread.join(LIMIT_S)
    assert staging.failure == "staging was given up"
    assert torch.equal(model(X), before)
    assert stage(engine, Weights(), monkeypatch) == (True, None)
    engine.receive_weights(RefitUpdateInfo(1))
    assert torch.equal(model(X), torch.full((1, 4), answer(3.0)))

"""The broadcast between a trainer (this process) and workers (processes of their own), bit by bit and in trouble."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch
from xxhash import xxh3_64_digest

from rl_vllm.errors import ConfigError, RefitError
from rl_vllm.protocols import wire
from rl_vllm.types import TensorSpec, WeightReceiver, WeightUpdate, weights_digest
from rl_vllm.weights.broadcast import BroadcastTransport
from rl_vllm.weights.source import ModuleSource, spec_of
from tests.unit.weights.broadcast_ends import BUCKET_BYTES, LIMIT_S, Process, train, weights, work


def signed_xxh3(data: bytes) -> int:
    return int.from_bytes(xxh3_64_digest(data), "big", signed=True)


def digest(tensors: dict[str, torch.Tensor]) -> str:
    return weights_digest(
        (spec_of(name, each), signed_xxh3(bytes(each.reshape(-1).view(torch.uint8).tolist())))
        for name, each in tensors.items()
    )


def specs(tensors: dict[str, torch.Tensor]) -> tuple[TensorSpec, ...]:
    # A worker knows its specs in an order of its own.
    return tuple(spec_of(name, each) for name, each in sorted(tensors.items()))


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Process]]:
    processes = [Process(work) for _ in range(2)]
    for each in processes:
        assert each.answer() == "up"
    yield processes
    for each in processes:
        each.end()


def refit(
    transport: BroadcastTransport,
    workers: list[Process],
    sent: dict[str, torch.Tensor],
    *,
    expected: list[dict[str, torch.Tensor]] | None = None,
    absent: tuple[int, ...] = (),
    dying: int | None = None,
    timeout_s: float = LIMIT_S,
) -> WeightUpdate:
    """Replica i is workers[i]; raises what the trainer raises."""
    source = ModuleSource(sent)
    receivers = tuple(WeightReceiver(replica=index, num_workers=1) for index in range(len(workers)))
    update = transport.announce(source, 1, receivers=receivers, timeout_s=LIMIT_S)
    for index, worker in enumerate(workers):
        if index not in absent:
            told = replace(update, payload={**update.payload, "replica": index})
            wanted = specs(sent if expected is None else expected[index])
            worker.pipe.send((told, 0, wanted, 8 if index == dying else None))
    transport.send(source, update, stop=threading.Event(), timeout_s=timeout_s)
    return update


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {
        name: (str(each.dtype), tuple(each.shape), each.reshape(-1).view(torch.uint8).tolist())
        for name, each in tensors.items()
    }


@pytest.fixture
def transport() -> Iterator[BroadcastTransport]:
    made = BroadcastTransport(address="127.0.0.1", bucket_bytes=BUCKET_BYTES)
    yield made
    made.close()


@pytest.mark.parametrize("hold", ["host", "none"])
def test_every_worker_gets_every_bit_three_times_in_a_row(workers: list[Process], hold: wire.Hold) -> None:
    transport = BroadcastTransport(address="127.0.0.1", bucket_bytes=BUCKET_BYTES, hold=hold)
    for seed in range(3):
        sent = weights(seed)
        update = refit(transport, workers, sent)
        assert not update.is_kept
        assert [worker.answer() for worker in workers] == [(bits(sent), digest(sent))] * 2
    transport.close()


def test_without_checksums_the_digest_is_empty(workers: list[Process]) -> None:
    transport = BroadcastTransport(address="127.0.0.1", checksum=False)
    refit(transport, workers, weights())
    assert [worker.answer() for worker in workers] == [(bits(weights()), "")] * 2
    transport.close()


def test_a_replica_may_leave_and_come_back_between_refits(
    transport: BroadcastTransport, workers: list[Process]
) -> None:
    for members in (workers, workers[1:], workers):
        refit(transport, members, weights())
        assert [worker.answer()[1] for worker in members] == [digest(weights())] * len(members)


def test_a_wrong_shape_on_one_replica_is_named_before_any_byte(
    transport: BroadcastTransport, workers: list[Process]
) -> None:
    other = {**weights(), "large": torch.zeros(3), "scalar": torch.zeros(1)}
    with pytest.raises(RefitError, match=r"replica 1, worker 0: 2 tensors.*large.*scalar") as caught:
        refit(transport, workers, weights(), expected=[weights(), other])
    assert (caught.value.replicas, caught.value.phase) == ((1,), "stage")
    assert all("2 tensors are not the model's" in worker.answer() for worker in workers)


def test_who_does_not_come_is_named_at_the_deadline(transport: BroadcastTransport, workers: list[Process]) -> None:
    with pytest.raises(RefitError, match="replica 1, worker 0 did not come within 4 s") as caught:
        refit(transport, workers, weights(), absent=(1,), timeout_s=4.0)
    assert caught.value.replicas == (1,)
    assert "did not come" in workers[0].answer()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named_and_the_workers_are_told(
    transport: BroadcastTransport, workers: list[Process], bad: float
) -> None:
    sent = weights()
    sent["large"][1300] = bad
    with pytest.raises(RefitError, match="large holds NaN or infinity") as caught:
        refit(transport, workers, sent)
    assert caught.value.phase == "check"
    assert all("large holds NaN or infinity" in worker.answer() for worker in workers)


def test_damaged_bytes_are_named_by_the_worker_that_got_them(
    transport: BroadcastTransport, workers: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_vllm.protocols.wire.hash_of", lambda _tensor: signed_xxh3(b"not what was sent"))
    with pytest.raises(ConnectionError, match=r"replica \d, worker 0"):
        refit(transport, workers, weights())
    answers = [worker.answer() for worker in workers]
    assert any("scalar arrived damaged" in answer for answer in answers)


def test_stop_ends_the_roll_call(transport: BroadcastTransport) -> None:
    source = ModuleSource(weights())
    update = transport.announce(source, 1, receivers=(WeightReceiver(0, 1),), timeout_s=LIMIT_S)
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(transport.send, source, update, stop=stop, timeout_s=LIMIT_S)
        stop.set()
        with pytest.raises(ConnectionError, match="the engines' call ended"):
            sending.result(LIMIT_S)


def test_a_trainer_that_is_killed_fails_its_workers(workers: list[Process]) -> None:
    trainer = Process(train)
    payload = trainer.answer()
    for index, worker in enumerate(workers):
        update = WeightUpdate(1, "broadcast", {**payload, "replica": index}, 11, 1)
        worker.pipe.send((update, 0, specs(weights()), None))
    assert all("went away" in worker.answer() for worker in workers)
    trainer.end()


def test_a_worker_that_is_killed_fails_the_trainer_and_the_other_worker(workers: list[Process]) -> None:
    victim = Process(work)
    assert victim.answer() == "up"
    transport = BroadcastTransport(address="127.0.0.1", bucket_bytes=100, hold="none")
    with pytest.raises(ConnectionError):
        refit(transport, [workers[0], victim], weights(), dying=1)
    assert isinstance(workers[0].answer(), str)
    victim.end()
    transport.close()


def test_refits_leave_no_thread_and_no_socket(workers: list[Process]) -> None:
    def held() -> tuple[int, int]:
        process = psutil.Process()
        return process.num_threads(), len(process.net_connections())

    before = held()
    transport = BroadcastTransport(address="127.0.0.1", bucket_bytes=BUCKET_BYTES)
    refit(transport, workers, weights())
    assert held() != before
    for worker in workers:
        worker.answer()
    transport.close()
    assert wire.wait_until(lambda: held() == before, lambda: None, wire.Deadline(LIMIT_S)), (before, held())


def test_announcing_nothing_or_to_nobody_is_refused(transport: BroadcastTransport) -> None:
    with pytest.raises(RefitError, match="no replica receives"):
        transport.announce(ModuleSource(weights()), 1, receivers=(), timeout_s=1.0)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"hold": "disk"}, "disk"), ({"backend": "mpi"}, "mpi"), ({"bucket_bytes": 0}, "bucket_bytes")],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        BroadcastTransport(**options)

"""Single requests by their id."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rl_vllm.errors import (
    ConfigError,
    DeadlineError,
    GenerationError,
    ServiceAsleepError,
    ServiceNotRunningError,
    UnknownRequestError,
)
from rl_vllm.service.outputs import end_samples
from rl_vllm.service.requests import LiveRequest, RequestManager, StreamingRequest
from rl_vllm.testing import FakeScript, Gate
from rl_vllm.types import CompletionBatch, FinishReason, RequestStatus, SamplingConfig

from .conftest import TWO_TOKENS, engines, running

FOUR_TOKENS = SamplingConfig(max_tokens=4, ignore_eos=True)
EVENTUALLY_S = 60.0


def until(condition) -> None:
    deadline = time.monotonic() + EVENTUALLY_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.005)


def test_a_request_waits_runs_from_its_first_token_on_and_completes():
    first, pieces = Gate(), Gate()
    with running(*engines(1, gate=lambda _: first, piece_gate=pieces)) as service:
        name = service.add_request([5], FOUR_TOKENS)
        first.wait_until_held()
        assert service.get_request_status(name) is RequestStatus.WAITING
        first.open()
        pieces.wait_until_held()
        until(lambda: service.get_request_status(name) is not RequestStatus.WAITING)
        assert service.get_request_status(name) is RequestStatus.RUNNING
        pieces.open()
        output = service.get_request_output(name)
        assert service.get_request_status(name) is RequestStatus.COMPLETED
    assert output.request_id == name
    assert output.outputs[0].token_ids == [8, 9, 10, 11]
    assert output.outputs[0].finish_reason == "length"


def test_a_piece_without_tokens_does_not_make_a_request_run():
    piece = end_samples(CompletionBatch.empty(), 1, FinishReason.UNFINISHED)
    assert (len(piece), len(piece.tokens_T)) == (1, 0)
    record = StreamingRequest(request_id="r", prompt=(5,), params=TWO_TOKENS, arrival_time=1.0)
    live = LiveRequest(record, work=None)
    live.take(piece)
    assert live.status is RequestStatus.WAITING


def test_an_aborted_request_gives_what_was_made_to_its_waiter():
    gate = Gate()
    (one,) = engines(1, piece_gate=gate)
    with running(one) as service, ThreadPoolExecutor(1) as pool:
        name = service.add_request([5], FOUR_TOKENS, request_id="mine")
        assert name == "mine"
        waiter = pool.submit(service.get_request_output, name)
        gate.wait_until_held()
        until(lambda: service.get_request_status(name) is RequestStatus.RUNNING)
        assert service.abort("mine") == 1
        assert service.get_request_status(name) is RequestStatus.CANCELLED
        output = waiter.result(EVENTUALLY_S)
        assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([8], "abort")
        assert one.aborted == [0]
        assert service.abort("mine") == 0
        assert service.stats().outstanding_requests == 0


def test_a_request_aborted_before_its_first_token_has_samples_without_tokens():
    gate = Gate()
    (one,) = engines(1, gate=lambda _: gate)
    with running(one) as service:
        name = service.add_request([5], SamplingConfig(n=2, max_tokens=4))
        gate.wait_until_held(2)
        assert service.abort(name) == 1
        output = service.get_request_output(name)
    assert [sample.token_ids for sample in output.outputs] == [[], []]
    assert [sample.finish_reason for sample in output.outputs] == ["abort", "abort"]


def test_an_abort_of_a_stream_ends_it_with_what_was_made():
    gate = Gate()
    with running(*engines(1, piece_gate=gate)) as service:
        stream = service.stream_generate([5], FOUR_TOKENS)
        next(stream)
        service.abort(stream.request_id)
        (last,) = list(stream)
        assert (last.outputs[0].token_ids, last.outputs[0].finish_reason, last.finished) == ([], "abort", True)


def test_an_abort_works_when_the_engine_does_not_answer():
    gate = Gate()
    (one,) = engines(1, piece_gate=gate)
    with running(one, rpc_timeout_s=0.05) as service:
        name = service.add_request([5], FOUR_TOKENS)
        gate.wait_until_held()
        until(lambda: service.get_request_status(name) is RequestStatus.RUNNING)
        one.hang()
        assert service.abort(name) == 1
        output = service.get_request_output(name)
        assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([8], "abort")
        one.go_on()


def test_several_requests_are_aborted_at_once():
    gate = Gate()
    with running(*engines(2, gate=lambda _: gate)) as service:
        names = [service.add_request([5], FOUR_TOKENS) for _ in range(4)]
        gate.wait_until_held(4)
        assert service.abort(names) == 4
        assert {service.get_request_status(name) for name in names} == {RequestStatus.CANCELLED}
        assert len(service.requests) == 0


def test_a_request_that_the_engine_refuses_has_failed_with_the_reason():
    with running(*engines(1, answers=FakeScript(failures={0: "no KV block"}))) as service:
        name = service.add_request([5], FOUR_TOKENS)
        with pytest.raises(GenerationError, match="no KV block"):
            service.get_request_output(name)
        assert service.get_request_status(name) is RequestStatus.FAILED


def test_a_request_has_a_deadline_of_its_own_and_so_has_each_wait():
    gate = Gate()
    (one,) = engines(1, gate=lambda _: gate)
    with running(one) as service:
        patient = service.add_request([5], FOUR_TOKENS)
        with pytest.raises(DeadlineError, match=r"0\.02 s"):
            service.get_request_output(patient, timeout_seconds=0.02)
        assert service.get_request_status(patient) is RequestStatus.WAITING
        hasty = service.add_request([6], FOUR_TOKENS, timeout_seconds=0.03)
        with pytest.raises(DeadlineError, match=r"0\.03 s"):
            service.get_request_output(hasty)
        assert service.get_request_status(hasty) is RequestStatus.FAILED
        assert one.aborted == [1]
        gate.open()
        assert service.get_request_output(patient).outputs[0].token_ids == [8, 9, 10, 11]


def test_an_unknown_id_is_an_error_and_a_used_one_too_while_it_is_under_way():
    gate = Gate()
    with running(*engines(1, gate=lambda _: gate)) as service:
        for ask in (service.get_request_status, service.get_request_output, service.abort):
            with pytest.raises(UnknownRequestError, match="no request 'nobody' is known"):
                ask("nobody")
        service.add_request([5], TWO_TOKENS, request_id="mine")
        with pytest.raises(ConfigError, match="request 'mine' is under way already"):
            service.add_request([6], TWO_TOKENS, request_id="mine")
        gate.open()
        assert service.get_request_output("mine").outputs[0].token_ids == [8, 9]
        service.add_request([6], TWO_TOKENS, request_id="mine")
        assert service.get_request_output("mine").outputs[0].token_ids == [9, 10]


def test_a_request_to_a_sleeping_service_fails_with_the_remedy():
    with running(*engines(1)) as service:
        service.sleep()
        name = service.add_request([5], TWO_TOKENS)
        with pytest.raises(ServiceAsleepError, match=r"call wake_up\(\)"):
            service.get_request_output(name)


def test_a_shutdown_ends_every_request():
    gate = Gate()
    with running(*engines(1, gate=lambda _: gate)) as service:
        name = service.add_request([5], FOUR_TOKENS)
        gate.wait_until_held()
    with pytest.raises(ServiceNotRunningError, match="shut down"):
        service.get_request_output(name)
    assert service.get_request_status(name) is RequestStatus.CANCELLED
    with pytest.raises(ServiceNotRunningError):
        service.add_request([5], FOUR_TOKENS)


def test_only_the_latest_requests_are_remembered():
    with running(*engines(1)) as service:
        service.requests = RequestManager(
            service._running, service._spawn, add=service.add_request, abort=service.abort, keep_finished=3
        )
        names = [service.add_request([5], TWO_TOKENS, request_id=f"r{i}") for i in range(5)]
        for name in names[2:]:
            service.get_request_output(name)
        until(lambda: len(service.requests) == 0)
        known = []
        for name in names:
            try:
                known.append(service.get_request_status(name))
            except UnknownRequestError:
                known.append(None)
    assert known.count(None) == 2
    assert known.count(RequestStatus.COMPLETED) == 3


def test_of_an_ended_request_one_batch_is_kept():
    def batches() -> list[CompletionBatch]:
        gc.collect()
        return [each for each in gc.get_objects() if type(each) is CompletionBatch]

    with running(*engines(1)) as service:
        before = batches()
        old = {id(each) for each in before}
        service.add_request([5], FOUR_TOKENS, request_id="added")
        stream = service.stream_generate([5], FOUR_TOKENS, request_id="streamed")
        until(lambda: len(service.requests) == 0)
        del stream
        until(lambda: sum(id(each) not in old for each in batches()) == 2)
        assert service.get_request_output("added").outputs[0].token_ids == [8, 9, 10, 11]
        assert service.get_request_output("streamed").outputs[0].token_ids == [8, 9, 10, 11]


def test_pieces_that_nobody_reads_are_not_put_out():
    gate = Gate()
    with running(*engines(1, piece_gate=gate)) as service:
        name = service.add_request([5], FOUR_TOKENS)
        until(lambda: service.get_request_status(name) is RequestStatus.RUNNING)
        assert not service.requests.get(name).outbox.ready().done()
        gate.open()


def test_the_manager_adds_and_aborts_from_any_thread():
    gate = Gate()
    with running(*engines(1, gate=lambda _: gate)) as service, ThreadPoolExecutor(1) as pool:
        manager = service.requests
        name = pool.submit(manager.add_request, [5], FOUR_TOKENS, timeout_seconds=60.0).result(EVENTUALLY_S)
        assert manager.add_request(prompt_token_ids=[5], sampling_params=FOUR_TOKENS, request_id="mine") == "mine"
        gate.wait_until_held(2)
        assert pool.submit(manager.abort_request, name).result(EVENTUALLY_S) is True
        assert manager.abort_request(name) is False
        assert manager.get_request_status(name) is RequestStatus.CANCELLED
        with pytest.raises(UnknownRequestError):
            manager.abort_request("nobody")
        gate.open()
        assert service.get_request_output("mine").outputs[0].token_ids == [8, 9, 10, 11]


async def test_requests_from_an_event_loop():
    gate = Gate()
    (one,) = engines(1, gate=lambda _: gate)
    with running(one) as service:
        name = await service.aadd_request([5], TWO_TOKENS)
        waiter = asyncio.create_task(service.aget_request_output(name))
        await asyncio.to_thread(gate.wait_until_held)
        # One who gives up waiting leaves the request to the others.
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        with pytest.raises(DeadlineError):
            await service.aget_request_output(name, timeout_seconds=0.02)
        assert service.get_request_status(name) is RequestStatus.WAITING
        gate.open()
        assert (await service.aget_request_output(name)).outputs[0].token_ids == [8, 9]
        assert await service.aabort(name) == 0


def test_a_record_describes_itself_within_the_limit():
    record = StreamingRequest(
        request_id="r", prompt="a long prompt", params=SamplingConfig(), arrival_time=1.0, lora_request="poet"
    )
    assert record.describe(6).startswith("request r: prompt='a long'... params=SamplingConfig(")
    assert record.describe(6).endswith("lora=poet")
    assert "prompt='a long prompt' params" in record.describe(None)
    ids = StreamingRequest(request_id="r", prompt=(5, 6, 7), params=SamplingConfig(), arrival_time=1.0)
    assert "prompt=(5, 6)... params" in ids.describe(2)


def test_requests_are_logged_when_asked_for(caplog):
    with running(*engines(1)) as service, caplog.at_level(logging.INFO, "rl_vllm.service.requests"):
        service.get_request_output(service.add_request([5, 6, 7], TWO_TOKENS, request_id="quiet"))
        service.set_log_limits(max_log_len=2)
        before = time.time()
        service.get_request_output(service.add_request([5, 6, 7], TWO_TOKENS, request_id="loud"))
        service.set_log_limits(disable_log_requests=True)
        service.get_request_output(service.add_request([5, 6, 7], TWO_TOKENS, request_id="quiet again"))
        assert before - 1 <= service.requests.get("loud").record.arrival_time <= time.time() + 1
    lines = [record.getMessage() for record in caplog.records if record.name == "rl_vllm.service.requests"]
    assert len(lines) == 1
    assert lines[0].startswith("request loud: prompt=(5, 6)... ")

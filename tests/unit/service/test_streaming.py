"""Responses while they are made, in threads and on event loops."""

from __future__ import annotations

import asyncio
import gc
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from rl_vllm.config import HealthConfig
from rl_vllm.errors import (
    BadPromptError,
    ConfigError,
    DeadlineError,
    EngineDiedError,
    GenerationError,
    ServiceNotRunningError,
    UnknownRequestError,
)
from rl_vllm.service import pieces
from rl_vllm.service.outputs import join_pieces
from rl_vllm.testing import FakeEngine, FakeEngineScript, FakeScript, Gate
from rl_vllm.testing.answers import FAKE_MODEL
from rl_vllm.testing.models import tiny_tokenizer
from rl_vllm.types import RequestStatus, SamplingConfig

from .conftest import TWO_TOKENS, engines, running

FOUR_TOKENS = SamplingConfig(max_tokens=4, ignore_eos=True)
EVENTUALLY_S = 60.0


def until(condition) -> None:
    deadline = time.monotonic() + EVENTUALLY_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def speaking(folder: str, text: str | list[int], **script: object) -> FakeEngine:
    """An engine that always answers with this text, byte by byte."""
    ids = list(text.encode()) if isinstance(text, str) else text
    info = replace(FAKE_MODEL, tokenizer=folder, vocab_size=512, eos_token_ids=(511,))
    answers = FakeScript(respond=lambda request: ids, **script)
    return FakeEngine(info=info, script=FakeEngineScript(answers=answers))


def test_every_token_comes_in_an_output_of_its_own_and_the_last_one_says_why_it_ended():
    with running(*engines(1)) as service, service.stream_generate([5], FOUR_TOKENS) as stream:
        outputs = list(stream)
    # 3 + 5 and the next three.
    assert [output.outputs[0].token_ids for output in outputs] == [[8], [9], [10], [11]]
    assert [output.finished for output in outputs] == [False, False, False, True]
    assert [output.outputs[0].finish_reason for output in outputs] == [None, None, None, "length"]
    assert {output.request_id for output in outputs} == {stream.request_id}
    assert all(output.prompt_token_ids == [5] for output in outputs)


def test_pieces_carry_logprobs_and_versions():
    (one,) = engines(1, answers=FakeScript(next_version=(2, 7)))
    with running(one) as service:
        outputs = list(service.stream_generate([5], FOUR_TOKENS))
    # -(1 + id % 7) / 8 for the ids 8, 9, 10, 11.
    each = [-0.25, -0.375, -0.5, -0.625]
    assert [output.outputs[0].logprobs[0] for output in outputs] == [
        {token: outputs[i].outputs[0].logprobs[0][token]} for i, token in enumerate([8, 9, 10, 11])
    ]
    assert [row.logprob for output in outputs for row in output.outputs[0].logprobs[0].values()] == each
    assert [output.outputs[0].cumulative_logprob for output in outputs] == [-0.25, -0.625, -1.125, -1.75]
    assert [output.outputs[0].weight_versions[0].version for output in outputs] == [0, 0, 7, 7]


def test_cumulative_outputs_hold_all_so_far():
    with running(*engines(1)) as service:
        outputs = list(service.stream_generate([5], FOUR_TOKENS, mode="cumulative"))
    assert [output.outputs[0].token_ids for output in outputs] == [[8], [8, 9], [8, 9, 10], [8, 9, 10, 11]]
    assert [len(output.outputs[0].logprobs) for output in outputs] == [1, 2, 3, 4]


def test_cumulative_outputs_join_what_is_joined_already_with_what_is_new(monkeypatch):
    joined: list[int] = []

    def join(parts):
        joined.append(len(parts))
        return join_pieces(parts)

    monkeypatch.setattr(pieces, "join_pieces", join)
    with running(*engines(1)) as service:
        settings = SamplingConfig(max_tokens=12, ignore_eos=True)
        outputs = list(service.stream_generate([5], settings, mode="cumulative"))
    assert outputs[-1].outputs[0].token_ids == [8 + i for i in range(12)]
    assert joined == [2] * 11


def test_samples_stream_side_by_side_and_the_last_one_finishes_the_request():
    # Samples of a stream are requests of their own: the fake tells them apart by their seeds.
    with running(*engines(2)) as service:
        outputs = list(service.stream_generate([5], SamplingConfig(n=3, max_tokens=8, seed=3)))
    streamed: dict[int, list[int]] = {}
    reasons: dict[int, list[str]] = {}
    for output in outputs:
        for sample in output.outputs:
            streamed.setdefault(sample.index, []).extend(sample.token_ids)
            if sample.finished():
                reasons.setdefault(sample.index, []).append(sample.finish_reason)
    assert sorted(streamed) == [0, 1, 2]
    assert len({tuple(ids) for ids in streamed.values()}) == 3
    # The fake counts up from a start, which nothing may be missing from.
    for ids in streamed.values():
        body = ids[:-1] if ids[-1] == FAKE_MODEL.eos_token_ids[0] else ids
        assert [(token - body[0]) % 61 for token in body] == list(range(len(body)))
    assert {index: len(each) for index, each in reasons.items()} == {0: 1, 1: 1, 2: 1}
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


@pytest.mark.parametrize("mode", ["delta", "cumulative"])
@pytest.mark.parametrize(
    ("text", "script", "sampling"),
    [
        ("one 🙂 two", {}, {}),
        ("a#b##", {"stops": {0: "##", 1: "##"}}, {"stop": ("##",)}),
        ([98, 511], {}, {}),
        ([98, 0xC3, 99, 0xF0, 0x9F], {}, {}),
    ],
    ids=["characters of several bytes", "a stop string", "an end token", "broken bytes"],
)
def test_the_texts_joined_are_the_text_of_generate(tokenizer_folder, mode, text, script, sampling):
    settings = SamplingConfig(max_tokens=40, **sampling)
    with running(speaking(tokenizer_folder, text, **script)) as service:
        outputs = list(service.stream_generate("hello", settings, mode=mode))
        whole = service.generate("hello", settings, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    assert whole.outputs[0].text
    assert ("".join(texts) if mode == "delta" else texts[-1]) == whole.outputs[0].text
    assert all(output.prompt == "hello" for output in outputs)


def test_a_stream_waits_for_nothing_but_the_next_token():
    gate = Gate()
    (one,) = engines(1, piece_gate=gate)
    with running(one) as service, service.stream_generate([5], FOUR_TOKENS) as stream:
        assert next(stream).outputs[0].token_ids == [8]
        assert service.get_request_status(stream.request_id) is RequestStatus.RUNNING
        gate.wait_until_held()
        gate.open()
        assert [output.outputs[0].token_ids for output in stream] == [[9], [10], [11]]
        assert service.get_request_status(stream.request_id) is RequestStatus.COMPLETED


def test_closing_a_stream_aborts_it_in_the_engine():
    (one,) = engines(1, piece_gate=Gate())
    with running(one) as service:
        stream = service.stream_generate([5], FOUR_TOKENS)
        next(stream)
        stream.close()
        stream.close()
        assert one.aborted == [0]
        assert service.get_num_unfinished_requests() == [0]
        assert service.get_request_status(stream.request_id) is RequestStatus.CANCELLED
        assert service.stats().outstanding_requests == 0


def test_dropping_a_stream_aborts_it_in_the_engine():
    (one,) = engines(1, piece_gate=Gate())
    with running(one) as service:
        for _ in service.stream_generate([5], FOUR_TOKENS):
            break
        gc.collect()
        until(lambda: one.aborted == [0])
        assert service.stats().outstanding_requests == 0


def test_a_stream_has_the_deadline_of_its_call():
    (one,) = engines(1, piece_gate=Gate())
    with running(one) as service:
        stream = service.stream_generate([5], FOUR_TOKENS, timeout_seconds=0.05)
        next(stream)
        with pytest.raises(DeadlineError, match=r"0\.05 s waiting for request"):
            next(stream)
        assert one.aborted == [0]
        assert service.get_request_status(stream.request_id) is RequestStatus.FAILED


def test_what_the_engine_refuses_is_raised_in_the_reader():
    (one,) = engines(1, answers=FakeScript(failures={0: "no KV block"}))
    with running(one) as service:
        stream = service.stream_generate([5], FOUR_TOKENS)
        with pytest.raises(GenerationError, match="no KV block"):
            next(stream)
        assert service.get_request_status(stream.request_id) is RequestStatus.FAILED


def test_a_replica_that_dies_is_not_seen_by_the_reader():
    gate = Gate()
    fakes = engines(2, piece_gate=gate)
    with running(*fakes, health=HealthConfig(max_restarts=0)) as service:
        stream = service.stream_generate([5], FOUR_TOKENS)
        first = next(stream)
        (holder,) = (fake for fake in fakes if fake.batches)
        gate.wait_until_held()
        holder.kill("out of memory")
        gate.open()
        rest = list(stream)
    assert first.outputs[0].token_ids == [8]
    assert sum(len(output.outputs[0].token_ids) for output in rest) == 3
    assert [output.finished for output in rest] == [False] * (len(rest) - 1) + [True]


def test_with_its_only_replica_dead_a_stream_says_so():
    (one,) = engines(1, piece_gate=Gate())
    with running(one, health=HealthConfig(max_restarts=0)) as service:
        stream = service.stream_generate([5], FOUR_TOKENS)
        next(stream)
        one.kill("out of memory")
        with pytest.raises(EngineDiedError, match="out of memory"):
            next(stream)


def test_a_shutdown_ends_a_stream_with_an_error():
    (one,) = engines(1, piece_gate=Gate())
    with running(one) as service:
        stream = service.stream_generate([5], FOUR_TOKENS)
        next(stream)
    with pytest.raises(ServiceNotRunningError, match="shut down"):
        next(stream)
    stream.close()


def test_mistakes_are_raised_before_anything_is_sent():
    (one,) = engines(1)
    with running(one) as service:
        with pytest.raises(ConfigError, match="mode must be one of delta, cumulative"):
            service.stream_generate([5], mode="both")
        with pytest.raises(BadPromptError, match="it is empty"):
            service.stream_generate([[]])
        with pytest.raises(ConfigError, match="a request is one prompt, got 2"):
            service.stream_generate([[5], [6]])
        with pytest.raises(TypeError, match="unknown keyword 'use_tqm'"):
            service.stream_generate([5], use_tqm=True)
    assert one.batches == []
    with pytest.raises(ServiceNotRunningError):
        service.stream_generate([5])


# On event loops


async def test_a_stream_is_read_on_any_event_loop():
    with running(*engines(1)) as service:
        stream = await service.astream_generate([5], FOUR_TOKENS)
        assert [output.outputs[0].token_ids async for output in stream] == [[8], [9], [10], [11]]


async def test_a_stream_that_is_not_awaited_begins_with_its_first_output():
    (one,) = engines(1)
    with running(one) as service:
        stream = service.astream_generate([5], FOUR_TOKENS, request_id="mine")
        with pytest.raises(UnknownRequestError):
            service.get_request_status("mine")
        assert [output.outputs[0].token_ids async for output in stream] == [[8], [9], [10], [11]]
        assert service.get_request_status("mine") is RequestStatus.COMPLETED
        # One that nobody reads is never sent.
        await service.astream_generate([5], FOUR_TOKENS).aclose()
        bad = service.astream_generate([[]], FOUR_TOKENS)
        with pytest.raises(BadPromptError):
            await anext(bad)
        with pytest.raises(ConfigError, match="mode must be"):
            service.astream_generate([5], FOUR_TOKENS, mode="both")
    assert len(one.batches) == 1


async def test_leaving_an_async_stream_aborts_it_in_the_engine():
    (one,) = engines(1, piece_gate=Gate())
    with running(one) as service:
        async with await service.astream_generate([5], FOUR_TOKENS) as stream:
            async for _ in stream:
                break
        assert one.aborted == [0]
        assert await service.aget_num_unfinished_requests() == [0]


async def test_cancelling_the_reader_aborts_the_stream_in_the_engine():
    (one,) = engines(1, piece_gate=Gate())
    with running(one) as service:
        stream = await service.astream_generate([5], FOUR_TOKENS)
        await anext(stream)
        reader = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        await asyncio.to_thread(until, lambda: one.aborted == [0])


async def test_what_came_while_nobody_read_is_still_there():
    (one,) = engines(1)
    with running(one) as service:
        stream = await service.astream_generate([5], TWO_TOKENS)
        await asyncio.to_thread(until, lambda: service.get_request_status(stream.request_id).is_final)
        assert [output.outputs[0].token_ids async for output in stream] == [[8], [9]]


def test_two_event_loops_and_two_threads_read_at_once():
    gate = Gate()
    (one,) = engines(1, gate=lambda _: gate)

    async def read(first: int) -> list[int]:
        stream = await service.astream_generate([first], FOUR_TOKENS)
        return [token async for output in stream for token in output.outputs[0].token_ids]

    def read_blocking(first: int) -> list[int]:
        return [
            token for output in service.stream_generate([first], FOUR_TOKENS) for token in output.outputs[0].token_ids
        ]

    with running(one) as service, ThreadPoolExecutor(4) as pool:
        work = [pool.submit(asyncio.run, read(first)) for first in (5, 15)]
        work += [pool.submit(read_blocking, first) for first in (25, 35)]
        gate.wait_until_held(4, timeout_s=EVENTUALLY_S)
        gate.open()
        found = [each.result(EVENTUALLY_S) for each in work]
    assert found == [[first + 3 + i for i in range(4)] for first in (5, 15, 25, 35)]


def test_an_event_loop_may_be_closed_while_its_stream_goes_on():
    gate = Gate()
    (one,) = engines(1, piece_gate=gate)

    async def begin():
        stream = await service.astream_generate([5], FOUR_TOKENS)
        await anext(stream)
        return stream

    async def rest(stream):
        return [output.outputs[0].token_ids async for output in stream]

    with running(one) as service:
        stream = asyncio.run(begin())
        gate.open()
        assert asyncio.run(rest(stream)) == [[9], [10], [11]]

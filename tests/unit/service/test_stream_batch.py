"""Batches that are awaited or read as their samples finish, on event loops that are not the service's."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest

from rl_vllm.errors import (
    BadPromptError,
    ConfigError,
    DeadlineError,
    EngineDiedError,
    GenerationError,
    ServiceNotRunningError,
)
from rl_vllm.protocols import AsyncGenerationService
from rl_vllm.testing import Gate
from rl_vllm.types import BadPrompt, CompletionBatch, SamplingConfig

from .conftest import TWO_TOKENS, answering, engines, first_tokens, prompts, running
from .fleet import until

EVENTUALLY_S = 60.0
MARK = BadPrompt.MARK


async def read(service, *args, **kwargs) -> list[CompletionBatch]:
    async with asyncio.timeout(EVENTUALLY_S), aclosing(service.stream_batch(*args, **kwargs)) as stream:
        return [chunk async for chunk in stream]


def gates_of(fake, rows: int) -> list[Gate]:
    gates = [Gate() for _ in range(rows)]
    fake.script = replace(fake.script, gate=lambda request: gates[request.row])
    return gates


async def test_samples_come_in_the_order_in_which_they_finish():
    (one,) = engines(1)
    gates = gates_of(one, 3)
    with running(one) as service:
        assert isinstance(service, AsyncGenerationService)
        async with (
            asyncio.timeout(EVENTUALLY_S),
            aclosing(service.stream_batch(prompts([5], [6], [7]), replace(TWO_TOKENS, n=2))) as stream,
        ):
            seen = []
            for row in (2, 0, 1):
                gates[row].open()
                chunk = await anext(stream)
                seen.append((chunk.numbers_N.tolist(), chunk.samples_N.tolist(), first_tokens(chunk)[0]))
            assert [chunk async for chunk in stream] == []
    assert seen == [([2, 2], [0, 1], 10), ([0, 0], [0, 1], 8), ([1, 1], [0, 1], 9)]


async def test_a_slow_reader_gets_everything_and_holds_up_nobody():
    (one,) = engines(1)
    rows = [[3 + row % 60] for row in range(200)]
    with running(one) as service:
        stream = service.stream_batch(prompts(*rows), TWO_TOKENS, timeout_s=EVENTUALLY_S)
        chunks = [await anext(stream)]
        await until(lambda: service.metrics()[0].num_running == 0)
        chunks += [chunk async for chunk in stream]
    batch = CompletionBatch.concatenate(chunks)
    assert sorted(batch.numbers_N.tolist()) == list(range(200))


async def test_the_deadline_is_for_the_engines_and_not_for_the_reader():
    (one,) = engines(1)
    with running(one) as service:
        stream = service.stream_batch(prompts([5], [6]), TWO_TOKENS, timeout_s=0.2)
        first = await anext(stream)
        await asyncio.sleep(0.4)
        assert len(first) + sum([len(chunk) async for chunk in stream]) == 2
        gates = gates_of(one, 6)
        gates[2].open()
        stream = service.stream_batch(prompts([5], [6]), TWO_TOKENS, timeout_s=0.2)
        assert (await anext(stream)).numbers_N.tolist() == [0]
        with pytest.raises(DeadlineError, match=r"0\.2 s waiting for 2 prompts"):
            await anext(stream)
        assert one.aborted == [3]


@pytest.mark.parametrize("how", ["close", "cancel", "drop"])
async def test_a_reader_that_goes_away_aborts_what_is_unfinished(how):
    (one,) = engines(1)
    gates = gates_of(one, 3)
    gates[1].open()
    with running(one) as service:
        stream = service.stream_batch(prompts([5], [6], [7]), TWO_TOKENS)
        assert (await anext(stream)).numbers_N.tolist() == [1]
        if how == "close":
            await stream.aclose()
        elif how == "cancel":
            task = asyncio.create_task(anext(stream))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            del stream
        await until(lambda: service.metrics()[0].num_running == 0)
        assert one.aborted == [0, 2]


async def test_cancelling_a_batch_that_is_awaited_aborts_it():
    (one,) = engines(1)
    gates = gates_of(one, 2)
    with running(one) as service:
        task = asyncio.create_task(service.agenerate_batch(prompts([5], [6]), TWO_TOKENS))
        await asyncio.to_thread(gates[1].wait_until_held)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: one.aborted == [0, 1])


def test_loops_of_several_threads_read_at_once():
    found: dict[int, list[int]] = {}
    with running(*engines(2)) as service:

        def work(thread: int) -> None:
            batch = CompletionBatch.concatenate(asyncio.run(read(service, prompts(*[[5 + thread]] * 20), TWO_TOKENS)))
            found[thread] = [batch.numbers_N.tolist() and sorted(batch.numbers_N.tolist()), *set(first_tokens(batch))]

        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(EVENTUALLY_S)
    assert found == {thread: [list(range(20)), 8 + thread] for thread in range(4)}


async def test_failures_come_in_the_chunks_or_after_the_last_one():
    (one,) = engines(1)
    one.script = answering(failures={1: "no KV block", 4: "no KV block"})
    rows = prompts([5], [], [6], [7])
    with running(one) as service:
        marked = CompletionBatch.concatenate(await read(service, rows, TWO_TOKENS, on_bad_prompt=MARK))
        assert sorted(marked.numbers_N.tolist()) == [0, 3]
        assert {failure.number: failure.reason.split(":")[0] for failure in marked.failures} == {
            1: "it is empty",
            2: "no KV block",
        }
        with pytest.raises(BadPromptError, match="prompt 1"):
            await read(service, rows, TWO_TOKENS)
        stream = service.stream_batch(prompts([5], [6]), TWO_TOKENS)
        chunk = await anext(stream)
        with pytest.raises(GenerationError, match="no KV block"):
            await anext(stream)
    assert (chunk.numbers_N.tolist(), chunk.failures) == ([0], ())


async def test_a_death_and_a_shutdown_are_told_apart():
    (one,) = engines(1)
    gates = gates_of(one, 4)
    gates[0].open()
    with running(one) as service:
        stream = service.stream_batch(prompts([5], [6]), TWO_TOKENS, actor_index=0)
        await anext(stream)
        one.kill("out of memory")
        with pytest.raises(EngineDiedError, match="out of memory"):
            await anext(stream)
    (one,) = engines(1)
    gates = gates_of(one, 2)
    gates[0].open()
    with running(one) as service:
        stream = service.stream_batch(prompts([5], [6]), TWO_TOKENS)
        await anext(stream)
        await service.ashutdown()
        with pytest.raises(ServiceNotRunningError, match="shut down"):
            await anext(stream)
        with pytest.raises(ServiceNotRunningError, match="shut down"):
            await anext(service.stream_batch(prompts([5]), TWO_TOKENS))


async def test_each_prompt_may_have_settings_of_its_own_in_all_three_calls():
    three = SamplingConfig(max_tokens=3, ignore_eos=True, prompt_logprobs=0)
    settings = [replace(TWO_TOKENS, logprobs=1), three, replace(TWO_TOKENS, n=2)]
    rows = prompts([5, 9], [6, 9], [7])
    with running(*engines(2)) as service:
        whole = service.generate_batch(rows, settings)
        awaited = await service.agenerate_batch(rows, settings)
        streamed = CompletionBatch.concatenate(await read(service, rows, settings)).sorted_rows()
        with pytest.raises(ConfigError, match="2 sampling_params for 3 prompts"):
            service.generate_batch(rows, settings[:2])
    for batch in (whole, awaited, streamed):
        assert batch.numbers_N.tolist() == [0, 1, 2, 2]
        assert [batch.tokens(index).tolist() for index in range(3)] == [[17, 18], [18, 19, 20], [10, 11]]
        assert [len(top) for top in batch.top_logprobs] == [2, 0, 0, 0]
        np.testing.assert_array_equal(batch.prompt_logprobs[1], np.array([np.nan, -0.375], np.float32))
        assert [np.isnan(row).tolist() for row in batch.prompt_logprobs] == [
            [True, True], [True, False], [True], [True],
        ]  # fmt: skip


async def test_nothing_to_do_ends_at_once():
    with running(*engines(1)) as service:
        assert await read(service, prompts(), TWO_TOKENS) == []
        assert len(await service.agenerate_batch(prompts(), [])) == 0


async def test_every_sample_says_when_it_arrived():
    (one,) = engines(1)
    gates = gates_of(one, 4)
    with running(one) as service:
        stream = service.stream_batch(prompts([5], [6]), TWO_TOKENS)
        gates[1].open()
        chunks = [await anext(stream)]
        await asyncio.sleep(0.05)
        gates[0].open()
        batch = CompletionBatch.concatenate([*chunks, *[chunk async for chunk in stream]])
        assert batch.seconds_N.dtype == np.float32
        assert 0 < batch.seconds_N[0] < batch.seconds_N[1] - 0.04
        batch = batch.sorted_rows()
        assert 0.05 < batch.seconds_N[0] < EVENTUALLY_S
        gates[2].open()
        gates[3].open()
        whole = await service.agenerate_batch(prompts([5], [6]), TWO_TOKENS)
        assert (whole.seconds_N > 0).all()

"""The fake engine keeps the engine protocol's promises, so that tests against it mean something."""

import asyncio
import threading
from contextlib import aclosing

import numpy as np
import pytest

from rl_vllm.errors import ConfigError, DeadlineError, EngineDiedError, RefitError
from rl_vllm.protocols import Engine
from rl_vllm.testing import FakeEngine, FakeEngineScript, FakeScript, FakeService, Gate
from rl_vllm.types import (
    CompletionBatch,
    FinishReason,
    InFlight,
    KVCache,
    PromptBatch,
    RequestBatch,
    SamplingConfig,
    WeightUpdate,
)

PROMPTS = PromptBatch.from_rows([[5, 6], [7]])
SAMPLING = SamplingConfig(n=2, max_tokens=5)
UPDATE = WeightUpdate(version=3, transport="shared_storage", payload={}, num_tensors=1, num_bytes=4)


def requests(*numbers: int, sampling: SamplingConfig = SAMPLING) -> RequestBatch:
    return RequestBatch(np.array(numbers, np.int64), PROMPTS, (sampling,) * len(numbers))


async def collect(engine: FakeEngine, batch: RequestBatch) -> list[CompletionBatch]:
    return [chunk async for chunk in engine.stream(batch)]


async def commit(engine: FakeEngine, update: WeightUpdate = UPDATE):
    return await engine.commit_weights(update, in_flight=InFlight.KEEP, kv=KVCache.RECOMPUTE)


def test_it_is_an_engine():
    engine: Engine = FakeEngine()
    assert isinstance(engine, Engine)


async def test_its_answers_are_the_fake_services_under_the_requests_numbers():
    chunks = await collect(FakeEngine(), requests(40, 41))
    assert [chunk.numbers_N.tolist() for chunk in chunks] == [[40, 40], [41, 41]]
    mine, theirs = CompletionBatch.concatenate(chunks), FakeService().generate_batch(PROMPTS, SAMPLING)
    for column in ("samples_N", "offsets_N1", "tokens_T", "logprobs_T", "versions_T", "finish_N", "cached_N"):
        np.testing.assert_array_equal(getattr(mine, column), getattr(theirs, column))


async def test_a_failure_and_a_forced_finish_are_scripted_by_number():
    answers = FakeScript(failures={40: "refused"}, finish={41: FinishReason.ERROR})
    first, second = await collect(FakeEngine(script=FakeEngineScript(answers=answers)), requests(40, 41))
    assert [(failure.number, failure.reason) for failure in first.failures] == [(40, "refused")]
    assert len(first) == 0
    assert second.finish_N.tolist() == [FinishReason.ERROR] * 2


async def test_a_gate_holds_its_requests_until_it_is_opened_from_any_thread():
    gate = Gate()
    engine = FakeEngine(script=FakeEngineScript(gate=lambda request: gate if request.row == 40 else None))
    async with aclosing(engine.stream(requests(40, 41))) as chunks:
        assert (await anext(chunks)).numbers_N.tolist() == [41, 41]
        assert (await engine.metrics()).num_running == 1
        threading.Thread(target=gate.open).start()
        assert (await anext(chunks)).numbers_N.tolist() == [40, 40]
    assert (await engine.metrics()).num_running == 0
    assert engine.aborted == []


async def test_closing_a_stream_gives_up_what_is_pending():
    engine = FakeEngine(script=FakeEngineScript(gate=lambda _: Gate()))
    chunks = engine.stream(requests(40, 41))
    reading = asyncio.create_task(anext(chunks))
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await chunks.aclose()
    assert engine.aborted == [40, 41]
    assert (await engine.metrics()).num_running == 0


async def test_an_aborted_request_is_answered_without_tokens_and_unknown_numbers_are_ignored():
    gate = Gate()
    engine = FakeEngine(script=FakeEngineScript(gate=lambda _: gate))
    reading = asyncio.create_task(collect(engine, requests(40, 41)))
    await asyncio.to_thread(gate.wait_until_held, 2)
    await engine.abort([40, 99])
    gate.open()
    aborted, answered = await reading
    assert aborted.numbers_N.tolist() == [40, 40]
    assert aborted.lengths_N.tolist() == [0, 0]
    assert aborted.finish_N.tolist() == [FinishReason.ABORT] * 2
    assert answered.numbers_N.tolist() == [41, 41]
    assert engine.aborted == [40]


async def test_it_dies_after_so_many_chunks_and_stays_dead():
    engine = FakeEngine(2, script=FakeEngineScript(dies_after=1))
    chunks = engine.stream(requests(40, 41))
    assert (await anext(chunks)).numbers_N.tolist() == [40, 40]
    with pytest.raises(EngineDiedError, match="replica 2 died"):
        await anext(chunks)
    for call in (engine.check_health, engine.metrics, engine.model_info, engine.weight_specs):
        with pytest.raises(EngineDiedError):
            await call()
    with pytest.raises(EngineDiedError):
        await collect(engine, requests(42))


async def test_killing_it_breaks_the_streams_that_wait():
    gate = Gate()
    engine = FakeEngine(script=FakeEngineScript(gate=lambda _: gate))
    reading = [asyncio.create_task(collect(engine, requests(number))) for number in (40, 41)]
    await asyncio.to_thread(gate.wait_until_held, 2)
    await asyncio.to_thread(engine.kill, "out of memory")
    for task in reading:
        with pytest.raises(EngineDiedError, match="out of memory"):
            await task


async def test_tokens_carry_the_version_in_force_when_they_are_made():
    gate = Gate()
    engine = FakeEngine(script=FakeEngineScript(gate=lambda request: gate if request.row == 41 else None))
    async with aclosing(engine.stream(requests(40, 41))) as chunks:
        assert set((await anext(chunks)).versions_T.tolist()) == {0}
        await engine.stage_weights(UPDATE, timeout_s=1.0)
        report = await commit(engine)
        gate.open()
        assert set((await anext(chunks)).versions_T.tolist()) == {3}
    assert (report.version, report.checksum, report.prefix_cache_reset) == (3, "fake-3", True)
    assert (engine.staged, engine.committed) == ([UPDATE], [UPDATE])


async def test_requests_wait_while_weights_are_committed_and_after_a_failure_until_a_commit_succeeds():
    gate = Gate()
    engine = FakeEngine(script=FakeEngineScript(commit_gate=gate, answers=FakeScript(commit_error=OSError("fire"))))
    await engine.stage_weights(UPDATE, timeout_s=1.0)
    committing = asyncio.create_task(commit(engine))
    await asyncio.to_thread(gate.wait_until_held)
    reading = asyncio.create_task(collect(engine, requests(40)))
    gate.open()
    with pytest.raises(OSError, match="fire"):
        await committing
    assert (await engine.metrics()).num_running == 1
    engine.script = FakeEngineScript()
    await commit(engine)
    (chunk,) = await reading
    assert set(chunk.versions_T.tolist()) == {3}


async def test_a_refit_must_be_staged_and_newer():
    engine = FakeEngine()
    with pytest.raises(RefitError, match="not staged"):
        await commit(engine)
    (chunk,) = await collect(engine, requests(40))
    assert set(chunk.versions_T.tolist()) == {0}
    await engine.stage_weights(UPDATE, timeout_s=1.0)
    await commit(engine)
    with pytest.raises(RefitError, match="version 3 is being served already"):
        await engine.stage_weights(UPDATE, timeout_s=1.0)


async def test_staging_gives_up_at_its_deadline():
    engine = FakeEngine(script=FakeEngineScript(stage_gate=Gate()))
    with pytest.raises(DeadlineError, match="version 3 to be staged"):
        await engine.stage_weights(UPDATE, timeout_s=0.01)
    assert engine.staged == []


async def test_a_gate_that_nobody_reaches_says_so():
    with pytest.raises(DeadlineError, match="2 to wait at a gate where 0 do"):
        Gate().wait_until_held(2, timeout_s=0.01)
    with pytest.raises(NotImplementedError, match="no workers"):
        await FakeEngine().collective_rpc("ping", timeout_s=1.0)


def test_columns_are_refused_because_an_engine_numbers_its_answers():
    with pytest.raises(ConfigError, match="FakeService alone"):
        FakeEngineScript(answers=FakeScript(columns=CompletionBatch.empty()))

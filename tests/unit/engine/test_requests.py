"""What becomes of requests between our streams and vLLM's front end; a test plays the engine's processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine import FinishReason as Ended
from vllm.v1.engine.exceptions import EngineDeadError

from rl_vllm.engine import requests as requests_module
from rl_vllm.engine.adapters import Adapters
from rl_vllm.engine.death import answered, check_health
from rl_vllm.engine.pieces import cut_piece
from rl_vllm.engine.requests import Requests
from rl_vllm.engine.vllm_engine import VLLMEngine
from rl_vllm.errors import ConfigError, EngineDiedError, UnsupportedByEngineError
from rl_vllm.types import (
    CompletionBatch,
    EmbeddingRequest,
    FinishReason,
    PoolingConfig,
    PromptBatch,
    RequestBatch,
    SamplingConfig,
)
from tests.unit.engine.front_end import REFUSED_TOKEN, FrontEnd

STOP, LENGTH, ABORT, UNFINISHED = (
    FinishReason.STOP,
    FinishReason.LENGTH,
    FinishReason.ABORT,
    FinishReason.UNFINISHED,
)


def engine_over(llm: FrontEnd) -> VLLMEngine:
    # Its constructor would start processes.
    engine = object.__new__(VLLMEngine)
    engine._llm = llm
    engine._replica = 2
    engine._known_tasks = ("generate",)
    engine._requests = Requests(llm, 2)
    engine._adapters = Adapters(llm, 2)
    return engine


@pytest.fixture
async def llm() -> FrontEnd:
    return FrontEnd()


def requests(numbers: Sequence[int], *, n: int = 1, prompts: Sequence[list[int]] | None = None) -> RequestBatch:
    rows = [[1]] * len(numbers) if prompts is None else prompts
    return RequestBatch(np.array(numbers), PromptBatch.from_rows(rows), (SamplingConfig(n=n),) * len(numbers))


@asynccontextmanager
async def reading(stream: AsyncIterator[CompletionBatch]) -> AsyncIterator[asyncio.Task[list[CompletionBatch]]]:
    """Everything that a stream yields, gathered in the background."""

    async def gather() -> list[CompletionBatch]:
        return [chunk async for chunk in stream]

    task = asyncio.create_task(gather())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def whole(task: asyncio.Task[list[CompletionBatch]]) -> CompletionBatch:
    async with asyncio.timeout(60):
        return CompletionBatch.concatenate(await task).sorted_rows()


# Pieces


async def test_every_pieces_tokens_carry_the_version_that_made_them_also_across_a_refit(llm):
    async with aclosing(engine_over(llm).stream_pieces(requests([7]))) as pieces:
        first = asyncio.ensure_future(anext(pieces))
        await llm.until_sent(1)
        llm.make(7, [11], version=3)
        assert (await first).versions_T.tolist() == [3]
        # Two versions in one piece: the engine was ahead of the reader.
        llm.make(7, [12, 13], version=3)
        llm.make(7, [14], version=4)
        second = await anext(pieces)
        assert second.tokens_T.tolist() == [12, 13, 14]
        assert second.versions_T.tolist() == [3, 3, 4]
        llm.make(7, [15], version=4)
        assert (await anext(pieces)).versions_T.tolist() == [4]
        llm.make(7, [16, 17], version=9)
        llm.make(7, [18], version=9, finish=Ended.LENGTH)
        last = await anext(pieces)
        assert last.tokens_T.tolist() == [16, 17, 18]
        assert last.versions_T.tolist() == [9, 9, 9]
        assert last.finish_N.tolist() == [LENGTH]
        with pytest.raises(StopAsyncIteration):
            await anext(pieces)


async def test_a_chunk_holds_one_piece_of_each_sample(llm):
    async with aclosing(engine_over(llm).stream_pieces(requests([7], n=2))) as pieces:
        first = asyncio.ensure_future(anext(pieces))
        await llm.until_sent(2)
        llm.make(7, [11], sample=0, version=1)
        llm.make(7, [21], sample=1, version=1)
        llm.make(7, [12], sample=0, version=2, finish=Ended.STOP)
        chunk = (await first).sorted_rows()
        assert chunk.samples_N.tolist() == [0, 1]
        assert [chunk.tokens(i).tolist() for i in range(2)] == [[11, 12], [21]]
        assert [chunk.versions(i).tolist() for i in range(2)] == [[1, 2], [1]]
        assert chunk.finish_N.tolist() == [STOP, UNFINISHED]
        llm.make(7, [22], sample=1, version=2, finish=Ended.LENGTH)
        last = await anext(pieces)
        assert last.samples_N.tolist() == [1]
        assert last.versions_T.tolist() == [2]
        assert last.finish_N.tolist() == [LENGTH]


def test_a_piece_is_cut_from_vllms_lists_without_touching_them_and_prompt_logprobs_come_once():
    ids, logprobs, scores = [11, 12, 13], FlatLogprobs(), FlatLogprobs()
    for token in ids:
        logprobs.append_fast([token], [-float(token)], iter([1]), iter([None]))
    sent: dict[int, int] = {}
    for end, (new, spans) in {2: ([11, 12], [("3", 0, 2)]), 3: ([13], [("4", 0, 1)])}.items():
        state = SimpleNamespace(weight_version_starts=[("3", 0), ("4", 2)][: end - 1])
        whole = CompletionOutput(0, "", ids[:end], None, logprobs[:end])
        output = RequestOutput("7", None, [1], scores, [whole], finished=False)
        given = whole.token_ids
        begins = cut_piece(output, "7-x", SimpleNamespace(request_states={"7-x": state}), sent)
        assert begins == {0: end - len(new)}
        assert whole.token_ids == new
        assert whole.logprobs.logprobs == [-float(token) for token in new]
        assert [(span.version, span.start, span.end) for span in whole.weight_versions] == spans
        assert output.prompt_logprobs is (scores if end == 2 else None)
        assert given == ids[:end]
    again = RequestOutput("7", None, [1], None, [CompletionOutput(0, "", ids, None, logprobs)], finished=False)
    assert cut_piece(again, "7-x", SimpleNamespace(request_states={}), sent) == {}
    assert again.outputs == []


async def test_a_piece_without_a_usable_logprob_fails_its_request_which_is_stopped_and_not_heard_of_again(llm):
    async with aclosing(engine_over(llm).stream_pieces(requests([7, 8]))) as pieces:
        first = asyncio.ensure_future(anext(pieces))
        await llm.until_sent(2)
        llm.make(7, [11, 12])
        assert len(await first) == 1
        llm.make(7, [13], logprob=float("nan"), version=5)
        chunk = await anext(pieces)
        assert len(chunk) == 0
        (failure,) = chunk.failures
        assert failure.number == 7
        assert "response token 2, weight version 5" in failure.reason
        assert {name[0] for name in llm.engine_core.working_on} == {"8"}
        llm.make(8, [21], finish=Ended.LENGTH)
        last = await anext(pieces)
        assert last.numbers_N.tolist() == [8]
        with pytest.raises(StopAsyncIteration):
            await anext(pieces)


# Aborts


@pytest.mark.parametrize("in_pieces", [False, True])
async def test_an_aborted_request_gives_every_sample_once_with_what_was_made_of_it(llm, in_pieces):
    engine = engine_over(llm)
    batch = requests([7, 8], n=3)
    stream = engine.stream_pieces(batch) if in_pieces else engine.stream(batch)
    async with reading(stream) as task:
        await llm.until_sent(6)
        llm.make(7, [11, 12], sample=0, finish=Ended.STOP)
        llm.make(7, [21], sample=1, version=4)
        for sample in range(3):
            llm.make(8, [30 + sample], sample=sample, finish=Ended.LENGTH)
        await engine.abort([7])
        answer = await whole(task)
    rows = {(int(answer.numbers_N[i]), int(answer.samples_N[i])): i for i in range(len(answer))}
    assert sorted(rows) == [(number, sample) for number in (7, 8) for sample in range(3)]
    assert len(answer) == 6
    assert [answer.tokens(rows[7, sample]).tolist() for sample in range(3)] == [[11, 12], [21], []]
    assert [int(answer.finish_N[rows[7, sample]]) for sample in range(3)] == [STOP, ABORT, ABORT]
    assert answer.versions(rows[7, 1]).tolist() == [4]
    assert answer.failures == ()
    # The first sample had ended by itself.
    aborted = {name.split("-")[0] for what, name in llm.engine_core.log if what == "abort"}
    assert aborted == {"1_7", "2_7"}
    assert llm.holds_nothing


async def test_a_request_that_is_aborted_before_it_comes_is_never_sent(llm):
    engine = engine_over(llm)
    await engine.abort([7])
    async with reading(engine.stream(requests([7, 8], n=2))) as task:
        await llm.until_sent(2)
        for sample in range(2):
            llm.make(8, [30], sample=sample, finish=Ended.LENGTH)
        answer = await whole(task)
    assert answer.numbers_N.tolist() == [7, 7, 8, 8]
    assert answer.samples_N.tolist() == [0, 1, 0, 1]
    assert answer.finish_N.tolist() == [ABORT, ABORT, LENGTH, LENGTH]
    assert answer.lengths_N.tolist() == [0, 0, 1, 1]
    assert {name.split("-")[0] for _, name in llm.engine_core.log} == {"0_8", "1_8"}


async def test_a_request_that_is_aborted_while_it_is_sent_leaves_no_sample_running(llm):
    engine = engine_over(llm)
    llm.engine_core.gate.close()
    async with reading(engine.stream(requests([7], n=3))) as task:
        await llm.until_known()
        await engine.abort([7])
        llm.engine_core.gate.open()
        answer = await whole(task)
    assert answer.finish_N.tolist() == [ABORT] * 3
    assert len([what for what, _ in llm.engine_core.log if what == "add"]) == 3
    assert llm.engine_core.working_on == set()
    assert llm.holds_nothing


async def test_aborts_of_requests_that_never_come_are_forgotten_in_the_end(llm, monkeypatch):
    monkeypatch.setattr(requests_module, "_MAX_EARLY_ABORTS", 3)
    engine = engine_over(llm)
    await engine.abort([1, 2, 3, 4])
    async with reading(engine.stream(requests([1, 4]))) as task:
        await llm.until_sent(1)
        llm.make(1, [9], finish=Ended.LENGTH)
        answer = await whole(task)
    assert answer.finish_N.tolist() == [LENGTH, ABORT]


@pytest.mark.parametrize("in_pieces", [False, True])
async def test_closing_a_stream_stops_what_is_pending_and_leaves_nothing(llm, in_pieces):
    engine = engine_over(llm)
    batch = requests([7, 8], n=2)
    stream = engine.stream_pieces(batch) if in_pieces else engine.stream(batch)
    first = asyncio.ensure_future(anext(stream))
    await llm.until_sent(4)
    for sample in range(2):
        llm.make(7, [11], sample=sample, finish=Ended.LENGTH)
    assert set((await first).numbers_N) == {7}
    await stream.aclose()
    aborted = {name.split("-")[0] for what, name in llm.engine_core.log if what == "abort"}
    assert aborted == {"0_8", "1_8"}
    assert llm.holds_nothing


async def test_cancelling_the_reader_stops_what_is_pending(llm):
    async with reading(engine_over(llm).stream(requests([7], n=2))) as task:
        await llm.until_sent(2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert llm.engine_core.working_on == set()
    assert llm.holds_nothing


# Failures


async def test_a_row_that_vllm_refuses_fails_alone(llm):
    async with reading(engine_over(llm).stream(requests([5, 6], prompts=[[1], [REFUSED_TOKEN]]))) as task:
        await llm.until_sent(1)
        llm.make(5, [11], finish=Ended.LENGTH)
        answer = await whole(task)
    assert answer.numbers_N.tolist() == [5]
    assert [(each.number, each.reason) for each in answer.failures] == [(6, "VLLMValidationError: prompt refused")]


@pytest.mark.parametrize("n", [1, 2])
async def test_a_row_that_is_refused_after_vllm_knows_it_leaves_nothing(llm, n):
    llm.engine_core.add_error = TypeError("not to be encoded")
    async with reading(engine_over(llm).stream(requests([5], n=n))) as task:
        answer = await whole(task)
    assert [(each.number, each.reason) for each in answer.failures] == [(5, "TypeError: not to be encoded")]
    assert llm.holds_nothing


async def test_a_row_that_names_no_adapter_fails_alone(llm):
    batch = RequestBatch(
        np.array([5, 6]),
        PromptBatch(np.array([1, 2], np.int32), np.array([0, 1, 2]), loras=(None, "poet")),
        (SamplingConfig(),) * 2,
    )
    async with reading(engine_over(llm).stream(batch)) as task:
        await llm.until_sent(1)
        llm.make(5, [11], finish=Ended.LENGTH)
        answer = await whole(task)
    assert answer.numbers_N.tolist() == [5]
    (failure,) = answer.failures
    assert failure.number == 6
    assert "'poet'" in failure.reason


async def test_settings_that_vllm_refuses_are_the_callers_mistake_and_nothing_is_sent(llm):
    sampling = SamplingConfig(extra=(("bad_words_of_mine", 1),))
    batch = RequestBatch(np.array([5]), PromptBatch.from_rows([[1]]), (sampling,))
    with pytest.raises(ConfigError, match="bad_words_of_mine"):
        await anext(engine_over(llm).stream(batch))
    assert llm.engine_core.log == []


async def test_what_the_model_does_not_do_is_unsupported(llm):
    engine = engine_over(llm)
    embedding = EmbeddingRequest(np.array([1]), PromptBatch.from_rows([[1]]), PoolingConfig())
    with pytest.raises(UnsupportedByEngineError, match="does not embed: its model's tasks are generate"):
        await anext(engine.embed(embedding))
    engine._known_tasks = ("embed", "token_embed")
    for stream in (engine.stream(requests([1])), engine.stream_pieces(requests([1]))):
        with pytest.raises(UnsupportedByEngineError, match="does not generate"):
            await anext(stream)


# Death


async def test_a_death_ends_the_stream_and_says_how_the_process_ended(llm):
    async with reading(engine_over(llm).stream(requests([5, 6]))) as task:
        await llm.until_sent(2)
        llm.die(EngineCore=-9)
        with pytest.raises(EngineDiedError, match="replica 2 died: process EngineCore was killed by signal 9"):
            await whole(task)


async def test_nothing_is_sent_to_a_dead_engine(llm):
    llm.die()
    with pytest.raises(EngineDiedError, match="replica 2 died: EngineDeadError"):
        await anext(engine_over(llm).stream(requests([5])))
    assert llm.engine_core.log == []


async def test_an_engine_that_dies_while_a_request_is_sent_ends_the_stream(llm):
    llm.engine_core.gate.close()
    async with reading(engine_over(llm).stream(requests([5]))) as task:
        await llm.until_known()
        llm.engine_core.add_error = OSError("not a socket any more")
        llm.engine_core.resources.engine_dead = True
        llm.engine_core.gate.open()
        with pytest.raises(EngineDiedError, match="replica 2 died"):
            await whole(task)


async def test_a_call_that_is_under_way_when_the_engine_dies_ends(llm):
    never = asyncio.Event()
    died = asyncio.Event()
    llm.output_handler = asyncio.create_task(died.wait())
    call = asyncio.create_task(answered(llm, 2, never.wait()))
    await asyncio.sleep(0)
    llm.engine_core.ended = {"EngineCore": 1}
    died.set()
    async with asyncio.timeout(60):
        with pytest.raises(EngineDiedError, match="process EngineCore ended with exit code 1"):
            await call


async def test_a_call_to_an_engine_that_is_dead_is_not_made(llm):
    llm.die()
    made: list[str] = []

    async def call() -> None:
        made.append("it was")

    with pytest.raises(EngineDiedError):
        await answered(llm, 2, call())
    assert made == []


async def test_a_call_gives_its_answer_or_its_own_error(llm):
    async def call(error: Exception | None) -> str:
        if error is not None:
            raise error
        return "well"

    assert await answered(llm, 2, call(None)) == "well"
    with pytest.raises(KeyError):
        await answered(llm, 2, call(KeyError("x")))
    with pytest.raises(EngineDiedError):
        await answered(llm, 2, call(EngineDeadError()))


async def test_what_a_call_runs_into_when_the_engine_dies_is_its_death(llm):
    async def call() -> None:
        llm.die()
        raise OSError("not a socket any more")

    with pytest.raises(EngineDiedError, match="replica 2 died"):
        await answered(llm, 2, call())


async def test_a_worker_that_says_it_is_not_well_is_a_death(llm, monkeypatch):
    async def collective_rpc(method: str) -> None:
        raise RuntimeError(f"{method}: no more memory")

    monkeypatch.setattr(llm, "collective_rpc", collective_rpc)
    with pytest.raises(EngineDiedError, match="a worker is not well: RuntimeError: check_health: no more memory"):
        await check_health(llm, 2)

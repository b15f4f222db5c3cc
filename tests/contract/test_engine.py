"""What every engine does, whoever implements it: :class:`rl_vllm.protocols.Engine`."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import numpy as np
import pytest

from rl_vllm import SamplingConfig
from rl_vllm.errors import UnsupportedByEngineError
from rl_vllm.protocols import Engine
from rl_vllm.types import (
    CompletionBatch,
    EmbeddingRequest,
    FinishReason,
    LoRAAdapter,
    PoolingConfig,
    PromptBatch,
)
from tests.contract.conftest import ADAPTER
from tests.contract.subjects import ENDLESS, GREEDY, PROMPTS, WAIT_S, Subject

TOLERANCE_NATS = 1e-4


def test_it_has_the_whole_protocol(subject: Subject) -> None:
    assert isinstance(subject.engine, Engine)


def test_it_knows_its_model(subject: Subject) -> None:
    info = subject.run(subject.engine.model_info)
    assert info == subject.service.model_info()
    assert max(max(prompt) for prompt in PROMPTS) < info.vocab_size
    assert "generate" in info.tasks
    assert info.logprobs_mode == "processed_logprobs"


def test_greedy_ids_and_their_logprobs_are_the_models(subject: Subject) -> None:
    requests = subject.requests(PROMPTS, GREEDY)
    batch = subject.ask(requests)
    assert batch.numbers_N.tolist() == requests.numbers_B.tolist()
    for index, prompt in enumerate(PROMPTS):
        expected = subject.truth.greedy(prompt, 6)
        assert batch.tokens(index).tolist() == expected
        np.testing.assert_allclose(
            batch.logprobs(index), subject.truth.logprobs(prompt, expected), atol=TOLERANCE_NATS, rtol=0
        )
    assert batch.finish_N.tolist() == [FinishReason.LENGTH] * len(PROMPTS)
    assert not batch.failures


def test_each_request_is_answered_once_with_all_its_samples(subject: Subject) -> None:
    requests = subject.requests(PROMPTS, SamplingConfig(n=3, max_tokens=4, ignore_eos=True, seed=5))

    async def answered() -> list[int]:
        numbers: list[int] = []
        async for chunk in subject.engine.stream(requests):
            # A request's samples come together.
            assert {chunk.numbers_N.tolist().count(number) for number in chunk.numbers_N.tolist()} <= {3}
            numbers += np.unique(chunk.numbers_N).tolist()
        return numbers

    assert sorted(subject.run(answered)) == requests.numbers_B.tolist()
    batch = subject.ask(subject.requests(PROMPTS, SamplingConfig(n=3, max_tokens=4, ignore_eos=True, seed=5)))
    assert batch.samples_N.tolist() == [0, 1, 2] * len(PROMPTS)
    assert batch.lengths_N.tolist() == [4] * 3 * len(PROMPTS)
    assert np.isfinite(batch.logprobs_T).all()


def test_the_pieces_of_a_response_are_the_response(subject: Subject) -> None:
    rows = PROMPTS[:4]
    whole = subject.ask(subject.requests(rows, GREEDY))
    requests = subject.requests(rows, GREEDY)

    async def gather() -> list[CompletionBatch]:
        return [chunk async for chunk in subject.engine.stream_pieces(requests)]

    chunks = subject.run(gather)
    for row, number in enumerate(requests.numbers_B.tolist()):
        places = [(chunk, np.flatnonzero(chunk.numbers_N == number)) for chunk in chunks]
        assert {len(found) for _, found in places} <= {0, 1}
        mine = [(chunk, int(found[0])) for chunk, found in places if len(found)]
        assert [token for chunk, index in mine for token in chunk.tokens(index).tolist()] == whole.tokens(row).tolist()
        np.testing.assert_allclose(
            np.concatenate([chunk.logprobs(index) for chunk, index in mine]), whole.logprobs(row), atol=TOLERANCE_NATS
        )
        ends = [int(chunk.finish_N[index]) for chunk, index in mine]
        assert ends == [FinishReason.UNFINISHED] * (len(mine) - 1) + [FinishReason.LENGTH]
        # Made one after the other, not held back until the end.
        assert len(mine) > 1


def test_an_aborted_request_ends_with_what_was_made_and_its_siblings_go_on(subject: Subject) -> None:
    requests = subject.requests(PROMPTS[:3], ENDLESS)
    doomed = requests.numbers_B.tolist()[:2]
    brief = subject.requests(PROMPTS[3:5], GREEDY)

    async def abort_two() -> CompletionBatch:
        async def gather() -> CompletionBatch:
            return CompletionBatch.concatenate([chunk async for chunk in subject.engine.stream(requests)])

        task = asyncio.create_task(gather())
        async with asyncio.timeout(WAIT_S):
            while (await subject.engine.metrics()).num_running < 3:  # noqa: ASYNC110 (another process counts)
                await asyncio.sleep(0.01)
        # Unknown numbers are ignored.
        await subject.engine.abort([*doomed, 5 * 10**9])
        await subject.engine.abort([int(requests.numbers_B[2])])
        return await task

    with subject.holding():
        batch = subject.run(abort_two).sorted_rows()
    ended = set(batch.numbers_N[batch.finish_N == FinishReason.ABORT].tolist())
    assert ended == set(requests.numbers_B.tolist())
    assert not batch.failures
    subject.wait_until_idle()
    assert subject.ask(brief).lengths_N.tolist() == [6, 6]


@pytest.mark.parametrize("method", ["stream", "stream_pieces"])
def test_closing_a_stream_leaves_the_engine_idle(subject: Subject, method: str) -> None:
    requests = subject.requests(PROMPTS[:3], ENDLESS)

    async def begin_and_close() -> None:
        chunks = getattr(subject.engine, method)(requests)
        async with aclosing(chunks):
            first = asyncio.ensure_future(anext(chunks))
            async with asyncio.timeout(WAIT_S):
                while (await subject.engine.metrics()).num_running < 3:  # noqa: ASYNC110 (another process counts)
                    await asyncio.sleep(0.01)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)

    with subject.holding():
        subject.run(begin_and_close)
        subject.wait_until_idle()


def test_a_row_whose_adapter_is_not_loaded_fails_alone(subject: Subject) -> None:
    requests = subject.requests(PROMPTS[:3], GREEDY, [None, "nobody", None])
    batch = subject.ask(requests)
    answered, refused, last = requests.numbers_B.tolist()
    assert batch.numbers_N.tolist() == [answered, last]
    assert [failure.number for failure in batch.failures] == [refused]
    assert "nobody" in batch.failures[0].reason or "LoRA" in batch.failures[0].reason
    assert batch.tokens(0).tolist() == subject.truth.greedy(PROMPTS[0], 6)


def test_adapters_are_loaded_listed_used_and_removed(subject: Subject) -> None:
    engine, adapter = subject.engine, LoRAAdapter(name=ADAPTER, number=7, path=str(subject.adapter))
    limits = subject.run(engine.lora_limits)
    if subject.adapter is None:
        assert limits is None
        with pytest.raises(UnsupportedByEngineError):
            subject.run(lambda: engine.add_lora(adapter))
        return
    assert limits is not None
    assert limits.max_loaded >= limits.max_running >= 1
    assert subject.adapter_truth is not None
    subject.run(lambda: engine.add_lora(adapter))
    subject.run(lambda: engine.add_lora(adapter))
    subject.run(lambda: engine.pin_lora(ADAPTER))
    assert subject.run(engine.list_loras) == (adapter,)
    batch = subject.ask(subject.requests(PROMPTS[:4], GREEDY, [None, ADAPTER, None, ADAPTER]))
    for index, truth in enumerate([subject.truth, subject.adapter_truth] * 2):
        expected = truth.greedy(PROMPTS[index], 6)
        assert batch.tokens(index).tolist() == expected
        np.testing.assert_allclose(
            batch.logprobs(index), truth.logprobs(PROMPTS[index], expected), atol=TOLERANCE_NATS, rtol=0
        )
    assert subject.run(lambda: engine.remove_lora(ADAPTER))
    assert not subject.run(lambda: engine.remove_lora(ADAPTER))
    assert subject.run(engine.list_loras) == ()


def test_its_metrics_count_what_it_made(subject: Subject) -> None:
    before = subject.run(subject.engine.metrics).generated_tokens
    subject.ask(subject.requests(PROMPTS[:5], GREEDY))
    subject.wait_until(
        lambda: subject.run(subject.engine.metrics).generated_tokens == before + 30, "30 tokens to be counted"
    )
    now = subject.run(subject.engine.metrics)
    assert (now.num_running, now.num_waiting) == (0, 0)
    assert 0 <= now.kv_cache_usage <= 1


def test_it_is_well_and_says_so(subject: Subject) -> None:
    subject.run(subject.engine.check_health)
    assert isinstance(subject.run(subject.engine.prometheus), str)
    assert subject.run(subject.engine.engine_config) is not None


def test_its_caches_can_be_reset_between_requests(subject: Subject) -> None:
    subject.wait_until_idle()
    assert subject.run(subject.engine.reset_prefix_cache)
    subject.run(subject.engine.reset_mm_cache)
    assert subject.ask(subject.requests(PROMPTS[:1], GREEDY)).cached_N.tolist() in ([0], [len(PROMPTS[0]) // 2])


def test_asleep_it_answers_nothing_and_awake_the_same_as_before(subject: Subject) -> None:
    engine = subject.engine

    async def through_the_night() -> CompletionBatch:
        assert not await engine.is_sleeping()
        await engine.sleep(1)
        assert await engine.is_sleeping()
        await engine.wake_up(("weights",))
        assert await engine.is_sleeping()
        await engine.wake_up(("kv_cache",))
        assert not await engine.is_sleeping()
        requests = subject.requests(PROMPTS[:2], GREEDY)
        return CompletionBatch.concatenate([chunk async for chunk in engine.stream(requests)])

    batch = subject.run(through_the_night).sorted_rows()
    assert batch.tokens(0).tolist() == subject.truth.greedy(PROMPTS[0], 6)
    assert batch.tokens(1).tolist() == subject.truth.greedy(PROMPTS[1], 6)


def test_a_task_that_its_model_does_not_do_is_refused(subject: Subject) -> None:
    request = EmbeddingRequest(np.array([next(subject.numbers)]), PromptBatch.from_rows([[5, 6]]), PoolingConfig())

    async def embed() -> None:
        async for _ in subject.engine.embed(request):
            pass

    with pytest.raises(UnsupportedByEngineError, match="embed"):
        subject.run(embed)


def test_it_names_the_tensors_that_a_trainer_must_send(subject: Subject) -> None:
    specs = subject.run(subject.engine.weight_specs)
    names = [spec.name for spec in specs]
    assert len(names) == len(set(names))
    # The head is the embedding: it is not sent.
    assert "lm_head.weight" not in names
    assert (subject.name == "fake") == (not names)

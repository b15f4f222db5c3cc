"""What a service does, wherever its engines run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import chain, pairwise

import numpy as np
import pytest

from rl_vllm import AsyncVLLM, SamplingConfig
from rl_vllm.errors import (
    BadPromptError,
    ConfigError,
    DeadlineError,
    RefitError,
    ReplicaIndexError,
    ServiceAsleepError,
    ServiceNotRunningError,
    UnsupportedByEngineError,
)
from rl_vllm.service.outputs import RequestOutput
from rl_vllm.types import BadPrompt, CompletionBatch, InFlight, KVCache, PromptBatch, RequestStatus
from tests.contract.conftest import ADAPTER
from tests.contract.subjects import ENDLESS, GREEDY, PROMPTS, Subject, Truth

TOLERANCE_NATS = 1e-4


def generate(
    subject: Subject, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, **options: object
) -> list[RequestOutput]:
    outputs = subject.service.generate([list(p) for p in prompts], sampling, use_tqdm=False, **options)  # type: ignore[arg-type]
    assert isinstance(outputs, list)
    return outputs


def assert_answered_by(truth: Truth, outputs: Sequence[RequestOutput], prompts: Sequence[Sequence[int]]) -> None:
    assert len(outputs) == len(prompts)
    for output, prompt in zip(outputs, prompts, strict=True):
        (sample,) = output.outputs
        expected = truth.greedy(prompt, 6)
        assert list(sample.token_ids) == expected
        assert sample.logprobs is not None
        scores = [row[token].logprob for row, token in zip(sample.logprobs, expected, strict=True)]
        np.testing.assert_allclose(scores, truth.logprobs(prompt, expected), atol=TOLERANCE_NATS, rtol=0)


def test_prompts_are_answered_in_their_order(subject: Subject) -> None:
    assert_answered_by(subject.truth, generate(subject, PROMPTS, GREEDY), PROMPTS)
    assert_answered_by(subject.truth, generate(subject, PROMPTS[::-1], GREEDY), PROMPTS[::-1])


def test_one_prompt_gives_one_output_and_no_prompt_none(subject: Subject) -> None:
    output = subject.service.generate(prompt_token_ids=PROMPTS[0], sampling_params=GREEDY, use_tqdm=False)
    assert isinstance(output, RequestOutput)
    assert output.prompt_token_ids == PROMPTS[0]
    assert_answered_by(subject.truth, [output], PROMPTS[:1])
    assert subject.service.generate([], GREEDY, use_tqdm=False) == []


def test_all_samples_of_a_prompt_come_in_their_order(subject: Subject) -> None:
    outputs = generate(subject, PROMPTS, SamplingConfig(n=3, max_tokens=5, ignore_eos=True))
    for output in outputs:
        assert [sample.index for sample in output.outputs] == [0, 1, 2]
        assert {len(sample.token_ids) for sample in output.outputs} == {5}
        assert {sample.finish_reason for sample in output.outputs} == {"length"}


def test_a_seed_gives_the_same_samples_again_and_distinct_ones_each_time(subject: Subject) -> None:
    prompts = PromptBatch.from_rows([[5, 6, 7]] * 4)
    sampling = SamplingConfig(n=2, max_tokens=8, seed=3, ignore_eos=True)
    first, second = (subject.service.generate_batch(prompts, sampling) for _ in range(2))
    assert first.tokens_T.tolist() == second.tokens_T.tolist()
    assert first.numbers_N.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len({tuple(first.tokens(index).tolist()) for index in range(8)}) == 8


def test_each_replica_can_be_asked_by_its_index(subject: Subject) -> None:
    service = subject.service
    for index in range(service.num_replicas):
        assert_answered_by(subject.truth, generate(subject, PROMPTS[:3], GREEDY, actor_index=index), PROMPTS[:3])
    with pytest.raises(ReplicaIndexError, match="99"):
        generate(subject, PROMPTS[:1], GREEDY, actor_index=99)
    with pytest.raises(IndexError):
        service.get_num_unfinished_requests(actor_index=99)


def test_threads_and_event_loops_may_ask_at_once(subject: Subject) -> None:
    failures: list[BaseException] = []

    def ask(thread: int) -> None:
        try:
            mine = PROMPTS[thread::4]
            if thread % 2:
                assert_answered_by(subject.truth, generate(subject, mine, GREEDY), mine)
            else:
                outputs = asyncio.run(subject.service.agenerate([list(p) for p in mine], GREEDY))
                assert isinstance(outputs, list)
                assert_answered_by(subject.truth, outputs, mine)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures


@pytest.mark.parametrize("mode", ["delta", "cumulative"])
def test_a_streamed_response_is_the_response(subject: Subject, mode: str) -> None:
    expected = subject.truth.greedy(PROMPTS[0], 6)
    with subject.service.stream_generate(prompt_token_ids=PROMPTS[0], sampling_params=GREEDY, mode=mode) as stream:  # type: ignore[arg-type]
        outputs = list(stream)
    seen = [list(output.outputs[0].token_ids) for output in outputs]
    assert len(seen) > 1
    assert (list(chain.from_iterable(seen)) if mode == "delta" else seen[-1]) == expected
    if mode == "cumulative":
        assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(seen))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_a_batch_read_as_its_samples_finish_is_the_batch(subject: Subject) -> None:
    rows = PromptBatch.from_rows([*PROMPTS, []])
    sampling = [replace(GREEDY, max_tokens=1 + row % 6, logprobs=row % 2) for row in range(len(rows))]
    version = subject.service.weight_version

    async def read() -> tuple[CompletionBatch, CompletionBatch]:
        stream = subject.service.stream_batch(rows, sampling, on_bad_prompt=BadPrompt.MARK)
        async with aclosing(stream):
            streamed = CompletionBatch.concatenate([chunk async for chunk in stream])
        return streamed, await subject.service.agenerate_batch(rows, sampling, on_bad_prompt=BadPrompt.MARK)

    for batch in asyncio.run(read()):
        batch = batch.sorted_rows()
        assert batch.numbers_N.tolist() == list(range(len(PROMPTS)))
        assert [failure.number for failure in batch.failures] == [len(PROMPTS)]
        assert set(batch.versions_T.tolist()) == {version}
        assert batch.top_logprobs is not None
        for row, prompt in enumerate(PROMPTS):
            assert batch.tokens(row).tolist() == subject.truth.greedy(prompt, 1 + row % 6)
            assert len(batch.top_logprobs[row]) == (1 + row % 6 if row % 2 else 0)


def test_a_reader_of_a_batch_that_goes_away_leaves_the_engines_idle(subject: Subject) -> None:
    async def cancel() -> None:
        stream = subject.service.stream_batch(PromptBatch.from_rows(PROMPTS), ENDLESS)
        task = asyncio.create_task(anext(stream))
        await asyncio.to_thread(subject.wait_until, lambda: subject.num_running() > 0, "requests to run")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with subject.holding():
        asyncio.run(cancel())
        subject.wait_until_idle()


def test_bad_rows_are_marked_with_their_reason_and_their_siblings_answered(subject: Subject) -> None:
    model = subject.service.model_info()
    bad = {1: [], 3: [9] * model.max_model_len, 4: [5, model.vocab_size], 5: [5, -1]}
    rows = [bad.get(row, PROMPTS[row]) for row in range(7)]
    good = [row for row in range(7) if row not in bad]
    batch = subject.service.generate_batch(PromptBatch.from_rows(rows), GREEDY, on_bad_prompt=BadPrompt.MARK)
    assert batch.numbers_N.tolist() == good
    assert [failure.number for failure in batch.failures] == list(bad)
    for index, row in enumerate(good):
        assert batch.tokens(index).tolist() == subject.truth.greedy(PROMPTS[row], 6)
    for row in bad:
        with pytest.raises(BadPromptError, match="prompt 1: "):
            subject.service.generate_batch(PromptBatch.from_rows([PROMPTS[0], bad[row]]), GREEDY)
    subject.service.check_health()


def test_a_response_is_as_long_as_the_context_leaves_room_for(subject: Subject) -> None:
    longest = subject.service.model_info().max_model_len
    rows = PromptBatch.from_rows([[9] * (longest - room) for room in (4, 1)])
    batch = subject.service.generate_batch(rows, SamplingConfig(max_tokens=50, ignore_eos=True))
    assert batch.lengths_N.tolist() == [4, 1]


def test_a_deadline_that_passes_leaves_the_engines_idle(subject: Subject) -> None:
    with subject.holding(), pytest.raises(DeadlineError, match=r"0\.2 s"):
        generate(subject, PROMPTS, ENDLESS, timeout_seconds=0.2)
    subject.wait_until_idle()
    assert_answered_by(subject.truth, generate(subject, PROMPTS[:2], GREEDY), PROMPTS[:2])


def test_a_caller_that_is_cancelled_leaves_the_engines_idle(subject: Subject) -> None:
    async def cancel() -> None:
        task = asyncio.create_task(subject.service.agenerate([list(p) for p in PROMPTS], ENDLESS))
        await asyncio.to_thread(subject.wait_until, lambda: subject.num_running() > 0, "requests to run")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with subject.holding():
        asyncio.run(cancel())
        subject.wait_until_idle()


def test_a_closed_stream_leaves_the_engines_idle(subject: Subject) -> None:
    with subject.holding():
        with subject.service.stream_generate(prompt_token_ids=PROMPTS[0], sampling_params=ENDLESS):
            subject.wait_until(lambda: subject.num_running() > 0, "the request to run")
        subject.wait_until_idle()


def test_a_request_is_added_watched_and_aborted(subject: Subject) -> None:
    service = subject.service
    done = service.add_request(prompt_token_ids=PROMPTS[0], sampling_params=GREEDY)
    assert_answered_by(subject.truth, [service.get_request_output(done)], PROMPTS[:1])
    assert service.get_request_status(done) is RequestStatus.COMPLETED
    with subject.holding():
        request = service.add_request(prompt_token_ids=PROMPTS[1], sampling_params=ENDLESS)
        subject.wait_until(lambda: subject.num_running() > 0, "the request to run")
        assert not service.get_request_status(request).is_final
        assert service.abort(request) == 1
        output = service.get_request_output(request)
        assert {sample.finish_reason for sample in output.outputs} == {"abort"}
        assert service.get_request_status(request) is RequestStatus.CANCELLED
        subject.wait_until_idle()
    assert service.abort(request) == 0


def test_new_weights_answer_under_their_version_and_broken_ones_change_nothing(subject: Subject) -> None:
    service, rows = subject.service, PromptBatch.from_rows(PROMPTS[:4])
    version = service.weight_version
    with pytest.raises(RefitError) as caught:
        service.stage_weights(subject.broken_update(version + 1), timeout_s=60)
    assert caught.value.phase == "stage"
    assert_answered_by(subject.truth, generate(subject, PROMPTS[:4], GREEDY), PROMPTS[:4])
    # There and back, so that every other test finds the checkpoint's weights.
    for offset, truth in ((2, subject.trained), (3, subject.truth)):
        update = subject.update(version + offset, truth is subject.trained)
        service.stage_weights(update, timeout_s=60)
        assert service.weight_version == (version if offset == 2 else version + 2)
        reports = service.commit_weights(update, in_flight=InFlight.KEEP, kv=KVCache.RECOMPUTE, timeout_s=60)
        assert len(reports) == service.num_replicas
        assert {report.checksum for report in reports} == {reports[0].checksum}
        assert service.weight_version == version + offset
        batch = service.generate_batch(rows, GREEDY)
        assert set(batch.versions_T.tolist()) == {version + offset}
        for index, prompt in enumerate(PROMPTS[:4]):
            expected = truth.greedy(prompt, 6)
            assert batch.tokens(index).tolist() == expected
            np.testing.assert_allclose(batch.logprobs(index), truth.logprobs(prompt, expected), atol=TOLERANCE_NATS)


def test_asleep_it_refuses_and_awake_it_answers_as_before(subject: Subject) -> None:
    service = subject.service
    service.sleep(1)
    try:
        assert service.is_sleeping()
        with pytest.raises(ServiceAsleepError):
            generate(subject, PROMPTS[:1], GREEDY)
    finally:
        service.wake_up()
    assert not service.is_sleeping()
    assert_answered_by(subject.truth, generate(subject, PROMPTS[:2], GREEDY), PROMPTS[:2])


def test_adapters_are_added_used_listed_and_removed_everywhere(subject: Subject) -> None:
    service = subject.service
    if subject.adapter is None:
        with pytest.raises(UnsupportedByEngineError):
            service.add_lora(ADAPTER, "/any/folder")
        return
    assert subject.adapter_truth is not None
    adapter = service.add_lora(ADAPTER, subject.adapter)
    assert [each.name for each in service.list_loras()] == [ADAPTER]
    for index in range(service.num_replicas):
        tuned = generate(subject, PROMPTS[:3], GREEDY, lora_request=ADAPTER, actor_index=index)
        assert_answered_by(subject.adapter_truth, tuned, PROMPTS[:3])
    assert_answered_by(subject.truth, generate(subject, PROMPTS[:3], GREEDY), PROMPTS[:3])
    assert service.remove_lora(adapter.name)
    assert not service.remove_lora(adapter.name)
    with pytest.raises(ConfigError, match=ADAPTER):
        generate(subject, PROMPTS[:1], GREEDY, lora_request=ADAPTER)


def test_its_counts_are_true_and_zero_when_it_is_idle(subject: Subject) -> None:
    service = subject.service
    subject.wait_until_idle()
    before = [each.generated_tokens for each in service.metrics() if each is not None]
    generate(subject, PROMPTS, GREEDY)
    subject.wait_until(
        lambda: sum(m.generated_tokens for m in service.metrics() if m is not None) == sum(before) + 6 * len(PROMPTS),
        "all tokens to be counted",
    )
    assert service.get_num_unfinished_requests() == [0] * service.num_replicas
    assert service.get_cache_usage() == [0.0] * service.num_replicas
    assert service.get_cache_usage(actor_index=0) == 0.0
    assert service.is_running
    assert not service.errored
    service.check_health()
    service.check_health(actor_index=0)


def test_what_its_model_does_not_do_is_refused(subject: Subject) -> None:
    with pytest.raises(UnsupportedByEngineError, match="embed"):
        subject.service.encode([PROMPTS[0]])


def test_before_it_is_launched_every_call_says_so(subject: Subject) -> None:
    service = AsyncVLLM(subject.service.config.engine, executor="local")
    for call in (
        lambda: service.generate([PROMPTS[0]], use_tqdm=False),
        lambda: service.get_cache_usage(),
        lambda: service.weight_version,
        lambda: service.weight_specs(),
        lambda: service.sleep(1),
    ):
        with pytest.raises(ServiceNotRunningError, match="not launched"):
            call()
    service.shutdown()

"""The fake keeps the protocol's promises, so that tests against it mean something."""

import asyncio

import numpy as np
import pytest

from rl_vllm.errors import BadPromptError, ConfigError, DeadlineError, GenerationError, RefitError
from rl_vllm.protocols import AsyncGenerationService, GenerationService
from rl_vllm.testing import FakeScript, FakeService
from rl_vllm.types import (
    BadPrompt,
    CompletionBatch,
    FinishReason,
    InFlight,
    KVCache,
    PromptBatch,
    SamplingConfig,
    TensorSpec,
    WeightUpdate,
)

PROMPTS = PromptBatch.from_rows([[5, 6], [7]])
UPDATE = WeightUpdate(version=3, transport="shared_storage", payload={}, num_tensors=1, num_bytes=4)


def test_responses_and_logprobs_are_the_stated_function():
    service: GenerationService = FakeService()
    batch = service.generate_batch(PROMPTS, SamplingConfig(n=2, max_tokens=5))
    # Row 0: key 11, length 4: 3 + 11, 15, 16, EOS. Sample 1: key 16, length 1: EOS.
    # Row 1: key 7, length 8 cut to 5: 10 .. 14. Sample 1: key 12, length 5: 15 .. 18, EOS.
    assert [batch.tokens(i).tolist() for i in range(4)] == [
        [14, 15, 16, 2],
        [2],
        [10, 11, 12, 13, 14],
        [15, 16, 17, 18, 2],
    ]
    assert batch.logprobs(0).tolist() == [-0.125, -0.25, -0.375, -0.375]
    assert batch.finish_N.tolist() == [FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH, FinishReason.STOP]
    assert list(zip(batch.numbers_N.tolist(), batch.samples_N.tolist(), strict=True)) == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]


def test_the_seed_changes_the_answer_and_the_context_limits_it():
    service = FakeService()
    seeded = service.generate_batch(PROMPTS, SamplingConfig(seed=1))
    assert seeded.tokens(0)[0] == 25
    full = service.generate_batch(PromptBatch.from_rows([[5] * 62]), SamplingConfig(ignore_eos=True, max_tokens=None))
    assert full.lengths_N.tolist() == [2]


@pytest.mark.parametrize(
    ("row", "reason"), [([], "no tokens"), ([64], "id 64"), ([-1], "id -1"), ([5] * 64, "no room")]
)
def test_a_bad_prompt_refuses_the_batch_or_fails_alone(row, reason):
    service = FakeService()
    prompts = PromptBatch.from_rows([[5], row])
    with pytest.raises(BadPromptError, match=reason) as raised:
        service.generate_batch(prompts, SamplingConfig())
    assert raised.value.row == 1
    marked = service.generate_batch(prompts, SamplingConfig(), on_bad_prompt=BadPrompt.MARK)
    assert marked.numbers_N.tolist() == [0]
    assert marked.failures[0].number == 1
    assert reason in marked.failures[0].reason


def test_scripted_failures_versions_and_records():
    service = FakeService(script=FakeScript(failures={0: "lost"}, next_version=(2, 9)))
    with pytest.raises(GenerationError, match="lost"):
        service.generate_batch(PROMPTS, SamplingConfig())
    batch = service.generate_batch(PROMPTS, SamplingConfig(max_tokens=4), timeout_s=2.0, on_bad_prompt=BadPrompt.MARK)
    assert [(f.number, f.reason) for f in batch.failures] == [(0, "lost")]
    assert batch.versions(0).tolist() == [0, 0, 9, 9]
    assert service.generate_calls[-1].timeout_s == 2.0
    assert service.generate_calls[-1].prompts is PROMPTS


def test_a_commit_raises_the_version_of_the_next_tokens_only_after_a_stage():
    spec = TensorSpec("w", "float32", (1,))
    service = FakeService(specs=(spec,), num_replicas=2)
    assert service.weight_specs() == (spec,)
    with pytest.raises(RefitError, match="not staged"):
        service.commit_weights(UPDATE, in_flight=InFlight.KEEP, kv=KVCache.REUSE, timeout_s=1.0)
    service.stage_weights(UPDATE, timeout_s=1.0)
    assert service.weight_version == 0
    reports = service.commit_weights(UPDATE, in_flight=InFlight.KEEP, kv=KVCache.RECOMPUTE, timeout_s=1.0)
    assert [(report.version, report.prefix_cache_reset) for report in reports] == [(3, True)] * 2
    assert service.weight_version == 3
    assert [call.update for call in service.stage_calls] == [UPDATE]
    assert [(call.in_flight, call.kv) for call in service.commit_calls] == [(InFlight.KEEP, KVCache.RECOMPUTE)]
    assert set(service.generate_batch(PROMPTS, SamplingConfig()).versions_T.tolist()) == {3}
    with pytest.raises(RefitError, match="version 3 is being served already"):
        service.stage_weights(UPDATE, timeout_s=1.0)


def test_prompt_logprobs_come_only_when_asked_for_and_the_first_is_unknown():
    service = FakeService()
    assert service.generate_batch(PROMPTS, SamplingConfig()).prompt_logprobs is None
    values = service.generate_batch(PROMPTS, SamplingConfig(prompt_logprobs=0)).prompt_logprobs
    np.testing.assert_array_equal(values[0], np.array([np.nan, -0.875], np.float32))


async def test_a_stream_yields_one_chunk_a_sample_in_the_scripted_order():
    opened, asked = asyncio.Event(), []

    async def before(row: int) -> None:
        asked.append(row)
        if row == 0:
            await opened.wait()

    service: AsyncGenerationService = FakeService(script=FakeScript(order=(1, 0), before=before, failures={2: "lost"}))
    prompts = PromptBatch.from_rows([[5, 6], [7], [8]])
    sampling = SamplingConfig(n=2, max_tokens=5)
    stream = service.stream_batch(prompts, sampling, on_bad_prompt=BadPrompt.MARK)
    chunks = [await anext(stream), await anext(stream)]
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    assert (asked, waiting.done()) == ([1, 0], False)
    opened.set()
    chunks += [await waiting, *[chunk async for chunk in stream]]
    assert [chunk.numbers_N.tolist() for chunk in chunks] == [[1], [1], [0], [0], []]
    whole = CompletionBatch.concatenate(chunks).sorted_rows()
    assert [(failure.number, failure.reason) for failure in whole.failures] == [(2, "lost")]
    expected = await service.agenerate_batch(prompts, [sampling] * 3, on_bad_prompt=BadPrompt.MARK)
    assert whole.tokens_T.tolist() == expected.tokens_T.tolist()
    assert [call.timeout_s for call in service.generate_calls] == [None, None]


async def test_a_stream_has_a_deadline_and_raises_what_failed_after_the_rest():
    async def before(row: int) -> None:
        await asyncio.sleep(60.0 * row)

    service = FakeService(script=FakeScript(before=before))
    stream = service.stream_batch(PROMPTS, SamplingConfig(), timeout_s=0.05)
    assert len(await anext(stream)) == 1
    with pytest.raises(DeadlineError, match=r"0\.05"):
        await anext(stream)
    service.script = FakeScript(failures={0: "lost"})
    stream = service.stream_batch(PROMPTS, SamplingConfig())
    assert (await anext(stream)).numbers_N.tolist() == [1]
    with pytest.raises(GenerationError, match="lost"):
        await anext(stream)
    with pytest.raises(ConfigError, match="1 sampling for 2 prompts"):
        await anext(service.stream_batch(PROMPTS, [SamplingConfig()]))


def test_rows_may_ask_for_columns_of_their_own():
    batch = FakeService().generate_batch(PROMPTS, [SamplingConfig(logprobs=1), SamplingConfig(prompt_logprobs=0)])
    assert [bool(top) for top in batch.top_logprobs] == [True, False]
    assert [np.isnan(row).tolist() for row in batch.prompt_logprobs] == [[True, True], [True]]

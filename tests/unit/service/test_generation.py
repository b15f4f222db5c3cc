"""What ``generate`` and its kin are asked, and what comes back: one or many, good and bad, waiting in any way."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from rl_vllm.errors import (
    BadInputError,
    BadPromptError,
    ConfigError,
    DeadlineError,
    EngineDiedError,
    GenerationError,
    ReplicaIndexError,
    ServiceNotRunningError,
    UnsupportedByEngineError,
)
from rl_vllm.testing import FakeEngine, FakeEngineScript, FakeScript, Gate
from rl_vllm.testing.answers import FAKE_MODEL
from rl_vllm.testing.models import tiny_tokenizer
from rl_vllm.types import BadPrompt, PoolingConfig, SamplingConfig

from .conftest import TWO_TOKENS, engines, first_tokens, prompts, running

EVENTUALLY_S = 60.0
EMBEDDING_MODEL = replace(FAKE_MODEL, tasks=("embed",))


def ask(service, *args, **kwargs):
    return service.generate(*args, use_tqdm=False, **kwargs)


def ids(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


# Settings for each prompt


def test_each_prompt_may_have_settings_of_its_own():
    (one,) = engines(1)
    three = SamplingConfig(max_tokens=3, ignore_eos=True)
    with running(one) as service:
        outputs = ask(service, [[5], [6], [7]], [TWO_TOKENS, three, TWO_TOKENS])
        with pytest.raises(ConfigError, match="2 sampling_params for 3 prompts: give one, or one for each"):
            ask(service, [[5], [6], [7]], [TWO_TOKENS, three])
    assert ids(outputs) == [[8, 9], [9, 10, 11], [10, 11]]
    assert one.batches[0].sampling_B == (TWO_TOKENS, three, TWO_TOKENS)


def test_prompts_that_ask_for_different_columns_get_what_each_asked_for():
    plain = TWO_TOKENS
    top = replace(TWO_TOKENS, logprobs=1)
    scored = replace(TWO_TOKENS, prompt_logprobs=0)
    with running(*engines(2)) as service:
        outputs = ask(service, [[5, 9], [6, 9], [7, 9], [8, 9]], [plain, scored, top, plain])
    # 3 + the prompt's sum, and the next.
    assert ids(outputs) == [[17, 18], [18, 19], [19, 20], [20, 21]]
    assert [output.prompt_logprobs is None for output in outputs] == [True, False, True, True]
    # What the fake gives the id 9.
    assert outputs[1].prompt_logprobs == [None, {9: outputs[1].prompt_logprobs[1][9]}]
    assert outputs[1].prompt_logprobs[1][9].logprob == -0.375


def test_a_failure_in_one_group_of_settings_stops_the_others():
    gate = Gate()
    script = FakeScript(failures={1: "no KV block"})
    (one,) = engines(1, gate=lambda request: gate if request.row == 0 else None, answers=script)
    with running(one) as service:
        with pytest.raises(DeadlineError):
            ask(service, [[5], [6]], [TWO_TOKENS, replace(TWO_TOKENS, prompt_logprobs=0)], timeout_seconds=0.05)
        gate.open()
        assert [m.num_running for m in service.metrics()] == [0]


# Bad prompts


MIXED = [[5], [], [6.5], [64], [-1], [7] * 64, None, [True], "text", [9]]


def test_bad_rows_are_marked_with_their_reasons_and_their_siblings_answered():
    fakes = engines(2)
    with running(*fakes) as service:
        outputs = ask(service, MIXED, TWO_TOKENS, on_bad_prompt="mark")
        assert ids([outputs[0], outputs[-1]]) == [[8, 9], [12, 13]]
        errors = [output.error for output in outputs]
        assert [index for index, error in enumerate(errors) if error is None] == [0, 9]
        assert all(output.outputs == [] for output in outputs[1:-1])
        for error, words in zip(
            errors[1:-1],
            [
                "empty",
                "6.5 (float)",
                "token id 64",
                "token id -1",
                "64 tokens",
                "NoneType",
                "True (bool)",
                "no tokenizer",
            ],
            strict=True,
        ):
            assert words in error
        assert sum(len(batch) for fake in fakes for batch in fake.batches) == 2
        assert ids(ask(service, [[5]], TWO_TOKENS)) == [[8, 9]]


def test_the_first_bad_row_refuses_the_batch_before_anything_is_sent():
    (one,) = engines(1)
    with running(one) as service:
        for given, message in [
            (MIXED, r"prompt 2: it holds 6\.5"),
            ([[5], []], "prompt 1: it is empty"),
            ([[5], [-1]], "prompt 1: token id -1"),
            ([[7] * 64], "64 tokens, which leaves no room for a response in max_model_len=64"),
            ([[7] * 100], "100 tokens"),
            (torch.tensor([[0.5, 1.0]]), r"0\.5 \(float\)"),
        ]:
            with pytest.raises(BadPromptError, match=message):
                ask(service, given, TWO_TOKENS)
        assert ids(ask(service, [[7] * 63], TWO_TOKENS)) == [[3 + (7 * 63) % 61]]
    assert len(one.batches) == 1


def test_a_batch_of_bad_rows_alone_reaches_no_engine():
    (one,) = engines(1)
    with running(one) as service:
        outputs = ask(service, [[], [64]], TWO_TOKENS, on_bad_prompt=BadPrompt.MARK)
        assert [bool(output.error) for output in outputs] == [True, True]
        single = ask(service, [64], TWO_TOKENS, on_bad_prompt="mark")
        assert "token id 64" in single.error
    assert one.batches == []


def test_megabytes_of_prompt_are_refused_in_every_form_and_the_service_goes_on():
    text = tiny_tokenizer()
    with running(*engines(1)) as service:
        service._own_tokenizer = service._tokenizer = text
        ids_10mb = [5] * 2_500_000
        outside = np.full(2_500_000, 70, np.int32)
        outputs = ask(service, [ids_10mb, outside, [5]], TWO_TOKENS, on_bad_prompt="mark")
        assert "2500000 tokens" in outputs[0].error
        assert "2500000 tokens" in outputs[1].error
        assert outputs[2].outputs[0].token_ids == [8, 9]
        with pytest.raises(BadPromptError, match="2500000 tokens"):
            ask(service, ids_10mb, TWO_TOKENS)


def test_a_row_that_the_engine_refuses_is_marked_beside_the_bad_ones():
    (one,) = engines(1, answers=FakeScript(failures={1: "no KV block"}))
    with running(one) as service:
        outputs = ask(service, [[5], [], [7]], TWO_TOKENS, on_bad_prompt="mark")
        assert [output.error and output.error.split(":")[0] for output in outputs] == [
            None,
            "it is empty",
            "no KV block",
        ]
        one.script = FakeEngineScript(answers=FakeScript(failures={3: "no KV block"}))
        with pytest.raises(GenerationError, match="prompt 1: no KV block"):
            ask(service, [[5], [7]], TWO_TOKENS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_bad_prompt": "ignore"}, "on_bad_prompt must be one of 'raise', 'mark', got 'ignore'"),
        ({"request_context": {"session": "a"}}, "request_context has 'session': only session_id is known"),
        ({"request_context": [{}]}, "1 request_context for 2 prompts"),
        ({"request_context": ["a", "b"]}, "request_context must be a mapping"),
        ({"timeout_seconds": -1}, "timeout_seconds must be a finite number above 0, got -1"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds must be"),
    ],
    ids=str,
)
def test_an_option_that_is_wrong_is_named(options, message):
    (one,) = engines(1)
    with running(one) as service, pytest.raises(ConfigError, match=message):
        ask(service, [[5], [6]], TWO_TOKENS, **options)
    assert one.batches == []


def test_settings_that_are_wrong_are_named():
    with running(*engines(1)) as service:
        with pytest.raises(BadInputError, match=r"sampling_params must be SamplingParams or SamplingConfig, got 0\.5"):
            ask(service, [[5]], 0.5)
        with pytest.raises(TypeError, match="unknown keyword 'max_tokens': the options are lora_request"):
            ask(service, [[5]], max_tokens=5)
        for values in ({"temperature": float("nan")}, {"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}):
            with pytest.raises(ConfigError):
                SamplingConfig(**values)


# Which replica


def test_a_call_may_name_its_replica():
    fakes = engines(3)
    with running(*fakes) as service:
        ask(service, [[5], [6]], TWO_TOKENS, actor_index=1)
        service.generate_batch(prompts([5]), TWO_TOKENS, actor_index=2)
        list(service.stream_generate([5], TWO_TOKENS, actor_index=2))
        assert [len(fake.batches) for fake in fakes] == [0, 1, 2]
        for index in (3, -1, True, "0", 1.5):
            with pytest.raises(ReplicaIndexError, match=r"give one of \[0, 1, 2\]"):
                ask(service, [[5]], TWO_TOKENS, actor_index=index)


def test_a_named_replica_that_is_dead_is_an_error_and_no_other_answers():
    one, two = engines(2)
    with running(one, two) as service:
        one.kill("out of memory")
        with pytest.raises(EngineDiedError, match="replica 0 died"):
            ask(service, [[5]], TWO_TOKENS, actor_index=0)
    assert two.batches == []


def test_a_session_comes_to_the_router():
    (one,) = engines(1)
    with running(one) as service:
        ask(service, [[5], [6]], TWO_TOKENS, request_context={"session_id": "a"})
        ask(service, [[5], [6]], TWO_TOKENS, request_context=[{"session_id": 7}, None])
    assert [batch.prompts.session_ids for batch in one.batches] == [("a", "a"), ("7", None)]


# Embeddings


def test_encode_gives_a_vector_for_each_prompt():
    @dataclass
    class PoolingParams:
        task: str | None = None
        use_activation: bool | None = False
        dimensions: int | None = None

    fakes = [FakeEngine(index, info=EMBEDDING_MODEL) for index in range(2)]
    with running(*fakes) as service:
        # The fake's vector: number of ids, and their sum.
        assert service.encode([5, 6]).outputs.data.tolist() == [2.0, 11.0]
        outputs = service.encode([[5], [6, 7], [1] * 64], PoolingParams())
        assert [output.outputs.embedding for output in outputs] == [[1.0, 5.0], [2.0, 13.0], [64.0, 64.0]]
        marked = service.encode([[5], [], [1] * 65, [64]], PoolingConfig(), on_bad_prompt="mark")
        assert [output.outputs is None for output in marked] == [False, True, True, True]
        assert "65 tokens, more than max_model_len=64" in marked[2].error
        with pytest.raises(BadPromptError, match="prompt 1: it is empty"):
            service.encode([[5], []])
        with pytest.raises(UnsupportedByEngineError, match="classify"):
            service.encode([5], PoolingConfig(task="classify"))
        with pytest.raises(BadInputError, match="pooling_params must be"):
            service.encode([5], 7)
        assert service.encode([]) == []


def test_encode_on_a_model_that_generates_says_so():
    with running(*engines(1)) as service, pytest.raises(UnsupportedByEngineError, match="embed"):
        service.encode([5])


# Event loops


async def test_everything_that_waits_has_a_twin_for_event_loops():
    with running(*engines(2)) as service:
        assert ids(await service.agenerate([[5], [6]], TWO_TOKENS)) == [[8, 9], [9, 10]]
        assert (await service.agenerate([5], TWO_TOKENS)).outputs[0].token_ids == [8, 9]
        assert first_tokens(await service.agenerate_batch(prompts([5], [6]), TWO_TOKENS)) == [8, 9]
        await service.acheck_health()
        assert await service.areset_prefix_cache()
        await service.areset_mm_cache()
        assert await service.aget_num_unfinished_requests() == [0, 0]
        assert await service.aget_cache_usage(1) == 0.0
        assert (await service.aadd_lora("poet", "/adapters/poet")).name == "poet"
        assert len(await service.alist_loras()) == 1
        assert (await service.apin_lora("poet")).name == "poet"
        assert await service.aremove_lora("poet")
        await service.asleep(1)
        assert await service.ais_sleeping()
        await service.awake_up()
        await service.astart_profile()
        await service.astop_profile()
        assert (await service.astats()).num_serving == 2
        assert "rl_vllm" in await service.aprometheus()
        with pytest.raises(BadPromptError):
            await service.agenerate([[]], TWO_TOKENS)
    with pytest.raises(ServiceNotRunningError, match="acheck_health"):
        await service.acheck_health()
    with pytest.raises(ServiceNotRunningError):
        await service.agenerate([5], TWO_TOKENS)


async def test_encode_is_awaited_too():
    with running(FakeEngine(info=EMBEDDING_MODEL)) as service:
        assert (await service.aencode([5, 6])).outputs.embedding == [2.0, 11.0]


async def test_cancelling_the_caller_aborts_everything_in_the_engines():
    gate = Gate()
    (one,) = engines(1, gate=lambda _: gate)
    with running(one) as service:
        work = asyncio.create_task(service.agenerate([[5], [6]], replace(TWO_TOKENS, n=2)))
        await asyncio.to_thread(gate.wait_until_held, 2)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        deadline = time.monotonic() + EVENTUALLY_S
        while sorted(one.aborted) != [0, 1]:
            assert time.monotonic() < deadline, f"aborted only {one.aborted}"
            await asyncio.sleep(0.005)
        assert await service.aget_num_unfinished_requests() == [0]
        assert (await service.astats()).outstanding_requests == 0


async def test_a_deadline_passes_on_an_event_loop_too():
    gate = Gate()
    (one,) = engines(1, gate=lambda _: gate)
    with running(one) as service:
        with pytest.raises(DeadlineError, match=r"0\.03 s waiting for 1 prompts"):
            await service.agenerate([[5]], TWO_TOKENS, timeout_seconds=0.03)
        assert one.aborted == [0]


def test_threads_and_event_loops_ask_at_once():
    gate = Gate()
    fakes = engines(2, gate=lambda _: gate)

    async def several(start: int) -> list[list[int]]:
        outputs = await asyncio.gather(*(service.agenerate([[start + i]], TWO_TOKENS) for i in range(4)))
        return ids([output for (output,) in outputs])

    with running(*fakes) as service, ThreadPoolExecutor(4) as pool:
        loops = [pool.submit(asyncio.run, several(start)) for start in (5, 15)]
        threads = [pool.submit(ask, service, [[25]], TWO_TOKENS), pool.submit(ask, service, [[35]], TWO_TOKENS)]
        gate.wait_until_held(10, timeout_s=EVENTUALLY_S)
        gate.open()
        assert [work.result(EVENTUALLY_S) for work in loops] == [
            [[start + 3 + i, start + 4 + i] for i in range(4)] for start in (5, 15)
        ]
        assert [ids(work.result(EVENTUALLY_S)) for work in threads] == [[[28, 29]], [[38, 39]]]


def test_an_event_loop_that_is_closed_in_the_middle_harms_nobody(caplog):
    gate = Gate()
    (one,) = engines(1, gate=lambda _: gate)
    with running(one) as service:
        loop = asyncio.new_event_loop()
        # Says nothing of the task that is left behind.
        loop.set_exception_handler(lambda _loop, _context: None)
        left_behind = loop.create_task(service.agenerate([5], TWO_TOKENS))
        while not one.batches:
            loop.run_until_complete(asyncio.sleep(0.005))
        loop.close()
        gate.open()
        assert ids(ask(service, [[5]], TWO_TOKENS)) == [[8, 9]]
        assert not left_behind.done()
    assert not [record for record in caplog.records if record.exc_info]


def test_a_blocking_call_on_the_services_own_loop_is_refused():
    seen = []

    def log(_sample) -> None:
        try:
            service.metrics()
        except RuntimeError as error:
            seen.append(str(error))

    with running(*engines(1), metrics_period_s=0.01) as service:
        service.add_logger("curious", log)
        deadline = time.monotonic() + EVENTUALLY_S
        while not seen:
            assert time.monotonic() < deadline, "no sample came"
            time.sleep(0.005)
        service.remove_logger("curious")
    assert "would wait for itself" in seen[0]

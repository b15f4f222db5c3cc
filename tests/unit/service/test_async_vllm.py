"""The service as its users call it, over fake engines."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rl_vllm import AsyncVLLM
from rl_vllm.config import HealthConfig
from rl_vllm.errors import (
    BadPromptError,
    ConfigError,
    DeadlineError,
    EngineStartError,
    GenerationError,
    ServiceNotRunningError,
)
from rl_vllm.protocols import GenerationService
from rl_vllm.service.router import warm_up
from rl_vllm.testing import FakeEngine, FakeEngineScript, FakeExecutor, FakeExecutorScript, Gate
from rl_vllm.testing.answers import FAKE_MODEL
from rl_vllm.types import BadPrompt, FinishReason, InFlight, KVCache, SamplingConfig

from .conftest import TWO_TOKENS, answering, engines, first_tokens, prompts, running, service_config, update

FOUR = prompts([5], [6], [7], [8])
ANSWERS = [8, 9, 10, 11]
NO_RESTARTS = HealthConfig(max_restarts=0)

CALLS = {
    "check_health()": lambda service: service.check_health(),
    "encode()": lambda service: service.encode([5]),
    "stream_generate()": lambda service: service.stream_generate([5]),
    "add_request()": lambda service: service.add_request([5]),
    "abort()": lambda service: service.abort("r"),
    "get_num_unfinished_requests()": lambda service: service.get_num_unfinished_requests(),
    "get_cache_usage()": lambda service: service.get_cache_usage(),
    "get_random_actor_index()": lambda service: service.get_random_actor_index(),
    "collective_rpc()": lambda service: service.collective_rpc("ping"),
    "add_lora()": lambda service: service.add_lora("poet", "/poet"),
    "list_loras()": lambda service: service.list_loras(),
    "sleep()": lambda service: service.sleep(),
    "wake_up()": lambda service: service.wake_up(),
    "is_sleeping()": lambda service: service.is_sleeping(),
    "start_profile()": lambda service: service.start_profile(),
    "get_vllm_config()": lambda service: service.get_vllm_config(),
    "get_tokenizer()": lambda service: service.get_tokenizer(),
    "stats()": lambda service: service.stats(),
    "prometheus()": lambda service: service.prometheus(),
    "timeline()": lambda service: service.timeline(),
    "add_replicas()": lambda service: service.add_replicas(1),
    "remove_replica()": lambda service: service.remove_replica(0),
    "create_load_balancer()": lambda service: service.create_load_balancer(),
    "generate()": lambda service: service.generate([5]),
    "generate_batch()": lambda service: service.generate_batch(FOUR, TWO_TOKENS),
    "model_info()": lambda service: service.model_info(),
    "weight_version": lambda service: service.weight_version,
    "metrics()": lambda service: service.metrics(),
    "reset_prefix_cache()": lambda service: service.reset_prefix_cache(),
    "weight_specs()": lambda service: service.weight_specs(),
    "stage_weights()": lambda service: service.stage_weights(update(1), timeout_s=1.0),
    "commit_weights()": lambda service: service.commit_weights(
        update(1), in_flight=InFlight.KEEP, kv=KVCache.REUSE, timeout_s=1.0
    ),
}


def until(condition) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.005)


@pytest.fixture
def pool():
    with ThreadPoolExecutor() as threads:
        yield threads


# Life of the service


@pytest.mark.parametrize("call", CALLS)
def test_every_call_before_launch_and_after_shutdown_says_what_to_do(call):
    service = AsyncVLLM(service_config(1), executor=FakeExecutor(engines(1)))
    with pytest.raises(ServiceNotRunningError, match="not launched: build one with") as raised:
        CALLS[call](service)
    assert raised.value.call == call
    service.start()
    service.shutdown()
    with pytest.raises(ServiceNotRunningError, match="shut down") as raised:
        CALLS[call](service)
    assert raised.value.call == call


def test_the_executor_is_used_from_beginning_to_end_and_every_engine_is_stopped_once():
    fakes = engines(3)
    executor = FakeExecutor(fakes)
    with AsyncVLLM(service_config(3), executor=executor) as service:
        service.start()
        assert executor.events == ["prepare", "launch"]
    service.shutdown()
    service.shutdown()
    assert executor.events == ["prepare", "launch", "close", "release"]
    assert [fake.num_shutdowns for fake in fakes] == [1, 1, 1]


def test_a_service_that_was_never_launched_can_be_shut_down():
    executor = FakeExecutor(engines(1))
    service = AsyncVLLM(service_config(1), executor=executor)
    service.shutdown()
    assert executor.events == []
    with pytest.raises(ServiceNotRunningError, match="shut down"):
        service.start()


def test_a_start_that_fails_stops_everything_and_tells_the_engines_reason():
    others = set(threading.enumerate())
    fakes = engines(2)
    executor = FakeExecutor(
        fakes, script=FakeExecutorScript(launch_error=EngineStartError(1, "ValueError: no such model"))
    )
    service = AsyncVLLM(service_config(2), executor=executor)
    with pytest.raises(EngineStartError, match="replica 1 did not start: ValueError: no such model"):
        service.start()
    assert executor.events == ["prepare", "launch", "close", "release"]
    assert [fake.num_shutdowns for fake in fakes] == [1, 1]
    assert "rl_vllm-service" not in [thread.name for thread in set(threading.enumerate()) - others]


def test_a_start_that_is_refused_has_started_nothing():
    executor = FakeExecutor(engines(2))
    with pytest.raises(ConfigError, match="num_replicas=3, but the executor has 2 engines"):
        AsyncVLLM(service_config(3), executor=executor).start()
    assert executor.events == []


def test_a_shutdown_while_the_engines_start_ends_the_start(pool):
    gate = Gate()
    executor = FakeExecutor(engines(1), script=FakeExecutorScript(launch_gate=gate))
    service = AsyncVLLM(service_config(1), executor=executor)
    starting = pool.submit(service.start)
    gate.wait_until_held()
    service.shutdown()
    with pytest.raises(ServiceNotRunningError, match="shut down"):
        starting.result(10)
    assert executor.events == ["prepare", "launch", "close", "release"]


def test_a_shutdown_while_a_call_runs_ends_the_call_with_an_error(pool):
    gate = Gate()
    (one,) = engines(1, gate=lambda _: gate)
    with running(one) as service:
        work = pool.submit(service.generate_batch, FOUR, TWO_TOKENS)
        gate.wait_until_held(4)
        service.shutdown()
        with pytest.raises(ServiceNotRunningError, match="shut down"):
            work.result(10)


async def test_a_service_lives_on_an_event_loop_too():
    executor = FakeExecutor(engines(2))
    async with AsyncVLLM(service_config(2), executor=executor) as service:
        await service.astart()
        assert first_tokens(await service.agenerate_batch(FOUR, TWO_TOKENS)) == ANSWERS
        assert await service.aget_tokenizer() is None
        assert await service.aweight_specs() == ()
        await service.astage_weights(update(1), timeout_s=10.0)
        await service.acommit_weights(update(1), in_flight=InFlight.KEEP, kv=KVCache.REUSE, timeout_s=10.0)
        assert service.weight_version == 1
    assert executor.events == ["prepare", "launch", "close", "release"]
    with pytest.raises(ServiceNotRunningError, match="shut down"):
        await service.astart()


async def test_cancelling_a_start_stops_what_has_been_started():
    gate = Gate()
    executor = FakeExecutor(engines(1), script=FakeExecutorScript(launch_gate=gate))
    service = AsyncVLLM(service_config(1), executor=executor)
    starting = asyncio.create_task(service.astart())
    await asyncio.to_thread(gate.wait_until_held)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert executor.events == ["prepare", "launch", "close", "release"]


def test_facts_of_the_model_and_the_service():
    with running(*engines(2)) as service:
        assert service.model_info() == FAKE_MODEL
        assert service.num_replicas == 2
        assert service.get_tokenizer() is None
        front: GenerationService = service
        assert front.weight_version == 0


# Answers


def test_a_batch_is_answered_in_order_whatever_order_it_finishes_in(pool):
    # Odd prompts finish first, on both replicas.
    gate = Gate()
    fakes = engines(2, gate=lambda request: gate if request.prompt_T[0] % 3 else None)
    rows = prompts(*([row] for row in range(5, 21)))
    with running(*fakes) as service:
        work = pool.submit(service.generate_batch, rows, SamplingConfig(n=3, max_tokens=4, ignore_eos=True))
        gate.wait_until_held(11)
        gate.open()
        batch = work.result(10)
    assert batch.numbers_N.tolist() == [row for row in range(16) for _ in range(3)]
    assert batch.samples_N.tolist() == [0, 1, 2] * 16
    assert first_tokens(batch) == [3 + prompt + 5 * sample for prompt in range(5, 21) for sample in range(3)]


def test_an_empty_batch_returns_at_once():
    (one,) = engines(1)
    with running(one) as service:
        assert len(service.generate_batch(prompts(), TWO_TOKENS)) == 0
        assert service.generate([]) == []
    assert one.batches == []


def test_generate_gives_one_output_for_one_prompt_and_a_list_for_a_list():
    with running(*engines(2)) as service:
        alone = service.generate([5, 6, 7], TWO_TOKENS, use_tqdm=False)
        listed = service.generate([[5, 6, 7], [5]], TWO_TOKENS, use_tqdm=False)
        by_ids = service.generate(prompt_token_ids=[[5]], sampling_params=TWO_TOKENS, use_tqdm=False)
    # 3 + 18 and the next; 3 + 5 and the next.
    assert alone.outputs[0].token_ids == [21, 22]
    assert [output.outputs[0].token_ids for output in listed] == [[21, 22], [8, 9]]
    assert [output.outputs[0].token_ids for output in by_ids] == [[8, 9]]
    assert alone.outputs[0].text == ""
    assert alone.prompt_token_ids == [5, 6, 7]


def test_generate_without_settings_uses_vllms_defaults_and_gives_no_logprobs():
    (one,) = engines(1)
    with running(one) as service:
        output = service.generate([5], use_tqdm=False)
        with_logprobs = service.generate([5], TWO_TOKENS, use_tqdm=False)
    assert one.batches[0].sampling_B == (SamplingConfig(max_tokens=16),)
    assert output.outputs[0].logprobs is None
    # Ids 8 and 9: -(1 + 8 % 7) / 8 and -(1 + 9 % 7) / 8.
    assert with_logprobs.outputs[0].cumulative_logprob == -0.25 - 0.375


def test_a_progress_bar_counts_prompts(capsys):
    with running(*engines(1)) as service:
        service.generate([[5], [6]], SamplingConfig(n=2, max_tokens=2))
        assert "2/2" in capsys.readouterr().err
        service.generate([5], TWO_TOKENS, use_tqdm=False)
        assert capsys.readouterr().err == ""


def test_responses_are_clamped_and_seeded_row_by_row():
    (one,) = engines(1)
    with running(one) as service:
        batch = service.generate_batch(prompts([5] * 62, [5]), SamplingConfig(max_tokens=10, seed=2**62))
    short, full = one.batches[0].sampling_B
    assert (short.max_tokens, full.max_tokens) == (2, 10)
    assert None not in (short.seed, full.seed)
    assert short.seed != full.seed
    assert batch.lengths_N[0] <= 2


def test_a_bad_prompt_refuses_the_batch_before_anything_is_sent():
    (one,) = engines(1)
    with running(one) as service:
        with pytest.raises(BadPromptError, match="prompt 1: it is empty"):
            service.generate_batch(prompts([5], []), TWO_TOKENS)
        with pytest.raises(BadPromptError, match="prompt 0: token id 64"):
            service.generate([64], use_tqdm=False)
    assert one.batches == []


def test_a_marked_bad_prompt_fails_alone():
    with running(*engines(2)) as service:
        batch = service.generate_batch(prompts([5], [], [7], [64], [9]), TWO_TOKENS, on_bad_prompt=BadPrompt.MARK)
    assert batch.numbers_N.tolist() == [0, 2, 4]
    assert first_tokens(batch) == [8, 10, 12]
    assert [failure.number for failure in batch.failures] == [1, 3]


def test_a_request_the_engine_refuses_raises_or_is_marked_with_the_bad_prompts_in_row_order():
    # Of rows 0, 2 and 3 the second is sent as number 1, and again as number 4.
    fake = FakeEngine(script=answering(failures={1: "no KV block", 4: "no KV block"}))
    with running(fake) as service:
        marked = service.generate_batch(prompts([5], [], [7], [8]), TWO_TOKENS, on_bad_prompt=BadPrompt.MARK)
        assert marked.numbers_N.tolist() == [0, 3]
        assert [(f.number, f.reason) for f in marked.failures][1] == (2, "no KV block")
        with pytest.raises(GenerationError, match="1 prompts failed; first, prompt 1: no KV block") as raised:
            service.generate_batch(prompts([5], [7], [8]), TWO_TOKENS)
        assert raised.value.failures == ((1, "no KV block"),)


def test_what_ended_a_response_is_told():
    fake = FakeEngine(script=answering(stops={0: 41}, finish={1: FinishReason.ERROR}))
    with running(fake) as service:
        batch = service.generate_batch(prompts([5], [6]), TWO_TOKENS)
    assert batch.finish_N.tolist() == [FinishReason.STOP, FinishReason.ERROR]
    assert batch.stops_N == (41, None)


def test_an_engine_that_dies_is_not_seen_by_the_caller():
    dying, well = FakeEngine(0, script=FakeEngineScript(dies_after=1)), FakeEngine(1)
    with running(dying, well, health=NO_RESTARTS) as service:
        assert first_tokens(service.generate_batch(FOUR, TWO_TOKENS)) == ANSWERS
        metrics = service.metrics()
    assert metrics[0] is None
    assert metrics[1].generated_tokens == 6


def test_metrics_find_a_replica_that_died_idle():
    one, two = engines(2)
    with running(one, two, health=NO_RESTARTS) as service:
        one.kill("out of memory")
        assert [metrics is None for metrics in service.metrics()] == [True, False]
        assert first_tokens(service.generate_batch(FOUR, TWO_TOKENS)) == ANSWERS
    assert one.batches == []


def test_the_prefix_cache_is_reset_unless_a_request_holds_it(pool):
    gate = Gate()
    with running(*engines(2, gate=lambda request: gate)) as service:
        assert service.reset_prefix_cache()
        work = pool.submit(service.generate_batch, prompts([5]), TWO_TOKENS)
        gate.wait_until_held()
        assert not service.reset_prefix_cache()
        gate.open()
        work.result(10)
        assert service.reset_prefix_cache()


# Deadlines and threads


def test_a_deadline_aborts_everything_in_the_engines_and_the_service_goes_on():
    never = Gate()
    fakes = engines(2, gate=lambda request: never if request.prompt_T[0] > 5 else None)
    with running(*fakes) as service:
        with pytest.raises(DeadlineError, match=r"gave up after 0\.05 s waiting for 4 prompts"):
            service.generate_batch(FOUR, TWO_TOKENS, timeout_s=0.05)
        assert sorted(fakes[0].aborted + fakes[1].aborted) == [1, 2, 3]
        assert [metrics.num_running for metrics in service.metrics()] == [0, 0]
        assert first_tokens(service.generate_batch(prompts([5]), TWO_TOKENS)) == [8]


def test_the_deadline_comes_from_the_call_or_else_from_the_config():
    never = Gate()
    with running(*engines(1, gate=lambda _: never), request_timeout_s=0.02) as service:
        with pytest.raises(DeadlineError, match=r"0\.02 s"):
            service.generate([5], use_tqdm=False)
        with pytest.raises(DeadlineError, match=r"0\.03 s"):
            service.generate([5], use_tqdm=False, timeout_seconds=0.03)
        with pytest.raises(DeadlineError, match="after 0 s"):
            service.generate([5], use_tqdm=False, timeout_seconds=0)


def test_other_calls_have_the_configured_deadline():
    class Deaf(FakeEngine):
        async def metrics(self):
            await Gate().passed()

    with running(Deaf(0), rpc_timeout_s=0.02) as service, pytest.raises(DeadlineError, match="waiting for replica 0"):
        service.metrics()


def test_many_threads_may_generate_at_once(pool):
    gate = Gate()
    fakes = engines(2, gate=lambda _: gate)
    with running(*fakes) as service:
        batches = [prompts([5 + i], [25 + i]) for i in range(8)]
        work = [pool.submit(service.generate_batch, batch, TWO_TOKENS) for batch in batches[:4]]
        work += [pool.submit(service.generate, [[5 + i], [25 + i]], TWO_TOKENS, use_tqdm=False) for i in range(4, 8)]
        gate.wait_until_held(len(work))
        gate.open()
        results = [each.result(10) for each in work]
    assert [first_tokens(batch) for batch in results[:4]] == [[8 + i, 28 + i] for i in range(4)]
    firsts = [[output.outputs[0].token_ids[0] for output in outputs] for outputs in results[4:]]
    assert firsts == [[8 + i, 28 + i] for i in range(4, 8)]


async def test_generate_works_inside_a_running_event_loop():
    with running(*engines(2)) as service:
        assert asyncio.get_running_loop().is_running()
        assert first_tokens(service.generate_batch(FOUR, TWO_TOKENS)) == ANSWERS
        assert service.generate([5], TWO_TOKENS, use_tqdm=False).outputs[0].token_ids == [8, 9]


def test_a_service_that_has_started_has_compiled_its_routing():
    warm_up.cache_clear()
    with running(*engines(1)):
        assert warm_up.cache_info().currsize == 1


def test_launch_takes_a_config_and_an_executor():
    config = service_config(2).engine
    service = AsyncVLLM.launch(config, num_replicas=2, executor=FakeExecutor(engines(2)))
    try:
        assert first_tokens(service.generate_batch(FOUR, TWO_TOKENS)) == ANSWERS
    finally:
        service.shutdown()

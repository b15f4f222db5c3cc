"""Health, counts and what else an engine interface offers, on all replicas and on one."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

from rl_vllm import AsyncVLLM
from rl_vllm.config import HealthConfig
from rl_vllm.errors import (
    ConfigError,
    DeadlineError,
    EngineDiedError,
    NoReplicaServesError,
    ReplicaCallError,
    ReplicaIndexError,
    UnsupportedByEngineError,
)
from rl_vllm.service.adapters import AdapterRegistry
from rl_vllm.service.fan_out import FanOut
from rl_vllm.service.replicas import ReplicaSet
from rl_vllm.testing import FakeEngine, FakeExecutor, Gate
from rl_vllm.types import EngineMetrics, InFlight, KVCache

from .conftest import TWO_TOKENS, engines, first_tokens, prompts, running, service_config, update

FOUR = prompts([5], [6], [7], [8])
ANSWERS = [8, 9, 10, 11]
NO_RESTARTS = HealthConfig(max_restarts=0)


def until(condition) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.005)


@contextmanager
def engine_like_vllms(*, traces: str | None = None):
    """A service over one engine that has vLLM's configuration."""

    class Engine(FakeEngine):
        async def engine_config(self) -> object:
            return SimpleNamespace(
                model_config="model",
                parallel_config="parallel",
                scheduler_config="scheduler",
                lora_config=None,
                structured_outputs_config="structured outputs",
                observability_config=SimpleNamespace(otlp_traces_endpoint=traces),
            )

        async def collective_rpc(self, method, *, timeout_s, args=(), kwargs=None):
            return [(method, args, kwargs, rank) for rank in range(2)]

    with running(Engine(0), Engine(1)) as service:
        yield service


def test_properties_tell_the_life_of_a_service():
    service = AsyncVLLM(service_config(1, health=NO_RESTARTS), executor=FakeExecutor(engines(1)))
    life = [(service.is_running, service.is_stopped, service.errored, service.dead_error)]
    service.start()
    life.append((service.is_running, service.is_stopped, service.errored, service.dead_error))
    service._executor.engines[0].kill("out of memory")
    with pytest.raises(NoReplicaServesError):
        service.generate_batch(FOUR, TWO_TOKENS)
    assert (service.is_running, service.is_stopped, service.errored) == (False, True, True)
    assert "out of memory" in str(service.dead_error)
    service.shutdown()
    life.append((service.is_running, service.is_stopped, service.errored, None))
    assert life == [(False, False, False, None), (True, False, False, None), (False, True, False, None)]


def test_a_replica_is_known_without_asking_it():
    one, two = engines(2)
    with running(one, two, health=NO_RESTARTS) as service:
        view = service.replica(1)
        assert (view.index, view.is_running, view.is_stopped, view.errored, view.dead_error) == (
            1,
            True,
            False,
            False,
            None,
        )
        two.kill("out of memory")
        with pytest.raises(ReplicaCallError, match="replica 1: replica 1 died: out of memory"):
            service.check_health()
        assert (view.is_running, view.is_stopped, view.errored) == (False, True, True)
        assert "restarts are used up" in view.dead_error.reason
        service.check_health(0)
        with pytest.raises(EngineDiedError, match="it is retired"):
            service.check_health(1)
        with pytest.raises(ReplicaIndexError):
            service.replica(2)


def test_counts_come_from_the_engines():
    class Busy(FakeEngine):
        async def metrics(self) -> EngineMetrics:
            return EngineMetrics(num_running=3, num_waiting=4, kv_cache_usage=0.25, generated_tokens=0)

    with running(FakeEngine(0), Busy(1)) as service:
        assert service.get_num_unfinished_requests() == [0, 7]
        assert service.get_num_unfinished_requests(1) == 7
        assert service.get_cache_usage() == [0.0, 0.25]
        assert service.get_cache_usage(actor_index=1) == 0.25
        for index in (2, -1, True):
            with pytest.raises(ReplicaIndexError, match=r"give one of \[0, 1\]"):
                service.get_cache_usage(index)
            with pytest.raises(IndexError):
                service.get_num_unfinished_requests(index)


def test_a_dead_engines_counts_are_unknown_and_not_zero():
    one, two = engines(2)
    with running(one, two, health=NO_RESTARTS) as service:
        two.kill("out of memory")
        assert service.metrics()[1] is None
        assert service.get_num_unfinished_requests() == [0, None]
        assert service.get_cache_usage(1) is None


def test_a_random_index_is_that_of_a_replica_that_serves():
    fakes = engines(3)
    with running(*fakes, health=NO_RESTARTS) as service:
        fakes[1].kill("out of memory")
        service.metrics()
        found = {service.get_random_actor_index() for _ in range(200)}
    assert found == {0, 2}


def test_a_worker_method_is_called_on_every_worker_of_every_replica():
    with engine_like_vllms() as service:
        assert (
            service.collective_rpc("ping", None, (1,), {"a": 2})
            == [[("ping", (1,), {"a": 2}, 0), ("ping", (1,), {"a": 2}, 1)]] * 2
        )
        assert service.collective_rpc("ping", actor_index=1) == [[("ping", (), None, 0), ("ping", (), None, 1)]]
    with running(*engines(2)) as service, pytest.raises(ReplicaCallError, match="no workers to call 'ping' on"):
        service.collective_rpc("ping")


def test_a_worker_method_has_its_deadline():
    class Deaf(FakeEngine):
        async def collective_rpc(self, method, *, timeout_s, args=(), kwargs=None):
            await Gate().passed()

    with (
        running(Deaf(0)) as service,
        pytest.raises(DeadlineError, match=r"0\.03 s waiting for replica 0 to answer collective_rpc\('ping'\)"),
    ):
        service.collective_rpc("ping", 0.03)


def test_profiles_and_caches_reach_every_replica_or_one():
    fakes = engines(2)
    with running(*fakes) as service:
        service.start_profile()
        assert [fake.profiling for fake in fakes] == [True, True]
        service.stop_profile(actor_index=0)
        assert [fake.profiling for fake in fakes] == [False, True]
        service.stop_profile()
        service.reset_mm_cache()
        assert service.reset_prefix_cache(actor_index=1)


@pytest.mark.parametrize(("long", "limits"), [(False, (0.02, None)), (True, (0.1, 0.02))])
def test_a_replica_that_does_not_answer_is_named_and_an_adapter_is_undone_on_the_others(long, limits):
    well, hung = engines(2)
    hung.hang()

    async def scenario() -> None:
        replicas = ReplicaSet([well, hung])
        on_replicas = FanOut(replicas, lambda _: nullcontext(), limit_s=limits[0], long_limit_s=limits[1])
        with pytest.raises(ReplicaCallError, match=r"failed on 1 replicas: replica 1: gave up after 0\.02 s"):
            await on_replicas("check_health()", lambda engine: engine.check_health(), long=long)
        if long:
            with pytest.raises(ReplicaCallError, match=r"replica 1: gave up after 0\.02 s"):
                await AdapterRegistry(on_replicas).add("poet", "/adapters/poet")
            assert well.adapters == {}

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


def test_an_engine_that_refused_hides_no_other_that_did_not_answer():
    class Plain(FakeEngine):
        async def check_health(self) -> None:
            raise ConfigError("not this")

    hung = FakeEngine(1)
    hung.hang()

    async def scenario() -> None:
        replicas = ReplicaSet([Plain(0), hung])
        with pytest.raises(ReplicaCallError, match="failed on 2 replicas"):
            await FanOut(replicas, lambda _: nullcontext())("x()", lambda e: e.check_health(), within_s=0.02)

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


@pytest.mark.parametrize("kind", [ConfigError, UnsupportedByEngineError])
def test_what_no_engine_can_do_is_its_own_error_and_names_no_replica(kind):
    class Plain(FakeEngine):
        async def start_profile(self) -> None:
            raise kind("it was started without a profiler")

    with running(Plain(0), Plain(1)) as service, pytest.raises(kind, match=r"^it was started without a profiler$"):
        service.start_profile()
    with (
        running(FakeEngine(0), Plain(1)) as service,
        pytest.raises(ReplicaCallError, match="replica 1: it was started"),
    ):
        service.start_profile()


def test_settings_of_the_engines_are_vllms_own():
    with engine_like_vllms(traces="grpc://here") as service:
        assert service.get_vllm_config(1).model_config == "model"
        assert service.get_model_config() == "model"
        assert service.get_parallel_config(actor_index=1) == "parallel"
        assert service.get_scheduler_config() == "scheduler"
        assert service.get_lora_config() is None
        assert service.get_decoding_config() == "structured outputs"
        assert service.is_tracing_enabled()
        assert service.get_input_preprocessor().preprocess([5]) == {"prompt_token_ids": [5]}
        with pytest.raises(ReplicaIndexError):
            service.get_model_config(2)
    with engine_like_vllms() as service:
        assert not service.is_tracing_enabled()
    with running(*engines(1)) as service, pytest.raises(UnsupportedByEngineError, match="no VllmConfig, but ModelInfo"):
        service.get_model_config()


def test_loggers_are_fed_until_they_are_removed(caplog):
    seen = []
    with running(*engines(2), metrics_period_s=None) as service:
        service.add_logger("list", seen.append)
        with pytest.raises(ConfigError, match="a logger is called 'list' already"):
            service.add_logger("list", seen.append)
        with caplog.at_level(logging.INFO, "rl_vllm.service.overview"):
            service.do_log_stats()
        until(lambda: {sample.replica for sample in seen} == {0, 1})
        assert [sample.replica for sample in service.timeline()] == [0, 1]
        service.remove_logger("list")
        with pytest.raises(ConfigError, match="no logger is called 'list'"):
            service.remove_logger("list")
        count = len(seen)
        service.do_log_stats()
        assert len(service.timeline()) == 4
        assert len(seen) == count
        service.clear_timeline()
        assert service.timeline() == []
    lines = [record.getMessage() for record in caplog.records if "kv_usage" in record.getMessage()]
    assert [line.partition(":")[0] for line in lines[:2]] == ["replica 0", "replica 1"]


def test_a_person_sees_the_replicas():
    service = AsyncVLLM(service_config(2), executor=FakeExecutor(engines(2)))
    assert "not launched" in str(service)
    with service:
        service.generate_batch(FOUR, TWO_TOKENS)
        assert "2 of 2 replicas serve" in str(service)
        assert service.__rich__() == str(service)
        stats = service.stats()
        assert (stats.counters.requests, stats.counters.completed, stats.outstanding_requests) == (4, 4, 0)
        text = service.prometheus()
        assert "rl_vllm_requests_total 4.0" in text
        assert 'vllm:generation_tokens_total{replica="1"}' in text
    assert "shut down" in str(service)


def test_replicas_come_and_go():
    fakes = engines(1)
    with running(*fakes) as service:
        assert service.add_replicas(2) == [1, 2]
        assert service.num_replicas == 3
        assert len(service.generate_batch(FOUR, TWO_TOKENS, actor_index=2)) == 4
        service.remove_replica(0)
        assert service.num_replicas == 2
        with pytest.raises(ReplicaIndexError, match=r"give one of \[1, 2\]"):
            service.generate_batch(FOUR, TWO_TOKENS, actor_index=0)
        assert first_tokens(service.generate_batch(FOUR, TWO_TOKENS)) == ANSWERS
        with pytest.raises(ConfigError):
            service.add_replicas(0)
        with pytest.raises(ReplicaIndexError):
            service.remove_replica(0)
    assert fakes[0].num_shutdowns >= 1


def test_a_balancer_is_attached_and_another_one_changes_how_calls_are_routed():
    fakes = engines(3)
    with running(*fakes) as service:
        assert service.load_balancer.select_actor([5, 6, 7]) in (0, 1, 2)
        assert service.load_balancer.get_stats()["strategies"] == ["prefix-aware", "requests"]
        balancer = service.create_load_balancer("round-robin")
        assert service.load_balancer is balancer
        assert sorted(balancer.select_actor() for _ in range(3)) == [0, 1, 2]
        for _ in range(3):
            service.generate_batch(prompts([5] * 40), TWO_TOKENS)
        assert [len(fake.batches) for fake in fakes] == [1, 1, 1]
        for wrong in ("fastest", (), ["round-robin", "x"]):
            with pytest.raises(ConfigError):
                service.create_load_balancer(wrong)
        with pytest.raises(ConfigError):
            service.create_load_balancer(prefix_length=0)
        assert service.load_balancer is balancer


def test_a_refit_tells_the_router_that_took_the_first_ones_place():
    with running(*engines(2)) as service:
        service.create_load_balancer("prefix-aware")
        service.generate_batch(prompts([5] * 40), TWO_TOKENS)
        assert service.stats().routing.prefixes > 0
        service.stage_weights(update(1), timeout_s=10.0)
        service.commit_weights(update(1), in_flight=InFlight.KEEP, kv=KVCache.RECOMPUTE, timeout_s=10.0)
        assert service.stats().routing.prefixes == 0

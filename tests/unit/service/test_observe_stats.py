from __future__ import annotations

import re
from dataclasses import fields, replace

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from rl_vllm.service.observe.counters import ServiceCounters
from rl_vllm.service.observe.prometheus import engine_texts, prometheus_text
from rl_vllm.service.observe.sampler import Sampler
from rl_vllm.service.observe.stats import ServiceStats, service_stats
from rl_vllm.service.observe.table import not_running, table
from rl_vllm.service.replicas import ReplicaSet
from rl_vllm.service.router import RoutingStats
from rl_vllm.testing import FakeEngine
from rl_vllm.types import EngineMetrics, ReplicaState, ReplicaStats

BUSY = ReplicaStats(
    replica=0,
    state=ReplicaState.HEALTHY,
    reason="",
    version=3,
    restarts=0,
    outstanding_requests=5,
    outstanding_tokens=500,
    running=4,
    waiting=1,
    kv_usage=0.124,
    generated_tokens=12345,
    tokens_per_s=18123.4,
    prefix_hit_rate=0.5,
    age_s=0.25,
)
DOWN = replace(
    BUSY,
    replica=1,
    state=ReplicaState.RESTARTING,
    reason="engine core died",
    restarts=2,
    outstanding_requests=0,
    outstanding_tokens=0,
    running=None,
    waiting=None,
    kv_usage=None,
    generated_tokens=None,
    tokens_per_s=None,
    prefix_hit_rate=None,
    age_s=None,
)


def stats(*replicas: ReplicaStats, **changes: object) -> ServiceStats:
    counters = ServiceCounters(requests=400, completed=393, failed=1, cancelled=1, rerouted=7, tokens=51200, deaths=2)
    values: dict[str, object] = {
        "model": "tiny",
        "version": 3,
        "epoch": 4,
        "counters": counters,
        "routing": RoutingStats(),
    }
    return ServiceStats(**{**values, "replicas": replicas or (BUSY, DOWN), **changes})


class Scripted(FakeEngine):
    async def metrics(self) -> EngineMetrics:
        return EngineMetrics(
            num_running=4,
            num_waiting=1,
            kv_cache_usage=0.5,
            generated_tokens=90,
            prefix_cache_queries=40,
            prefix_cache_hits=10,
        )

    async def prometheus(self) -> str:
        await self.check_health()
        return f"own {self._replica}\n"


async def test_stats_are_what_driver_and_engines_know():
    replicas = ReplicaSet([Scripted(0), Scripted(1)])
    replicas.all[0].acquire(30)
    replicas.all[0].version = 2
    replicas.set_state(replicas.all[1], ReplicaState.DEAD, "killed")
    counters = ServiceCounters(requests=1)
    sampler = Sampler(replicas, period_s=None, timeout_s=60.0)
    await sampler.sample(within_s=60)
    seen = service_stats(replicas, counters, RoutingStats(), model="tiny", sampler=sampler)

    first, second = seen.replicas
    assert (first.outstanding_requests, first.outstanding_tokens, first.version) == (1, 30, 2)
    assert (first.running, first.waiting, first.kv_usage, first.generated_tokens) == (4, 1, 0.5, 90)
    assert first.prefix_hit_rate == 0.25
    assert (second.state, second.reason) == (ReplicaState.DEAD, "killed")
    assert (second.running, second.kv_usage, second.generated_tokens, second.age_s) == (None, None, None, None)
    assert (seen.version, seen.epoch, seen.num_serving, seen.outstanding_requests) == (2, 1, 1, 1)


async def test_stats_do_not_change_afterwards():
    replicas = ReplicaSet([Scripted(0)])
    counters = ServiceCounters(requests=1)
    sampler = Sampler(replicas, period_s=None, timeout_s=60.0)
    before = service_stats(replicas, counters, RoutingStats(), model="tiny", sampler=sampler)
    counters.requests += 1
    replicas.set_state(replicas.all[0], ReplicaState.DEAD, "killed")

    assert before.counters.requests == 1
    assert before.replicas[0].state is ReplicaState.HEALTHY


async def test_a_hit_rate_without_a_lookup_is_unknown():
    replicas = ReplicaSet([FakeEngine(0)])
    sampler = Sampler(replicas, period_s=None, timeout_s=60.0)
    await sampler.sample(within_s=60)
    seen = service_stats(replicas, ServiceCounters(), RoutingStats(), model="tiny", sampler=sampler)
    assert seen.replicas[0].prefix_hit_rate is None


def test_tokens_per_second_of_a_service_is_the_sum_of_what_is_known():
    assert stats(BUSY, replace(BUSY, tokens_per_s=1.6), DOWN).tokens_per_s == pytest.approx(18125.0)
    assert stats(DOWN).tokens_per_s is None


EXAMPLE = """\
tiny: 1 of 2 replicas serve version 3
replica  state       version  running  waiting  KV use  tokens/s  restarts
      0  healthy           3        4        1     12%    18,123         0
      1  restarting        3        -        -       -         -         2
replica 1 is restarting: engine core died
400 prompts: 393 answered, 1 failed, 1 cancelled, 5 outstanding; 0 more refused,
7 sent again; 51,200 tokens; 0 refits, 0 failed; 2 deaths"""


def test_the_plain_table_is_this():
    assert table(stats(), styled=False) == EXAMPLE


def without_style(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_on_a_terminal_the_table_says_the_same_in_colours():
    text = table(stats(), styled=True)
    assert "\x1b[32mhealthy" in text
    words = [line.split() for line in without_style(text).splitlines() if "─" not in line]
    assert words == [line.split() for line in EXAMPLE.splitlines()]


@pytest.mark.parametrize("styled", [False, True])
def test_a_large_service_fits_in_80_columns(styled):
    large = replace(
        BUSY,
        replica=511,
        state=ReplicaState.RESTARTING,
        reason="the engine [red]said[/red]\nthis: " + "word " * 50,
        version=1_234_567,
        running=1024,
        waiting=65536,
        kv_usage=1.0,
        tokens_per_s=1_234_567.0,
        restarts=99,
    )
    text = without_style(table(stats(BUSY, large, model="/models/" + "m" * 100), styled=styled))
    assert max(map(len, text.splitlines())) <= 80
    for value in ("511", "restarting", "1234567", "65536", "100%", "1,234,567", "99", "[red]said[/red] this:"):
        assert value in text


def test_a_service_that_does_not_run_is_one_line():
    assert not_running("/models/tiny", 2, "not launched") == "tiny: not launched (2 replicas)"
    assert not_running("org/tiny", 1, "shut down") == "org/tiny: shut down (1 replica)"


ENGINE_TEXT = """\
# HELP vllm:generation_tokens_total Tokens.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="a\\"b}"} %d.0
# HELP vllm:generation_tokens_created Tokens.
# TYPE vllm:generation_tokens_created gauge
vllm:generation_tokens_created{engine="0"} 1.5e+09
# HELP vllm:ttft_seconds Time.
# TYPE vllm:ttft_seconds histogram
vllm:ttft_seconds_bucket{le="0.5"} 1.0
vllm:ttft_seconds_bucket{le="+Inf"} 2.0
vllm:ttft_seconds_count 2.0
vllm:ttft_seconds_sum 0.75
# HELP vllm:cache_config_info Info.
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16"} 1.0
"""


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Value of each sample of a text by name and labels; each may be there once."""
    found = [sample for metric in text_string_to_metric_families(text) for sample in metric.samples]
    by_name = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in found}
    assert len(by_name) == len(found)
    return by_name


def key(name: str, **labels: object) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset((label, str(value)) for label, value in labels.items())


def test_every_counter_has_its_own_name_and_value_in_prometheus_text():
    names = [field.name for field in fields(ServiceCounters)]
    counters = ServiceCounters(**{name: 1000 + i for i, name in enumerate(names)})
    found = samples(prometheus_text(stats(counters=counters), {}))
    assert {name: found[key(f"rl_vllm_{name}_total")] for name in names} == {
        name: 1000 + i for i, name in enumerate(names)
    }


def test_every_figure_of_the_router_is_in_prometheus_text():
    told = RoutingStats(
        prefix=1, session=2, load=3, moved=4, turn=5, prefixes=6, sessions=7, per_replica=((0, 8), (5, 9))
    )
    found = samples(prometheus_text(stats(routing=told), {}))
    assert {
        cause: found[key("rl_vllm_routing_decisions_total", cause=cause)]
        for cause in ("prefix", "session", "load", "moved", "turn")
    } == {"prefix": 1, "session": 2, "load": 3, "moved": 4, "turn": 5}
    assert (found[key("rl_vllm_routing_prefixes")], found[key("rl_vllm_routing_sessions")]) == (6, 7)
    assert [found[key("rl_vllm_routing_given_total", replica=index)] for index in (0, 5)] == [8, 9]


def test_each_replica_has_its_gauges_and_what_is_unknown_has_no_sample():
    found = samples(prometheus_text(stats(), {}))
    assert found[key("rl_vllm_replica_running", replica=0)] == 4
    assert found[key("rl_vllm_replica_kv_usage", replica=0)] == 0.124
    assert found[key("rl_vllm_replica_tokens_per_s", replica=0)] == 18123.4
    assert found[key("rl_vllm_replica_restarts", replica=1)] == 2
    assert found[key("rl_vllm_replica_outstanding_requests", replica=1)] == 0
    unknown = ("running", "waiting", "kv_usage", "generated_tokens", "tokens_per_s", "prefix_hit_rate")
    assert [name for name in unknown if key(f"rl_vllm_replica_{name}", replica=1) in found] == []


def test_a_replica_is_in_one_state():
    found = samples(prometheus_text(stats(), {}))
    assert {state for state in ReplicaState if found[key("rl_vllm_replica_state", replica=1, state=state.value)]} == {
        ReplicaState.RESTARTING
    }


def test_the_service_has_its_gauges():
    found = samples(prometheus_text(stats(), {}))
    names = ("weight_version", "epoch_total", "serving_replicas", "outstanding_requests")
    assert [found[key(f"rl_vllm_{name}")] for name in names] == [3, 4, 1, 5]


def test_the_engines_own_metrics_get_a_label_and_lose_none():
    texts = {0: ENGINE_TEXT % 11, 7: ENGINE_TEXT % 22}
    found = samples(prometheus_text(stats(), texts))
    for index, text in texts.items():
        for (name, labels), value in samples(text).items():
            assert found[name, labels | {("replica", str(index))}] == value
    assert found[key("vllm:generation_tokens_total", engine=0, model_name='a"b}', replica=7)] == 22


def test_every_name_has_one_help_and_one_type_line():
    lines = prometheus_text(stats(), {0: ENGINE_TEXT % 1, 1: ENGINE_TEXT % 2}).splitlines()
    for kind in ("HELP", "TYPE"):
        names = [line.split()[2] for line in lines if line.startswith(f"# {kind} ")]
        assert sorted(set(names)) == sorted(names)
    assert "# TYPE vllm:generation_tokens_total counter" in lines
    assert "# TYPE vllm:ttft_seconds histogram" in lines


def test_the_global_registry_is_left_alone():
    before = list(REGISTRY._names_to_collectors)
    prometheus_text(stats(), {0: ENGINE_TEXT % 1})
    assert list(REGISTRY._names_to_collectors) == before


async def test_engines_that_do_not_answer_are_left_out_of_the_texts():
    engines = [Scripted(index) for index in range(4)]
    replicas = ReplicaSet(engines)
    engines[0].hang()
    engines[1].kill("killed")
    replicas.set_state(replicas.all[2], ReplicaState.RETIRED, "removed")
    assert await engine_texts(replicas, timeout_s=0.01) == {3: "own 3\n"}


@pytest.mark.parametrize(
    ("state", "level"),
    [(ReplicaState.DEAD, "WARNING"), (ReplicaState.SUSPECT, "INFO"), (ReplicaState.STALE, "WARNING")],
)
async def test_a_change_of_state_is_one_line_in_the_log(caplog, state, level):
    replicas = ReplicaSet([FakeEngine(0), FakeEngine(1)])
    with caplog.at_level("INFO", logger="rl_vllm"):
        replicas.set_state(replicas.all[1], state, "no answer")
        replicas.set_state(replicas.all[1], state, "no answer")

    assert [(record.levelname, record.args) for record in caplog.records] == [
        (level, (1, "healthy", state.value, "no answer"))
    ]
    assert "\n" not in caplog.records[0].getMessage()

"""Ours and vLLM's metrics in Prometheus' text format, joined."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from rl_vllm.errors import EngineDiedError, ReplicaCallError
from rl_vllm.service.observe.counters import ServiceCounters
from rl_vllm.service.observe.stats import ServiceStats
from rl_vllm.service.replicas import Replica, ReplicaSet
from rl_vllm.service.router import RoutingStats
from rl_vllm.types import ReplicaState, ReplicaStats

_REPLICA_LABEL = "replica"
_COUNTERS = {
    "requests": "Prompts sent for the first time.",
    "completed": "Prompts answered.",
    "failed": "Prompts that ended in a failure of their own.",
    "cancelled": "Prompts given up by their caller or a deadline.",
    "rerouted": "Prompts sent again because their replica left.",
    "refused": "Prompts refused because of the bound on outstanding ones.",
    "tokens": "Response tokens delivered.",
    "deaths": "Replicas that died.",
    "restarts": "Replicas started again.",
    "refits": "Refits committed on every replica.",
    "refits_failed": "Refits that failed.",
}
_Gauge = Callable[[ReplicaStats], float | None]
# A gauge without a value for a replica has no sample of it: unknown is not 0.
_GAUGES: dict[str, tuple[str, _Gauge]] = {
    "replica_outstanding_requests": ("Requests sent and not yet answered.", lambda r: r.outstanding_requests),
    "replica_outstanding_tokens": ("Tokens those may still cost.", lambda r: r.outstanding_tokens),
    "replica_weight_version": ("Weight version committed last.", lambda r: r.version),
    "replica_restarts": ("How often it was started again.", lambda r: r.restarts),
    "replica_running": ("Requests its engine decodes.", lambda r: r.running),
    "replica_waiting": ("Requests its engine has not scheduled yet.", lambda r: r.waiting),
    "replica_kv_usage": ("Fraction of KV blocks in use.", lambda r: r.kv_usage),
    "replica_generated_tokens": ("Response tokens made since the engine's start.", lambda r: r.generated_tokens),
    "replica_tokens_per_s": ("Response tokens per second.", lambda r: r.tokens_per_s),
    "replica_prefix_hit_rate": ("Fraction of prompt tokens found in the prefix cache.", lambda r: r.prefix_hit_rate),
}


async def engine_texts(replicas: ReplicaSet, *, timeout_s: float) -> dict[int, str]:
    """What each engine says in Prometheus' format, by index; who does not answer in time is left out.

    Call it on the service's loop.
    """
    texts: dict[int, str] = {}

    async def ask(replica: Replica) -> None:
        with contextlib.suppress(EngineDiedError, ReplicaCallError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                texts[replica.index] = await replica.engine.prometheus()

    await asyncio.gather(*(ask(replica) for replica in replicas.living()))
    return texts


def prometheus_text(stats: ServiceStats, engines: Mapping[int, str]) -> str:
    """Metrics named ``rl_vllm_*``, then each engine's own with the label ``replica``, one HELP and TYPE per name.

    Args:
        stats: Ours.
        engines: Text of each engine by index of its replica; see :func:`engine_texts`.

    Raises:
        ValueError: An engine's text is not in Prometheus' format.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Metrics([*_service_metrics(stats), *_engine_metrics(engines)]))
    return generate_latest(registry).decode()


class _Metrics(Collector):
    """Metrics that exist already."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


def _service_metrics(stats: ServiceStats) -> Iterator[Metric]:
    for field in fields(ServiceCounters):
        value = getattr(stats.counters, field.name)
        yield CounterMetricFamily(f"rl_vllm_{field.name}", _COUNTERS[field.name], value=value)
    yield from _routing_metrics(stats.routing)
    yield GaugeMetricFamily("rl_vllm_weight_version", "Version that all serving replicas have.", value=stats.version)
    yield CounterMetricFamily("rl_vllm_epoch", "Changes of the set of serving replicas.", value=stats.epoch)
    yield GaugeMetricFamily("rl_vllm_serving_replicas", "Replicas that receive requests.", value=stats.num_serving)
    outstanding = stats.outstanding_requests
    yield GaugeMetricFamily("rl_vllm_outstanding_requests", "Requests sent and not yet answered.", value=outstanding)
    yield _states(stats)
    for name, (text, read) in _GAUGES.items():
        gauge = GaugeMetricFamily(f"rl_vllm_{name}", text, labels=[_REPLICA_LABEL])
        for replica in stats.replicas:
            value = read(replica)
            if value is not None:
                gauge.add_metric([str(replica.replica)], value)
        yield gauge


def _routing_metrics(routing: RoutingStats) -> Iterator[Metric]:
    causes = CounterMetricFamily("rl_vllm_routing_decisions", "Prompts given to a replica, by why.", labels=["cause"])
    for cause in ("prefix", "session", "load", "moved", "turn"):
        causes.add_metric([cause], getattr(routing, cause))
    yield causes
    yield GaugeMetricFamily("rl_vllm_routing_prefixes", "Prefixes remembered.", value=routing.prefixes)
    yield GaugeMetricFamily("rl_vllm_routing_sessions", "Sessions remembered.", value=routing.sessions)
    given = CounterMetricFamily("rl_vllm_routing_given", "Prompts given to each replica.", labels=[_REPLICA_LABEL])
    for index, count in routing.per_replica:
        given.add_metric([str(index)], count)
    yield given


def _states(stats: ServiceStats) -> Metric:
    """1 for the state a replica is in and 0 for the others, as Prometheus does with enumerations."""
    gauge = GaugeMetricFamily(
        "rl_vllm_replica_state", "1 for the state it is in, 0 for the others.", labels=[_REPLICA_LABEL, "state"]
    )
    for replica in stats.replicas:
        for state in ReplicaState:
            gauge.add_metric([str(replica.replica), state.value], float(state is replica.state))
    return gauge


def _engine_metrics(engines: Mapping[int, str]) -> list[Metric]:
    joined: dict[tuple[str, str], Metric] = {}
    for index, text in sorted(engines.items()):
        for metric in text_string_to_metric_families(text):
            new = Metric(metric.name, metric.documentation, metric.type)
            family = joined.setdefault((metric.name, metric.type), new)
            for sample in metric.samples:
                labels = {**sample.labels, _REPLICA_LABEL: str(index)}
                family.samples.append(sample._replace(labels=labels))
    return [family for family in joined.values() if family.samples]

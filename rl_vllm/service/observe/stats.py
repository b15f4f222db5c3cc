"""The state of a service as one value."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rl_vllm.service.observe.counters import ServiceCounters
from rl_vllm.service.observe.sampler import Sampled, Sampler
from rl_vllm.service.replicas import Replica, ReplicaSet
from rl_vllm.service.router import RoutingStats
from rl_vllm.types import EngineMetrics, ReplicaStats


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStats:
    """A service at one moment.

    Attributes:
        model: Path or hub id of the served model.
        version: The weight version that all serving replicas have.
        epoch: How often the set of serving replicas has changed.
        replicas: Every replica that is not retired, and those that are, by index.
        counters: What has been done since launch; a copy.
        routing: What the router decided since launch.
    """

    model: str
    version: int
    epoch: int
    replicas: tuple[ReplicaStats, ...]
    counters: ServiceCounters
    routing: RoutingStats

    @property
    def num_serving(self) -> int:
        """Replicas that receive requests."""
        return sum(replica.state.serves for replica in self.replicas)

    @property
    def outstanding_requests(self) -> int:
        return sum(replica.outstanding_requests for replica in self.replicas)

    @property
    def tokens_per_s(self) -> float | None:
        """Sum over the replicas that know theirs; None when none does."""
        known = [replica.tokens_per_s for replica in self.replicas if replica.tokens_per_s is not None]
        return sum(known) if known else None


def service_stats(
    replicas: ReplicaSet,
    counters: ServiceCounters,
    routing: RoutingStats,
    *,
    model: str,
    sampler: Sampler,
) -> ServiceStats:
    """Gather what the driver knows; asks no engine. Call it on the service's loop.

    Args:
        replicas: All replicas.
        counters: Copied.
        routing: ``Router.stats()``.
        model: Path or hub id.
        sampler: Has what the engines said last.
    """
    sampled = sampler.latest()
    return ServiceStats(
        model=model,
        version=replicas.version,
        epoch=replicas.epoch,
        replicas=tuple(_replica_stats(replica, sampled.get(replica.index), sampler) for replica in replicas.all),
        counters=replace(counters),
        routing=routing,
    )


def _replica_stats(replica: Replica, sampled: Sampled | None, sampler: Sampler) -> ReplicaStats:
    metrics = None if sampled is None else sampled.metrics
    return ReplicaStats(
        replica=replica.index,
        state=replica.state,
        reason=replica.reason,
        version=replica.version,
        restarts=replica.restarts,
        outstanding_requests=replica.outstanding_requests,
        outstanding_tokens=replica.outstanding_tokens,
        running=None if metrics is None else metrics.num_running,
        waiting=None if metrics is None else metrics.num_waiting,
        kv_usage=None if metrics is None else metrics.kv_cache_usage,
        generated_tokens=None if metrics is None else metrics.generated_tokens,
        tokens_per_s=None if sampled is None else sampled.sample.tokens_per_s,
        prefix_hit_rate=None if metrics is None else _hit_rate(metrics),
        age_s=None if sampled is None else sampler.age_s(sampled),
    )


def _hit_rate(metrics: EngineMetrics) -> float | None:
    if not metrics.prefix_cache_queries:
        return None
    return metrics.prefix_cache_hits / metrics.prefix_cache_queries

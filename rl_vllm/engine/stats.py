"""What the engine says of itself, kept from its last report."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

from rl_vllm.types import EngineMetrics


class LatestStats(StatLoggerBase):
    """A vLLM stat logger that keeps the newest figures and logs nothing."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:  # noqa: ARG002 (vLLM's interface)
        self._running = 0
        self._waiting = 0
        self._kv_cache_usage = 0.0
        self._generated_tokens = 0
        self._prefix_cache_queries = 0
        self._prefix_cache_hits = 0

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,  # noqa: ARG002 (vLLM's interface)
        engine_idx: int = 0,  # noqa: ARG002 (vLLM's interface)
    ) -> None:
        if scheduler_stats is not None:
            self._running = scheduler_stats.num_running_reqs
            self._waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self._kv_cache_usage = scheduler_stats.kv_cache_usage
            # Counts since the last report; preempted requests, which look their own prefix up again, are apart.
            self._prefix_cache_queries += scheduler_stats.prefix_cache_stats.queries
            self._prefix_cache_hits += scheduler_stats.prefix_cache_stats.hits
        if iteration_stats is not None:
            self._generated_tokens += iteration_stats.num_generation_tokens

    def log_engine_initialized(self) -> None:
        """Nothing to announce."""

    def snapshot(self, *, num_unfinished: int) -> EngineMetrics:
        """The figures of the engine's last step.

        Args:
            num_unfinished: Requests the front end still waits for. An idle engine takes no step and so reports nothing:
                at 0 the last step's counts are out of date and count as 0.
        """
        idle = num_unfinished == 0
        return EngineMetrics(
            num_running=0 if idle else self._running,
            num_waiting=0 if idle else self._waiting,
            kv_cache_usage=0.0 if idle else self._kv_cache_usage,
            generated_tokens=self._generated_tokens,
            prefix_cache_queries=self._prefix_cache_queries,
            prefix_cache_hits=self._prefix_cache_hits,
        )


def total(parts: Sequence[EngineMetrics]) -> EngineMetrics:
    """The figures of a replica's engines (data parallel) as one: counts are added, KV use is their mean."""
    return EngineMetrics(
        num_running=sum(part.num_running for part in parts),
        num_waiting=sum(part.num_waiting for part in parts),
        kv_cache_usage=sum(part.kv_cache_usage for part in parts) / len(parts),
        generated_tokens=sum(part.generated_tokens for part in parts),
        prefix_cache_queries=sum(part.prefix_cache_queries for part in parts),
        prefix_cache_hits=sum(part.prefix_cache_hits for part in parts),
    )

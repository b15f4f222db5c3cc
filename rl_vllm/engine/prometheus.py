"""vLLM's own Prometheus metrics: kept in a registry per engine, or not at all.

vLLM keeps them whenever statistics are on, in the process's one registry, where the second engine of a process throws
the first one's out.
"""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import PrometheusStatLogger


class EnginePrometheus(PrometheusStatLogger):
    """vLLM's metrics, in a registry of their own."""

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
        self.registry = CollectorRegistry()
        self._gauge_cls = partial(Gauge, registry=self.registry)
        self._counter_cls = partial(Counter, registry=self.registry)
        self._histogram_cls = partial(Histogram, registry=self.registry)
        super().__init__(vllm_config, engine_indexes)

    def text(self) -> str:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry).decode()


class NoPrometheus(PrometheusStatLogger):
    """Stands where vLLM would put its own, and keeps nothing."""

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
        """Make none of the parent's metrics."""

    def record(self, *args: object, **kwargs: object) -> None: ...

    def record_admission_rejection(self, reason: str) -> None: ...

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None: ...

    def log_engine_initialized(self) -> None: ...

"""What a person and a program see of a running service, and what they may change: its size and its routing."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np

from rl_vllm.config import RoutingConfig, ServiceConfig
from rl_vllm.errors import ConfigError, UnsupportedByEngineError
from rl_vllm.service.calls import Calls, blocking, long_limit, on_loop
from rl_vllm.service.core import Core
from rl_vllm.service.load_balancer import LoadBalancer
from rl_vllm.service.observe.prometheus import engine_texts, prometheus_text
from rl_vllm.service.observe.sampler import SampleLogger
from rl_vllm.service.observe.stats import ServiceStats, service_stats
from rl_vllm.service.observe.table import not_running, table
from rl_vllm.service.router import Snapshot
from rl_vllm.types import ReplicaSample

logger = logging.getLogger(__name__)

# Samples are asked for anew when somebody looks; who does not answer in this time is shown as last seen.
_LOOK_S = 2.0


@runtime_checkable
class VllmConfigLike(Protocol):
    """What is read of vLLM's ``VllmConfig``."""

    model_config: object
    parallel_config: object
    scheduler_config: object
    lora_config: object
    structured_outputs_config: object
    observability_config: ObservabilityConfigLike


class ObservabilityConfigLike(Protocol):
    """What is read of vLLM's ``ObservabilityConfig``."""

    otlp_traces_endpoint: str | None


class OverviewCalls(Calls):
    """State, metrics, settings, number of replicas, routing."""

    def __init__(self, config: ServiceConfig) -> None:
        super().__init__(config)
        self._loggers: dict[str, SampleLogger] = {}
        self._load_balancer: LoadBalancer | None = None

    # State

    @on_loop()
    async def astats(self) -> ServiceStats:
        """State of every replica and what has been done since launch; engines are asked for their counts first."""
        core = self._running("stats()")
        await core.sampler.sample(within_s=min(_LOOK_S, self.config.rpc_timeout_s))
        return _stats(core)

    stats = blocking(astats)

    def timeline(self) -> list[ReplicaSample]:
        """What every engine said of itself, sample by sample, oldest first; see ``ServiceConfig.metrics_period_s``."""
        return self._running("timeline()").sampler.timeline()

    def clear_timeline(self) -> None:
        """Forget the samples."""
        self._running("clear_timeline()").sampler.clear()

    @on_loop()
    async def aprometheus(self) -> str:
        """Our metrics, and each engine's own with the label ``replica``, in Prometheus' text format."""
        core = self._running("prometheus()")
        within_s = min(_LOOK_S, self.config.rpc_timeout_s)
        texts, _ = await asyncio.gather(
            engine_texts(core.replicas, timeout_s=within_s), core.sampler.sample(within_s=within_s)
        )
        return prometheus_text(_stats(core), texts)

    prometheus = blocking(aprometheus)

    def __str__(self) -> str:
        if self._state != "running":
            return not_running(self.config.engine.model, self.config.num_replicas, self._state)
        return table(self.stats(), styled=sys.stdout.isatty())

    def __rich__(self) -> str:
        return str(self)

    @on_loop()
    async def ado_log_stats(self) -> None:
        """Ask every engine for its counts now: log a line for each, and feed the loggers."""
        core = self._running("do_log_stats()")
        await core.sampler.sample(within_s=min(_LOOK_S, self.config.rpc_timeout_s))
        for index, sampled in sorted(core.sampler.latest().items()):
            seen = sampled.metrics
            logger.info(
                "replica %d: running=%d waiting=%d kv_usage=%.3f generated_tokens=%d",
                index,
                seen.num_running,
                seen.num_waiting,
                seen.kv_cache_usage,
                seen.generated_tokens,
            )

    do_log_stats = blocking(ado_log_stats)

    def add_logger(self, name: str, log: SampleLogger) -> None:
        """Call ``log`` with every sample of every replica, on the service's loop: it must be quick.

        Raises:
            ConfigError: There is one of this name.
        """
        core = self._running("add_logger()")
        with self._lock:
            if name in self._loggers:
                raise ConfigError(f"a logger is called {name!r} already: remove_logger() it first")
            self._loggers[name] = log
        core.sampler.add_logger(log)

    def remove_logger(self, name: str) -> None:
        """Stop calling a logger.

        Raises:
            ConfigError: There is none of this name.
        """
        core = self._running("remove_logger()")
        with self._lock:
            if name not in self._loggers:
                raise ConfigError(f"no logger is called {name!r}: there are {sorted(self._loggers)}")
            log = self._loggers.pop(name)
        core.sampler.remove_logger(log)

    # Settings of the engines

    @on_loop()
    async def aget_vllm_config(self, actor_index: int | None = None) -> object:
        """One engine's own configuration, vLLM's ``VllmConfig``; all replicas' are equal but for their seeds."""
        core = self._running("get_vllm_config()")
        first = core.on_replicas.targets(actor_index)[0].index
        ((_, config),) = await core.on_replicas("get_vllm_config()", lambda e: e.engine_config(), only=first)
        return config

    get_vllm_config = blocking(aget_vllm_config)

    async def _vllm_config(self, actor_index: int | None) -> VllmConfigLike:
        config = await self.aget_vllm_config(actor_index)
        if not isinstance(config, VllmConfigLike):
            raise UnsupportedByEngineError(f"this engine has no VllmConfig, but {type(config).__name__}")
        return config

    @on_loop()
    async def aget_model_config(self, actor_index: int | None = None) -> object:
        """The ``ModelConfig`` of vLLM."""
        return (await self._vllm_config(actor_index)).model_config

    get_model_config = blocking(aget_model_config)

    @on_loop()
    async def aget_parallel_config(self, actor_index: int | None = None) -> object:
        """The ``ParallelConfig`` of vLLM."""
        return (await self._vllm_config(actor_index)).parallel_config

    get_parallel_config = blocking(aget_parallel_config)

    @on_loop()
    async def aget_scheduler_config(self, actor_index: int | None = None) -> object:
        """The ``SchedulerConfig`` of vLLM."""
        return (await self._vllm_config(actor_index)).scheduler_config

    get_scheduler_config = blocking(aget_scheduler_config)

    @on_loop()
    async def aget_lora_config(self, actor_index: int | None = None) -> object:
        """The ``LoRAConfig`` of vLLM, or None when the engines run without LoRA."""
        return (await self._vllm_config(actor_index)).lora_config

    get_lora_config = blocking(aget_lora_config)

    @on_loop()
    async def aget_decoding_config(self, actor_index: int | None = None) -> object:
        """The ``StructuredOutputsConfig`` of vLLM, which took the place of its ``DecodingConfig``."""
        return (await self._vllm_config(actor_index)).structured_outputs_config

    get_decoding_config = blocking(aget_decoding_config)

    @on_loop()
    async def ais_tracing_enabled(self, actor_index: int | None = None) -> bool:
        """Whether the engines send OpenTelemetry traces."""
        config = await self._vllm_config(actor_index)
        return config.observability_config.otlp_traces_endpoint is not None

    is_tracing_enabled = blocking(ais_tracing_enabled)

    # Size

    @on_loop(long_limit)
    async def aadd_replicas(self, count: int = 1) -> list[int]:
        """Start further replicas while requests run, and let them serve with the weights and adapters of the others.

        Returns:
            Their indices, which no replica had before.

        Raises:
            ConfigError: ``count`` is below 1.
            NotEnoughResourcesError: They do not fit; none is left.
            EngineStartError: One did not start; none is left.
        """
        return await self._running("add_replicas()").lifecycle.add(count)

    add_replicas = blocking(aadd_replicas)

    @on_loop(long_limit)
    async def aremove_replica(self, actor_index: int) -> None:
        """Stop a replica for good: it finishes what it has and is no longer listed.

        Raises:
            ReplicaIndexError: There is none with this index.
            ConfigError: Fewer than ``min_serving`` would be left.
        """
        await self._running("remove_replica()").lifecycle.remove(actor_index)

    remove_replica = blocking(aremove_replica)

    # Routing

    @property
    def actors(self) -> Sequence[int]:
        """Every index that a replica has or had: what a balancer over this service chooses from."""
        return range(1 + max(replica.index for replica in self._running("actors").replicas.all))

    def snapshot(self) -> Snapshot:
        """The replicas that may be chosen now, and what they hold.

        Raises:
            NoReplicaServesError: There is none.
        """
        serving = self._running("snapshot()").replicas.serving()
        metrics = [replica.metrics for replica in serving]
        return Snapshot(
            indices_R=np.array([replica.index for replica in serving], np.int64),
            requests_R=np.array([replica.outstanding_requests for replica in serving], np.int64),
            tokens_R=np.array([replica.outstanding_tokens for replica in serving], np.int64),
            kv_usage_R=np.array([np.nan if each is None else each.kv_cache_usage for each in metrics], np.float64),
        )

    @property
    def load_balancer(self) -> LoadBalancer:
        """Chooses a replica by the rules that ``generate`` follows; what was created last."""
        if self._load_balancer is None:
            routing = self.config.routing
            self._load_balancer = LoadBalancer(
                self, routing.strategy, routing.prefix_length, routing.overload_threshold
            )
        return self._load_balancer

    def create_load_balancer(
        self,
        strategy: str | Sequence[str] | None = None,
        *,
        prefix_length: int | None = None,
        overload_threshold: float | None = None,
    ) -> LoadBalancer:
        """Choose how requests are routed from now on; what the router had learnt is forgotten.

        Args:
            strategy: A name from ``ROUTING_STRATEGIES`` or several, tried in order; None means the configured ones.
            prefix_length: Longest prefix that is looked at, in tokens; None means the configured one.
            overload_threshold: See :class:`~rl_vllm.config.RoutingConfig`; None means the configured one.

        Returns:
            A balancer over this service with the same rules: ``select_actor`` gives an index for ``actor_index``.

        Raises:
            ConfigError: A value is out of range, or a strategy unknown.
        """
        core = self._running("create_load_balancer()")
        old = self.config.routing
        names = old.strategy if strategy is None else (strategy,) if isinstance(strategy, str) else tuple(strategy)
        routing = replace(
            old,
            strategy=names,
            prefix_length=old.prefix_length if prefix_length is None else prefix_length,
            overload_threshold=old.overload_threshold if overload_threshold is None else overload_threshold,
        )
        balancer = LoadBalancer(self, routing.strategy, routing.prefix_length, routing.overload_threshold)

        async def use(routing: RoutingConfig) -> None:
            core.route_by(routing)

        self._block("create_load_balancer()", lambda: use(routing), timeout_s=self.config.rpc_timeout_s)
        self._load_balancer = balancer
        return balancer


def _stats(core: Core) -> ServiceStats:
    return service_stats(
        core.replicas, core.counters, core.router.stats(), model=core.model.model, sampler=core.sampler
    )

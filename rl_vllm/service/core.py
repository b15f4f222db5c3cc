"""The parts of a running service that live on its loop, and how they fit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager

from rl_vllm.config import RoutingConfig, ServiceConfig, start_timeout_s
from rl_vllm.protocols import Engine
from rl_vllm.service.adapters import AdapterRegistry
from rl_vllm.service.dispatch import Dispatcher
from rl_vllm.service.executors import Executor
from rl_vllm.service.fan_out import FanOut
from rl_vllm.service.lifecycle import Lifecycle
from rl_vllm.service.observe.counters import ServiceCounters
from rl_vllm.service.observe.sampler import Sampler
from rl_vllm.service.policies import PolicyAdapters
from rl_vllm.service.refits import WeightsControl
from rl_vllm.service.replicas import Replica, ReplicaSet
from rl_vllm.service.router import Router
from rl_vllm.service.sleep import SleepControl
from rl_vllm.types import ModelInfo


class Core:
    """Built and used on the service's loop only.

    Args:
        engines: One for each replica; all can serve.
        model: Facts of the served model.
        executor: Starts and stops further engines.
        config: The service's settings.

    Attributes:
        on_replicas: The same call on every replica.
    """

    def __init__(self, engines: Sequence[Engine], model: ModelInfo, executor: Executor, config: ServiceConfig) -> None:
        self.model = model
        self._restore_timeout_s = config.launch_timeout_s or start_timeout_s()
        self.counters = ServiceCounters()
        self.replicas = ReplicaSet(list(engines), min_serving=config.health.min_serving)
        self.router = Router(config.routing, block_size=model.block_size)
        self.dispatcher = Dispatcher(self.replicas, self.router, self.counters, config)
        self.lifecycle = Lifecycle(self.replicas, executor, config, self.counters, restore=self._restore)
        self.weights = WeightsControl(self.replicas, router=self.router, counters=self.counters, quiet=self._quiet)
        self.on_replicas = FanOut(
            self.replicas, self._quiet, limit_s=config.rpc_timeout_s, long_limit_s=self._restore_timeout_s
        )
        self.adapters = AdapterRegistry(self.on_replicas)
        self.policies = PolicyAdapters(self.adapters, self.on_replicas, self.counters)
        self.sleep = SleepControl(self.replicas, self.on_replicas)
        self.sampler = Sampler(self.replicas, period_s=config.metrics_period_s, timeout_s=config.rpc_timeout_s)

    def start(self) -> None:
        """Begin to watch the replicas."""
        self.lifecycle.start()
        self.sampler.start()

    async def close(self) -> None:
        """Stop watching. Idempotent; the engines go on."""
        await self.sampler.close()
        await self.policies.close()
        await self.lifecycle.close()

    def route_by(self, routing: RoutingConfig) -> None:
        """Choose replicas by other rules from now on; what the router had learnt is forgotten."""
        self.router = self.dispatcher.router = self.weights.router = Router(routing, block_size=self.model.block_size)

    def _quiet(self, replica: Replica) -> AbstractContextManager[None]:
        return self.lifecycle.quiet(replica)

    async def _restore(self, replica: Replica) -> None:
        """Give an engine that has just started all that the others have, before it serves.

        Raises:
            TimeoutError: It did not answer within the limit for starting an engine.
        """
        async with asyncio.timeout(self._restore_timeout_s):
            await self.adapters.restore(replica)
            await self.weights.restore(replica)
            if self.sleep.level is not None:
                await self.sleep.restore(replica)
                # Weights come last, so that none committed meanwhile is missed.
                await self.weights.restore(replica)
            # An adapter that came or went meanwhile did so on the replicas that serve.
            while not self.adapters.is_restored(replica):
                await self.adapters.restore(replica)
                await self.weights.restore(replica)

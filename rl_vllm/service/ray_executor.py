"""Engines as Ray actors, one placement group each."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rl_vllm.config import ServiceConfig, ray_address, start_timeout_s
from rl_vllm.engine import reaper
from rl_vllm.engine.actor import EngineActor
from rl_vllm.errors import DeadlineError, EngineStartError, NotEnoughResourcesError
from rl_vllm.protocols import Engine
from rl_vllm.service.placement import bundle, check_resources, vllm_runs_on_cpu
from rl_vllm.service.preflight import check_config, check_ray_address
from rl_vllm.service.ray_engine import RayEngine
from rl_vllm.types import ModelInfo

logger = logging.getLogger(__name__)

_MAX_CALLS = 10_000
_PLACEMENT_TIMEOUT_S = 60.0


class _LocalCluster:
    """The Ray of this process: joined when there is one, else started here and stopped with the last service."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._ours = False

    def join(self) -> None:
        with self._lock:
            if not ray.is_initialized():
                check_ray_address(ray_address())
                # Workers' output stays in Ray's log files: what matters of it comes back in errors.
                ray.init(log_to_driver=False, include_dashboard=False, logging_level=logging.WARNING)
                self._ours = True
                _reap_with_raylet()
            self._users += 1

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._ours:
                self._ours = False
                ray.shutdown()


def _reap_with_raylet() -> None:
    """End the raylet's children with it: when this process is killed the kernel ends the raylet, but not its agents."""
    for pid, _ in reaper.descendants(os.getpid()):
        if Path(f"/proc/{pid}/comm").read_text().strip() == "raylet":
            reaper.start(pid)


_cluster = _LocalCluster()


class RayExecutor:
    """The default executor."""

    def __init__(self) -> None:
        self._joined = False
        self._started = False
        self._groups: list[PlacementGroup] = []
        self._engines: list[RayEngine] = []
        self._shutdown_timeout_s = 0.0

    def prepare(self, config: ServiceConfig) -> None:
        check_config(config.engine)
        # Ray installs signal handlers, which only the main thread may do.
        _cluster.join()
        self._joined = True

    async def launch(self, config: ServiceConfig) -> tuple[list[Engine], ModelInfo]:
        self._shutdown_timeout_s = config.shutdown_timeout_s
        on_cpu = vllm_runs_on_cpu()
        check_resources(config, ray.cluster_resources(), on_cpu=on_cpu)
        await self._reserve(config, on_cpu=on_cpu)
        self._engines = [
            RayEngine(_create_actor(config, group, index, on_cpu=on_cpu), index)
            for index, group in enumerate(self._groups)
        ]
        infos = await self._start(config)
        return list(self._engines), infos[0]

    async def _reserve(self, config: ServiceConfig, *, on_cpu: bool) -> None:
        wanted = bundle(config.engine, on_cpu=on_cpu)
        self._groups = [placement_group([wanted], strategy="STRICT_PACK") for _ in range(config.num_replicas)]
        try:
            async with asyncio.timeout(_PLACEMENT_TIMEOUT_S):
                await asyncio.gather(*(_reserved(group) for group in self._groups))
        except TimeoutError:
            # The cluster is large enough, but others hold what is missing, or no single node has a whole replica.
            total = {name: amount * config.num_replicas for name, amount in wanted.items()}
            free = ray.available_resources()
            raise NotEnoughResourcesError(total, {name: free.get(name, 0.0) for name in total}, "free") from None

    async def _start(self, config: ServiceConfig) -> list[ModelInfo]:
        limit_s = config.launch_timeout_s or start_timeout_s()
        starts = [
            asyncio.create_task(engine.start(), name=f"replica-{i}-start") for i, engine in enumerate(self._engines)
        ]
        try:
            done, pending = await asyncio.wait(starts, timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            # Also when the launch itself is cancelled: nobody else asks these tasks how they ended.
            for task in starts:
                task.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
        errors = [error for error in (task.exception() for task in done) if error is not None]
        if errors:
            own = [error for error in errors if isinstance(error, EngineStartError)]
            raise (own or errors)[0]
        if pending:
            raise DeadlineError(f"{len(pending)} of {len(starts)} replicas to start", limit_s)
        self._started = True
        return [task.result() for task in starts]

    async def close(self) -> None:
        engines, self._engines = self._engines, []
        groups, self._groups = self._groups, []
        await asyncio.gather(*(self._stop(engine) for engine in engines))
        for group in groups:
            remove_placement_group(group)

    def release(self) -> None:
        if self._joined:
            self._joined = False
            _cluster.leave()

    async def _stop(self, engine: RayEngine) -> None:
        try:
            # An engine that is still loading cannot answer: it is killed at once.
            if self._started:
                async with asyncio.timeout(self._shutdown_timeout_s):
                    await engine.shutdown()
        except TimeoutError:
            logger.warning("an engine did not stop within %.0f s and is killed", self._shutdown_timeout_s)
        except (ray.exceptions.RayError, RuntimeError) as error:
            logger.info("an engine was gone before it was stopped: %s", error)
        # The engine's processes end with the actor, and its reaper removes what they leave.
        ray.kill(engine.actor)


async def _reserved(group: PlacementGroup) -> None:
    await group.ready()


def _create_actor(config: ServiceConfig, group: PlacementGroup, index: int, *, on_cpu: bool) -> Any:
    needs = bundle(config.engine, on_cpu=on_cpu)
    remote_class = ray.remote(EngineActor).options(
        num_cpus=needs["CPU"],
        num_gpus=needs.get("GPU", 0),
        max_concurrency=_MAX_CALLS,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_capture_child_tasks=True
        ),
    )
    return remote_class.remote(config.engine, index, on_cpu=on_cpu)

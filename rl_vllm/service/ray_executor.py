"""Engines as Ray actors, one placement group each."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rl_vllm.config import ServiceConfig, start_timeout_s
from rl_vllm.engine.actor import EngineActor
from rl_vllm.engine.nodes import nodes_of
from rl_vllm.errors import DeadlineError, EngineDiedError, EngineStartError, NotEnoughResourcesError, ReplicaCallError
from rl_vllm.protocols import Engine
from rl_vllm.service.placement import Node, Placement, check_parallel, check_resources, stage_nodes, vllm_runs_on_cpu
from rl_vllm.service.preflight import check_config
from rl_vllm.service.ray_cluster import cluster
from rl_vllm.service.ray_engine import RayEngine
from rl_vllm.service.stopping import Stops
from rl_vllm.types import ModelInfo, WeightReceiver

logger = logging.getLogger(__name__)

_MAX_CALLS = 10_000
_PLACEMENT_TIMEOUT_S = 60.0
# What Ray says is free is a moment old: a place chosen by it is given up and chosen anew after this time.
_PINNED_TIMEOUT_S = 5.0
_POLL_S = 0.25
_KILL_TIMEOUT_S = 10.0


@dataclass(slots=True, eq=False)
class _Held:
    """What one replica holds of the cluster.

    Attributes:
        placement: How it is laid out.
        group: Its placement group, once there is one.
        engine: Its actor, once there is one.
        started: Whether the engine can answer.
        hosts: The machines it is on, once somebody has asked.
    """

    placement: Placement
    group: PlacementGroup | None = None
    engine: RayEngine | None = None
    started: bool = False
    hosts: tuple[str, ...] = ()


class RayExecutor:
    """The default executor.

    Args:
        actor_class: What serves the :class:`~rl_vllm.protocols.Engine` protocol in each actor; built with the engine's
            config, the replica's index and ``on_cpu``, and loaded with ``start()``.
    """

    def __init__(self, *, actor_class: type = EngineActor) -> None:
        self._actor_class = actor_class
        self._joined = False
        self._config: ServiceConfig | None = None
        self._on_cpu = True
        self._held: dict[int, _Held] = {}
        self._choosing = asyncio.Lock()
        self._stops = Stops()

    def prepare(self, config: ServiceConfig) -> None:
        check_config(config.engine)
        self._on_cpu = vllm_runs_on_cpu()
        check_parallel(config.engine, on_cpu=self._on_cpu)
        cluster.join()
        self._joined = True
        self._config = config

    async def launch(self, config: ServiceConfig) -> tuple[list[Engine], ModelInfo]:
        indices = range(config.num_replicas)
        placement = check_resources(config.engine, len(indices), _nodes(), on_cpu=self._on_cpu)
        try:
            async with asyncio.timeout(self._limit_s):
                # All or none: an engine that waits for another's room would load for nothing.
                await _all_or_first_error([self._reserve(index, placement) for index in indices])
                infos = await _all_or_first_error([self._start(index) for index in indices])
        except TimeoutError as error:
            waiting = sum(not held.started for held in self._held.values())
            await self.close()
            if isinstance(error, DeadlineError):
                raise
            raise DeadlineError(f"{waiting} of {len(indices)} replicas to start", self._limit_s) from None
        except BaseException:
            await self.close()
            raise
        engines: list[Engine] = [self._engine(index) for index in indices]
        return engines, infos[0]

    async def start_one(self, index: int) -> Engine:
        await self.stop_one(index)
        placement = check_resources(self._service.engine, len(self._held) + 1, _nodes(), on_cpu=self._on_cpu)
        try:
            async with asyncio.timeout(self._limit_s):
                await self._reserve(index, placement)
                await self._start(index)
        except TimeoutError as error:
            await self.stop_one(index)
            if isinstance(error, DeadlineError):
                raise
            raise DeadlineError(f"replica {index} to start", self._limit_s) from None
        except BaseException:
            await self.stop_one(index)
            raise
        return self._engine(index)

    async def stop_one(self, index: int) -> None:
        if index in self._held or index in self._stops.under_way():
            await self._stops.run(index, lambda: self._stop(index))

    async def hosts(self, index: int) -> tuple[str, ...]:
        held = self._held.get(index)
        if held is None or held.group is None:
            return ()
        if not held.hosts:
            # In a thread, because it asks the cluster; once, because a group stays where it is.
            held.hosts = await asyncio.to_thread(_hosts_of, held.group)
        return held.hosts

    async def close(self) -> None:
        await asyncio.gather(*(self.stop_one(index) for index in {*self._held, *self._stops.under_way()}))

    def release(self) -> None:
        if self._joined:
            self._joined = False
            cluster.leave()

    @property
    def _service(self) -> ServiceConfig:
        assert self._config is not None, "prepare() comes first"
        return self._config

    @property
    def _limit_s(self) -> float:
        return self._service.launch_timeout_s or start_timeout_s()

    def _engine(self, index: int) -> RayEngine:
        held = self._held.get(index)
        if held is None or held.engine is None:
            raise EngineStartError(index, "it was stopped while it started")
        return held.engine

    async def _reserve(self, index: int, placement: Placement) -> None:
        held = self._held[index] = _Held(placement)
        wait_for_place = self._choose_place if placement.spans_nodes else self._wait_for_place
        try:
            async with asyncio.timeout(_PLACEMENT_TIMEOUT_S):
                await wait_for_place(held)
        except TimeoutError:
            # The cluster is large enough, but others hold what is missing.
            wanted = _sum(placement.bundles)
            free = ray.available_resources()
            raise NotEnoughResourcesError(wanted, {name: free.get(name, 0.0) for name in wanted}, "free") from None
        except ray.exceptions.RayError as error:
            raise EngineStartError(index, f"its place was taken away: {error}") from error

    async def _wait_for_place(self, held: _Held) -> None:
        held.group = placement_group(list(held.placement.bundles), strategy=held.placement.strategy)
        await _reserved(held.group)

    async def _choose_place(self, held: _Held) -> None:
        """Reserve a replica that spans nodes, each stage on one: Ray can say so only by naming the nodes."""
        # One at a time, so that two replicas do not choose the same free nodes.
        async with self._choosing:
            while True:
                names = stage_nodes(held.placement, _free_nodes())
                if names is None:
                    await asyncio.sleep(_POLL_S)
                    continue
                held.group = placement_group(
                    list(held.placement.bundles),
                    strategy=held.placement.strategy,
                    bundle_label_selector=[{"ray.io/node-id": name} for name in names],
                )
                try:
                    async with asyncio.timeout(_PINNED_TIMEOUT_S):
                        return await _reserved(held.group)
                except TimeoutError:
                    remove_placement_group(held.group)

    async def _start(self, index: int) -> ModelInfo:
        held = self._held.get(index)
        if held is None or held.group is None:
            raise EngineStartError(index, "it was stopped while it started")
        held.engine = RayEngine(self._create_actor(held.placement, held.group, index), index)
        try:
            await held.engine.actor.__ray_call__.remote(_set_address, ray.get_runtime_context().gcs_address)
            info = await held.engine.start()
        except ray.exceptions.RayActorError as error:
            raise EngineStartError(index, f"its process ended: {str(error).partition(chr(10))[0]}") from error
        except EngineDiedError as error:
            raise EngineStartError(index, f"its process ended: {error.reason}") from error
        except ReplicaCallError as error:
            raise EngineStartError(index, str(error)) from error
        held.started = True
        return info

    def _create_actor(self, placement: Placement, group: PlacementGroup, index: int) -> Any:
        options = actor_options(placement, group)
        config = placement.applied_to(self._service.engine)
        return ray.remote(self._actor_class).options(**options).remote(config, index, on_cpu=self._on_cpu)

    async def _stop(self, index: int) -> None:
        held = self._held.pop(index)
        try:
            # An engine that is still loading cannot answer: it is killed at once.
            if held.engine is not None and held.started:
                await self._shut_down(index, held.engine)
        finally:
            # Also when this wait is cancelled. The engine's processes end with the actor, its reaper removes the rest.
            if held.engine is not None:
                ray.kill(held.engine.actor)
            if held.group is not None:
                remove_placement_group(held.group)
        if held.engine is not None:
            await _until_dead(held.engine.actor)

    async def _shut_down(self, index: int, engine: RayEngine) -> None:
        limit_s = self._service.shutdown_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await engine.shutdown()
        except TimeoutError:
            logger.warning("replica %d: its engine did not stop within %.0f s and is killed", index, limit_s)
        except (ray.exceptions.RayError, RuntimeError) as error:
            logger.info("replica %d: its engine was gone before it was stopped: %s", index, error)


def actor_options(placement: Placement, group: PlacementGroup) -> dict[str, Any]:
    """Ray's options for an engine's actor: in the first bundle of its group, with what that holds for it."""
    options: dict[str, Any] = {
        "num_cpus": placement.num_cpus,
        "num_gpus": placement.num_gpus,
        "max_concurrency": _MAX_CALLS,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
        ),
    }
    if placement.backend == "ray":
        # Older Rays hide every GPU of the node from an actor that takes none itself; vLLM then finds no platform.
        options["runtime_env"] = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}
    return options


def _set_address(_actor: object, address: str) -> None:
    """Tell an engine's processes their cluster: those that vLLM starts would look for some cluster on their machine."""
    os.environ["RAY_ADDRESS"] = address


def _hosts_of(group: PlacementGroup) -> tuple[str, ...]:
    own = ray.get_runtime_context().get_node_id()
    return tuple(WeightReceiver.THIS_HOST if node == own else node for node in nodes_of(group))


def _nodes() -> list[Node]:
    return [Node(node["NodeID"], node["Resources"]) for node in ray.nodes() if node["Alive"]]


def _free_nodes() -> list[Node]:
    return [Node(name, free) for name, free in available_resources_per_node().items()]


def _sum(bundles: tuple[dict[str, float], ...]) -> dict[str, float]:
    names = {name for each in bundles for name in each}
    return {name: sum(each.get(name, 0.0) for each in bundles) for name in sorted(names)}


async def _all_or_first_error(work: list[Any]) -> list[Any]:
    """Run coroutines together; one that fails cancels the others, and the error that tells most is raised."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        # Also when this wait is cancelled: nobody else asks these tasks how they ended.
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    errors = [each for each in results if isinstance(each, Exception)]
    if errors:
        own = [error for error in errors if isinstance(error, EngineStartError)]
        raise (own or errors)[0]
    return results


async def _until_dead(actor: Any) -> None:
    """Wait until Ray says that a killed actor has ended: what it held is free then."""
    try:
        async with asyncio.timeout(_KILL_TIMEOUT_S):
            await actor.__ray_ready__.remote()
    except TimeoutError:
        logger.warning("Ray has not ended a killed actor within %.0f s", _KILL_TIMEOUT_S)
    except ray.exceptions.RayError as error:
        logger.debug("ended: %s", error)


async def _reserved(group: PlacementGroup) -> None:
    await group.ready()

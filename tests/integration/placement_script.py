"""Runs replicas without vLLM on a Ray cluster of several nodes with made-up GPUs, and prints what became of them.

A program of its own: Ray can be one cluster per process, and the tests' process has another.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from rl_vllm.config import EngineConfig, ServiceConfig
from rl_vllm.errors import ConfigError, DeadlineError, EngineStartError, NotEnoughResourcesError
from rl_vllm.service import ray_executor
from rl_vllm.service.ray_executor import RayExecutor
from tests.integration.stand_in_actor import StandInActor

WAIT_S = 60.0


def config(tp: int = 1, pp: int = 1, dp: int = 1, *, replicas: int = 1, fault: str | None = None) -> ServiceConfig:
    engine = EngineConfig(
        model=sys.argv[1],
        tokenizer=fault,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        data_parallel_size=dp,
    )
    return ServiceConfig(engine=engine, num_replicas=replicas, shutdown_timeout_s=2.0, launch_timeout_s=WAIT_S)


@asynccontextmanager
async def executor(settings: ServiceConfig) -> AsyncIterator[RayExecutor]:
    chosen = RayExecutor(actor_class=StandInActor)
    await asyncio.to_thread(chosen.prepare, settings)
    try:
        yield chosen
    finally:
        await chosen.close()
        chosen.release()


async def places(settings: ServiceConfig) -> list[Any]:
    async with executor(settings) as running:
        engines, _ = await running.launch(settings)
        return [await engine.engine_config() for engine in engines]


async def refusal(settings: ServiceConfig) -> dict[str, Any]:
    before = len(placement_group_table())
    try:
        await places(settings)
    except (ConfigError, NotEnoughResourcesError, EngineStartError, DeadlineError) as error:
        return {"error": type(error).__name__, "text": str(error), "groups": len(placement_group_table()) - before}
    return {}


async def two_per_node() -> Any:
    return await places(config(tp=2, replicas=3))


async def spread_stages() -> Any:
    """Packed as tightly as can be, the stages would be torn: four workers on the one node, two on the other."""
    return await places(config(tp=3, pp=2))


async def refused_shapes() -> Any:
    shapes = {
        "too wide": config(tp=5),
        "copies": config(tp=3, dp=2),
        "too many": config(tp=3, replicas=3),
    }
    return {name: await refusal(shape) for name, shape in shapes.items()}


async def busy_cluster() -> Any:
    """All GPUs of the larger node are somebody else's, until they are given back."""
    other = placement_group([{"GPU": 4.0}])
    await other.ready()
    ray_executor._PLACEMENT_TIMEOUT_S = 3.0
    refused = await refusal(config(tp=4))
    ray_executor._PLACEMENT_TIMEOUT_S = WAIT_S
    async with executor(config(tp=4)) as running:
        launch = asyncio.create_task(running.launch(config(tp=4)))
        await eventually(lambda: any(group["state"] == "PENDING" for group in placement_group_table().values()))
        remove_placement_group(other)
        engines, _ = await launch
        return {"refused": refused, "later": await engines[0].engine_config()}


async def replaced_replicas() -> Any:
    """Replicas are stopped in every state and started again; each start has an actor and a group of its own."""
    settings = config(tp=1, replicas=2)
    seen: dict[str, Any] = {}
    async with executor(settings) as running:
        engines, _ = await running.launch(settings)
        seen["launched"] = [await engine.engine_config() for engine in engines]
        for how, signum in (("asked", None), ("killed", signal.SIGKILL), ("frozen", signal.SIGSTOP)):
            old = (seen.get("killed") or seen.get("asked") or seen["launched"][0])["pid"]
            if signum is not None:
                os.kill(old, signum)
            await running.stop_one(0)
            await running.stop_one(0)
            await eventually(lambda pid=old: is_gone(pid))  # type: ignore[misc]
            seen[how] = await (await running.start_one(0)).engine_config()
        await running.stop_one(99)
        seen["other"] = await engines[1].engine_config()
        # One more than was launched.
        seen["third"] = await (await running.start_one(2)).engine_config()
        last = [seen[name]["pid"] for name in ("frozen", "other", "third")]
    await eventually(lambda: all(is_gone(pid) for pid in last))
    return seen


async def faults() -> Any:
    dies = await refusal(config(replicas=2, fault="dies"))
    settings = config(replicas=1, fault="hangs")
    async with executor(settings) as running:
        launch = asyncio.create_task(running.launch(settings))
        await eventually(lambda: actors() == ["ALIVE"])
        await running.stop_one(0)
        try:
            await launch
            stopped = ""
        except EngineStartError as error:
            stopped = str(error)
    hangs = ServiceConfig(engine=config(fault="hangs").engine, launch_timeout_s=8.0)
    return {"dies": dies, "stopped": stopped, "hangs": await refusal(hangs)}


def actors() -> list[str]:
    from ray.util.state import list_actors

    return [each.state for each in list_actors(timeout=10) if each.state != "DEAD"]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110 (other processes change it)
            await asyncio.sleep(0.1)


async def gpus_and_cpus_come_back() -> Any:
    await eventually(lambda: ray.available_resources().get("GPU") == 7.0 and ray.available_resources()["CPU"] == 5.0)
    return sorted({group["state"] for group in placement_group_table().values()})


async def main(nodes: list[str]) -> None:
    scenarios: list[Callable[[], Awaitable[Any]]] = [
        two_per_node,
        spread_stages,
        refused_shapes,
        busy_cluster,
        replaced_replicas,
        faults,
        gpus_and_cpus_come_back,
    ]
    for scenario in scenarios:
        began = time.monotonic()
        facts = {"scenario": scenario.__name__, "nodes": nodes, "seen": await scenario()}
        print(json.dumps(facts | {"seconds": round(time.monotonic() - began, 1)}), flush=True)


if __name__ == "__main__":
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0})
    try:
        large = cluster.add_node(num_cpus=2, num_gpus=4)
        small = cluster.add_node(num_cpus=2, num_gpus=3)
        ray.init(address=cluster.address, log_to_driver=False, include_dashboard=False)
        cluster.wait_for_nodes(timeout=WAIT_S)
        # What GPUs a node has is said, not found: vLLM's build does not matter.
        ray_executor.vllm_runs_on_cpu = lambda: False
        asyncio.run(main([large.node_id, small.node_id]))
    finally:
        ray.shutdown()
        cluster.shutdown()

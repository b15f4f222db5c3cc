"""An actor for :class:`RayExecutor` without vLLM: a fake engine that says where Ray has put it."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import AsyncGenerator

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rl_vllm.config import EngineConfig
from rl_vllm.testing import FakeEngine
from rl_vllm.types import CompletionBatch, ModelInfo, RequestBatch


class StandInActor(FakeEngine):
    """Built and started as an engine's actor is; the config's ``tokenizer`` names what it does wrong.

    ``hangs`` and ``dies``: the first replica does so while it starts.
    """

    def __init__(self, config: EngineConfig, replica: int, *, on_cpu: bool) -> None:
        super().__init__(replica)
        self._config = config
        self._on_cpu = on_cpu

    async def start(self) -> ModelInfo:
        if self._replica == 0 and self._config.tokenizer == "hangs":
            time.sleep(3600)  # noqa: ASYNC251 (it hangs)
        if self._replica == 0 and self._config.tokenizer == "dies":
            os._exit(1)
        return await self.model_info()

    async def stream(self, batch: RequestBatch) -> AsyncGenerator[CompletionBatch, None]:
        async for chunk in super().stream(batch):
            yield chunk

    async def pickled_engine_config(self) -> bytes:
        """Where this actor is, what it was given, and where vLLM's workers come to be."""
        group = ray.util.get_current_placement_group()
        assert group is not None
        facts = {
            "replica": self._replica,
            "on_cpu": self._on_cpu,
            "pid": os.getpid(),
            "group": group.id.hex(),
            "backend": self._config.engine_kwargs.get("distributed_executor_backend"),
            "address": os.environ.get("RAY_ADDRESS"),
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "engine": _place(),
            "workers": await self._workers(group),
        }
        return pickle.dumps(facts)

    async def _workers(self, group: PlacementGroup) -> list[tuple[str, list[int]]]:
        """As vLLM's Ray executor does: an actor with one GPU in every bundle."""
        if self._config.engine_kwargs.get("distributed_executor_backend") != "ray":
            return []
        strategies = [
            PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
            for index in range(len(group.bundle_specs))
        ]
        actors = [Worker.options(num_cpus=0, num_gpus=1, scheduling_strategy=each).remote() for each in strategies]
        return [await actor.place.remote() for actor in actors]


@ray.remote
class Worker:
    """Stands in for a worker of vLLM's."""

    def place(self) -> tuple[str, list[int]]:
        return _place()


def _place() -> tuple[str, list[int]]:
    context = ray.get_runtime_context()
    return context.get_node_id(), sorted(int(gpu) for gpu in context.get_accelerator_ids()["GPU"])

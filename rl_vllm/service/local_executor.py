"""Engines in this process, without Ray: for notebooks, debugging and machines that have none."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from rl_vllm.config import EngineConfig, ServiceConfig, start_timeout_s
from rl_vllm.engine.main_guard import check_main_is_guarded
from rl_vllm.engine.starting import EngineHost
from rl_vllm.errors import ConfigError, DeadlineError
from rl_vllm.protocols import Engine
from rl_vllm.service.placement import BACKEND, check_parallel, vllm_runs_on_cpu
from rl_vllm.service.preflight import check_config
from rl_vllm.service.stopping import Stops
from rl_vllm.types import ModelInfo, WeightReceiver

logger = logging.getLogger(__name__)


class LocalExecutor:
    """vLLM's front end on the service's own loop; its engine cores and workers are children of this process.

    vLLM starts them with the ``spawn`` method, which imports the program's main module again in each: a script that
    launches a service must do so below ``if __name__ == "__main__":``. Notebooks need nothing.

    Several replicas load one after the other, since they share the process's environment; on GPUs each gets devices of
    its own.
    """

    def __init__(self) -> None:
        self._config: ServiceConfig | None = None
        self._on_cpu = True
        self._hosts: dict[int, EngineHost] = {}
        # Which replica's devices each index has.
        self._places: dict[int, int] = {}
        self._stops = Stops()

    def prepare(self, config: ServiceConfig) -> None:
        check_main_is_guarded()
        check_config(config.engine)
        self._on_cpu = vllm_runs_on_cpu()
        check_parallel(config.engine, on_cpu=self._on_cpu)
        if config.engine.engine_kwargs.get(BACKEND) == "ray":
            raise ConfigError(f"{BACKEND}='ray' needs executor='ray': executor='local' runs without Ray")
        if not self._on_cpu:
            self._devices(config.engine, config.num_replicas - 1)
        self._config = config

    async def launch(self, config: ServiceConfig) -> tuple[list[Engine], ModelInfo]:
        try:
            engines = [await self.start_one(index) for index in range(config.num_replicas)]
            return engines, await engines[0].model_info()
        except BaseException:
            await self.close()
            raise

    async def start_one(self, index: int) -> Engine:
        await self.stop_one(index)
        config = self._service.engine
        if config.num_workers > 1:
            config = replace(config, engine_kwargs={BACKEND: "mp", **config.engine_kwargs})
        place = _first_free(set(self._places.values()))
        if not self._on_cpu:
            config = self._devices(config, place)
        self._places[index] = place
        host = self._hosts[index] = EngineHost(config, index, on_cpu=self._on_cpu)
        limit_s = self._service.launch_timeout_s or start_timeout_s()
        try:
            async with asyncio.timeout(limit_s):
                return await host.start()
        except TimeoutError as error:
            await self.stop_one(index)
            if isinstance(error, DeadlineError):
                raise
            raise DeadlineError(f"replica {index} to start", limit_s) from None
        except BaseException:
            await self.stop_one(index)
            raise

    async def stop_one(self, index: int) -> None:
        if index in self._hosts or index in self._stops.under_way():
            await self._stops.run(index, lambda: self._stop(index))

    async def hosts(self, index: int) -> tuple[str, ...]:
        return (WeightReceiver.THIS_HOST,) if index in self._hosts else ()

    async def close(self) -> None:
        await asyncio.gather(*(self.stop_one(index) for index in {*self._hosts, *self._stops.under_way()}))

    def release(self) -> None:
        """Nothing is held between engines."""

    async def _stop(self, index: int) -> None:
        host = self._hosts.pop(index)
        limit_s = self._service.shutdown_timeout_s
        if not await host.stop(limit_s):
            logger.warning("replica %d: its engine did not stop within %.0f s and is killed", index, limit_s)
        del self._places[index]

    @property
    def _service(self) -> ServiceConfig:
        assert self._config is not None, "prepare() comes first"
        return self._config

    @staticmethod
    def _devices(config: EngineConfig, place: int) -> EngineConfig:
        """The settings of the replica at a place, with the devices that no other place has.

        Raises:
            ConfigError: This process does not see that many.
        """
        import torch

        first = place * config.num_workers
        num_visible = torch.cuda.device_count()
        if first + config.num_workers > num_visible:
            raise ConfigError(
                f"executor='local' needs {first + config.num_workers} GPUs for {place + 1} replicas and this process "
                f"sees {num_visible}: lower num_replicas or the parallel sizes, or use executor='ray' on a cluster"
            )
        return replace(
            config,
            engine_kwargs={"device_ids": list(range(first, first + config.num_workers)), **config.engine_kwargs},
        )


def _first_free(taken: set[int]) -> int:
    return next(place for place in range(len(taken) + 1) if place not in taken)

"""An executor over fake engines: ``AsyncVLLM`` runs on them in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rl_vllm.config import ServiceConfig
from rl_vllm.errors import ConfigError
from rl_vllm.protocols import Engine
from rl_vllm.testing.fake_engine import FakeEngine
from rl_vllm.testing.gate import Gate
from rl_vllm.types import ModelInfo, WeightReceiver


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeExecutorScript:
    """What a fake executor does beyond the default.

    Attributes:
        make: Builds the engine of a replica that is started later: again, or in addition.
        launch_gate: Where ``launch`` waits, or None.
        launch_error: Raised by ``launch``, or None.
        start_gate: Where ``start_one`` waits, or None.
        start_error: Raised by ``start_one``, or None.
    """

    make: Callable[[int], Engine] = FakeEngine
    launch_gate: Gate | None = None
    launch_error: Exception | None = None
    start_gate: Gate | None = None
    start_error: Exception | None = None


class FakeExecutor:
    """Implements the service's executor on engines that exist already: ``AsyncVLLM(config, executor=...)``.

    Args:
        engines: One for each replica of the service.
        script: Departures from the default; may be replaced between calls.

    Attributes:
        events: "prepare", "launch", "start 2", "stop 2", "close" and "release", in the order of the calls.
        engines: The engine of each index that runs.
    """

    def __init__(self, engines: Sequence[Engine], *, script: FakeExecutorScript | None = None) -> None:
        self.script = script if script is not None else FakeExecutorScript()
        self.events: list[str] = []
        self.engines: dict[int, Engine] = dict(enumerate(engines))

    def prepare(self, config: ServiceConfig) -> None:
        """Check that there is an engine for every replica.

        Raises:
            ConfigError: There are more or fewer.
        """
        if len(self.engines) != config.num_replicas:
            raise ConfigError(f"num_replicas={config.num_replicas}, but the executor has {len(self.engines)} engines")
        self.events.append("prepare")

    async def launch(self, config: ServiceConfig) -> tuple[list[Engine], ModelInfo]:  # noqa: ARG002 (checked in prepare)
        self.events.append("launch")
        if self.script.launch_gate is not None:
            await self.script.launch_gate.passed()
        if self.script.launch_error is not None:
            raise self.script.launch_error
        return list(self.engines.values()), await self.engines[0].model_info()

    async def start_one(self, index: int) -> Engine:
        self.events.append(f"start {index}")
        if self.script.start_gate is not None:
            await self.script.start_gate.passed()
        if self.script.start_error is not None:
            raise self.script.start_error
        self.engines[index] = self.script.make(index)
        return self.engines[index]

    async def stop_one(self, index: int) -> None:
        if index in self.engines:
            self.events.append(f"stop {index}")
            await self.engines.pop(index).shutdown()

    async def hosts(self, index: int) -> tuple[str, ...]:
        """Fakes are of this process."""
        return (WeightReceiver.THIS_HOST,) if index in self.engines else ()

    async def close(self) -> None:
        self.events.append("close")
        for engine in self.engines.values():
            await engine.shutdown()

    def release(self) -> None:
        self.events.append("release")

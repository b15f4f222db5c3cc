"""Where engines run. The service knows only this seam, so that it runs on Ray, in one process, or on fakes."""

from __future__ import annotations

from typing import Protocol

from rl_vllm.config import ServiceConfig
from rl_vllm.protocols import Engine
from rl_vllm.types import ModelInfo


class Executor(Protocol):
    """Starts and stops the engines of one service; ``async`` methods run on the service's loop."""

    def prepare(self, config: ServiceConfig) -> None:
        """Do what must happen in the caller's own thread, before the loop exists.

        Raises:
            ConfigError: The engines could not start, as far as that can be seen now; nothing is held.
        """
        ...

    async def launch(self, config: ServiceConfig) -> tuple[list[Engine], ModelInfo]:
        """Start all engines at once and return them when every one can serve.

        Raises:
            NotEnoughResourcesError: They do not fit; nothing was started.
            EngineStartError: One did not start; the others have been stopped.
        """
        ...

    async def close(self) -> None:
        """Stop every engine and give back what they held. Idempotent."""
        ...

    def release(self) -> None:
        """Undo :meth:`prepare`, in the caller's own thread, after :meth:`close`. Idempotent."""
        ...

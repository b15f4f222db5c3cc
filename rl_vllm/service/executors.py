"""Where engines run. The service knows only this seam, so that it runs on Ray, in one process, or on fakes."""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

from rl_vllm.config import ServiceConfig
from rl_vllm.errors import ConfigError
from rl_vllm.protocols import Engine
from rl_vllm.types import ModelInfo

ExecutorChoice = Literal["ray", "local"]


@runtime_checkable
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

    async def start_one(self, index: int) -> Engine:
        """Start one engine more, or again: what an engine of this index held has been given back with :meth:`stop_one`.

        Args:
            index: Its replica; picks its seed.

        Raises:
            NotEnoughResourcesError: It does not fit.
            EngineStartError: It did not start; nothing of it is left.
            DeadlineError: It took longer than the launch limit; nothing of it is left.
        """
        ...

    async def stop_one(self, index: int) -> None:
        """Stop one engine, killing what does not answer, and give back what it held. Unknown indices are ignored."""
        ...

    async def hosts(self, index: int) -> tuple[str, ...]:
        """The machines that an engine's workers run on, as :class:`~rl_vllm.types.WeightReceiver` names them.

        Empty when nobody knows, and for unknown indices.
        """
        ...

    async def close(self) -> None:
        """Stop every engine and give back what they held. Idempotent."""
        ...

    def release(self) -> None:
        """Undo :meth:`prepare`, in the caller's own thread, after :meth:`close`. Idempotent."""
        ...


def executor_for(choice: ExecutorChoice | Executor | None) -> Executor:
    """The executor that a caller means.

    Args:
        choice: ``"ray"`` or None: actors of a Ray cluster, which is started on this machine when there is none.
            ``"local"``: engines of this process, without Ray. Or an executor.

    Raises:
        ConfigError: It is none of these.
    """
    # Imported here: a local service loads no Ray.
    if choice is None or choice == "ray":
        from rl_vllm.service.ray_executor import RayExecutor

        return RayExecutor()
    if choice == "local":
        from rl_vllm.service.local_executor import LocalExecutor

        return LocalExecutor()
    # A class has the methods too.
    if isinstance(choice, Executor) and not isinstance(choice, type):
        return choice
    raise ConfigError(f"executor must be 'ray', 'local' or an Executor, got {choice!r}")

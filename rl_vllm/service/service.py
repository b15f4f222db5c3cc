"""The multi-replica service."""

from __future__ import annotations

import asyncio
import atexit
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from functools import partial
from typing import TYPE_CHECKING, Self

from rl_vllm.config import EngineConfig, ServiceConfig
from rl_vllm.errors import ConfigError, ServiceNotRunningError
from rl_vllm.service.calls import GRACE_S, blocking, long_limit, on_loop, own_limit, rpc_limit
from rl_vllm.service.controls import ControlCalls
from rl_vllm.service.core import Core
from rl_vllm.service.executors import Executor, ExecutorChoice, executor_for
from rl_vllm.service.front_door import FrontDoor, attach
from rl_vllm.service.line import Hello, Ticket
from rl_vllm.service.loop import LoopThread, with_deadline
from rl_vllm.service.memory import MemoryCalls
from rl_vllm.service.overview import OverviewCalls
from rl_vllm.service.router import warm_up
from rl_vllm.service.settings import pretrained_config, service_config
from rl_vllm.service.streaming import StreamingCalls
from rl_vllm.types import CommitReport, InFlight, KVCache, TensorSpec, WeightReceiver, WeightUpdate

if TYPE_CHECKING:
    from rl_vllm.engine.args import AsyncEngineArgs

logger = logging.getLogger(__name__)


class VLLMService(StreamingCalls, ControlCalls, MemoryCalls, OverviewCalls):
    """Any number of vLLM replicas behind one front; a context manager.

    Methods block and may be called from any thread; what waits has a twin whose name begins with ``a``, to be awaited
    on any event loop. :meth:`launch` starts a service in one call.

    A running service can be pickled: unpickled in this process it is itself, in another one a
    :class:`rl_vllm.service.remote.RemoteService` that asks this process, as long as it lives. Copies are itself, too.

    Args:
        engine_args: Our settings, vLLM's, or a whole service's, which also says how many replicas there are.
        num_replicas: How many engines.
        actor_class: Ray actor class of the engines, in place of our own.
        enable_prefix_caching: Share KV of equal prefixes; None leaves it to ``engine_args``.
        executor: Where the engines run: "ray" (None means it), "local", or an executor.

    Raises:
        ConfigError: Two settings contradict each other, or one cannot be taken over.
    """

    def __init__(
        self,
        engine_args: EngineConfig | AsyncEngineArgs | ServiceConfig,
        num_replicas: int = 1,
        actor_class: type | None = None,
        enable_prefix_caching: bool | None = None,  # noqa: FBT001 (TorchRL's position for it)
        *,
        executor: ExecutorChoice | Executor | None = None,
    ) -> None:
        super().__init__(service_config(engine_args, num_replicas, enable_prefix_caching=enable_prefix_caching))
        if actor_class is not None and executor not in (None, "ray"):
            raise ConfigError(f"actor_class is for executor='ray', got executor={executor!r}: give one")
        self._actor_class = actor_class
        self._chosen = executor
        self._executor: Executor | None = None
        self.name = self.config.name or f"service-{secrets.token_hex(6)}"
        self.door = FrontDoor(self, self.name, Hello(self.config.request_timeout_s, rpc_limit(self.config)))

    @classmethod
    def launch(
        cls,
        engine_args: EngineConfig | AsyncEngineArgs | ServiceConfig,
        num_replicas: int = 1,
        *,
        executor: ExecutorChoice | Executor | None = None,
    ) -> Self:
        """Start all replicas in parallel and wait until every one can serve.

        Args:
            engine_args: As for the constructor.
            num_replicas: How many engines.
            executor: Where they run.

        Raises:
            ConfigError: A setting is wrong or the model cannot be found.
            NotEnoughResourcesError: The cluster cannot hold the replicas.
            EngineStartError: An engine did not start, with its own reason; everything has been stopped.
            DeadlineError: They took longer than ``launch_timeout_s``.
        """
        service = cls(engine_args, num_replicas, executor=executor)
        service.start()
        return service

    @classmethod
    def from_pretrained(
        cls,
        model_name: str,
        num_devices: int | None = None,
        num_replicas: int = 1,
        *,
        verbose: bool = True,
        compile: bool | None = None,  # noqa: A002 (TorchRL's name for it)
        executor: ExecutorChoice | Executor | None = None,
        **keywords: object,
    ) -> Self:
        """From a model name to a running service.

        Args:
            model_name: Path or hub id.
            num_devices: Devices per replica: the tensor-parallel size.
            num_replicas: How many engines.
            verbose: Log what is started.
            compile: Whether vLLM compiles the model; None means on GPUs.
            executor: Where the engines run.
            **keywords: Fields of :class:`~rl_vllm.config.EngineConfig` (``enable_fp32_output``,
                ``data_parallel_size``, ...), of :class:`~rl_vllm.config.ServiceConfig`, or of vLLM's
                ``AsyncEngineArgs``.

        Raises:
            ConfigError: A name is unknown or two values contradict each other; and what :meth:`launch` raises.
        """
        config = pretrained_config(model_name, num_devices, num_replicas, compile=compile, keywords=keywords)
        if verbose:
            logger.info("launching %d replicas of %s", num_replicas, model_name)
        return cls.launch(config, executor=executor)

    def start(self) -> None:
        """Start the engines; see :meth:`launch`. Does nothing when they run already."""
        loop = self._begin()
        if loop is None:
            return
        started = time.perf_counter()
        try:
            core = loop.run(self._launch_on_loop, timeout_s=long_limit(self.config), waited_for="the replicas to start")
        except CancelledError:
            self.shutdown()
            raise ServiceNotRunningError("shut down", "start()") from None
        except BaseException:
            self.shutdown()
            raise
        self._serve(core, time.perf_counter() - started)

    async def astart(self) -> None:
        """As :meth:`start`, awaited on any event loop; cancelling the caller stops what has been started."""
        loop = self._begin()
        if loop is None:
            return
        started = time.perf_counter()
        try:
            core = await loop.await_from_anywhere(
                self._launch_on_loop, timeout_s=long_limit(self.config), waited_for="the replicas to start"
            )
        except CancelledError:
            await self.ashutdown()
            raise ServiceNotRunningError("shut down", "astart()") from None
        except BaseException:
            await asyncio.shield(self.ashutdown())
            raise
        self._serve(core, time.perf_counter() - started)

    def _begin(self) -> LoopThread | None:
        """Do what must be done in the caller's own thread; None when the service runs already."""
        with self._lock:
            if self._state == "running":
                return None
            if self._state != "not launched":
                raise ServiceNotRunningError(self._state, "start()")
            self._executor = self._choose_executor()
            self._executor.prepare(self.config)
            self._loop = LoopThread("rl_vllm-service")
            self._state = "starting"
            # Before the engines exist: an interrupt while they start must stop them too.
            atexit.register(self.shutdown)
            return self._loop

    def _serve(self, core: Core, seconds: float) -> None:
        with self._lock:
            if self._state != "starting":
                raise ServiceNotRunningError(self._state, "start()")
            self._core = core
            self._state = "running"
        logger.info("%d replicas of %s serve after %.1f s", len(core.replicas.all), core.model.model, seconds)

    def _choose_executor(self) -> Executor:
        if self._actor_class is None:
            return executor_for(self._chosen)
        from rl_vllm.service.ray_executor import RayExecutor

        return RayExecutor(actor_class=self._actor_class)

    async def _launch_on_loop(self) -> Core:
        assert self._executor is not None
        # Beside the engines, which take longer to start: no request waits for the compiler.
        warm = asyncio.create_task(asyncio.to_thread(warm_up), name="compile-routing")
        try:
            engines, model = await self._executor.launch(self.config)
        except BaseException:
            warm.cancel()
            raise
        await warm
        core = Core(engines, model, self._executor, self.config)
        core.start()
        # At once: a shutdown that comes now must find it.
        self._core = core
        return core

    @property
    def weight_version(self) -> int:
        """The newest version that every serving replica has, of weights or of an adapter; 0 is what was launched."""
        core = self._running("weight_version")
        return max(core.replicas.version, core.policies.version)

    @on_loop()
    async def aweight_specs(self) -> tuple[TensorSpec, ...]:
        """The tensors a trainer must send; asked for once."""
        return await self._running("weight_specs()").weights.specs()

    weight_specs = blocking(aweight_specs)

    @on_loop()
    async def aweight_receivers(self) -> tuple[WeightReceiver, ...]:
        """The replicas whose engines run now, with their workers and the machines those are on."""
        living = self._running("weight_receivers()").replicas.living()
        assert self._executor is not None
        hosts = await asyncio.gather(*(self._executor.hosts(replica.index) for replica in living))
        num_workers = self.config.engine.num_workers
        return tuple(WeightReceiver(r.index, num_workers, on) for r, on in zip(living, hosts, strict=True))

    weight_receivers = blocking(aweight_receivers)

    @on_loop(own_limit)
    async def astage_weights(self, update: WeightUpdate, *, timeout_s: float) -> None:
        """Stage on every replica; see :meth:`rl_vllm.protocols.GenerationService.stage_weights`."""
        core = self._running("stage_weights()")
        core.sleep.require_weights_awake("stage_weights()")
        stage = partial(core.weights.stage, update, timeout_s)
        await with_deadline(stage, timeout_s + GRACE_S, "stage_weights()")

    stage_weights = blocking(astage_weights)

    @on_loop(own_limit)
    async def acommit_weights(
        self, update: WeightUpdate, *, in_flight: InFlight, kv: KVCache, timeout_s: float
    ) -> tuple[CommitReport, ...]:
        """Commit on every replica; see :meth:`rl_vllm.protocols.GenerationService.commit_weights`."""
        core = self._running("commit_weights()")
        core.sleep.require_weights_awake("commit_weights()")
        commit = partial(core.weights.commit, update, in_flight=in_flight, kv=kv, timeout_s=timeout_s)
        try:
            reports = await with_deadline(commit, timeout_s + GRACE_S, "commit_weights()")
        finally:
            # Also when it failed on some: the others have weights now.
            if core.weights.committed is update:
                core.sleep.weights_came()
        return reports

    commit_weights = blocking(acommit_weights)

    def shutdown(self) -> None:
        """Stop every engine and give back what it held; calls under way end in an error. Idempotent."""
        with self._lock:
            if self._loop is None or self._state == "shut down":
                self._state = "shut down"
                return
            self._state = "shut down"
            loop, executor = self._loop, self._executor
        assert executor is not None
        atexit.unregister(self.shutdown)
        try:
            limit_s = self.config.shutdown_timeout_s + 2 * GRACE_S
            loop.run(self._close_on_loop, timeout_s=limit_s, waited_for="the replicas to stop")
        finally:
            try:
                loop.close()
            finally:
                executor.release()
                # Last: calls from other processes are told what has become of them.
                self.door.close()

    async def _close_on_loop(self) -> None:
        # First: they would start again what is stopped now, or take it for a death.
        await self.requests.close()
        if self._core is not None:
            await self._core.close()
        assert self._executor is not None
        await self._executor.close()

    async def ashutdown(self) -> None:
        """As :meth:`shutdown`, awaited on any event loop."""
        await asyncio.to_thread(self.shutdown)

    def __reduce__(self) -> tuple[Callable[[Ticket], object], tuple[Ticket]]:
        self._running("pickling it")
        return attach, (self.door.ticket(),)

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self

    def __enter__(self) -> Self:
        if self._state == "not launched":
            self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    async def __aenter__(self) -> Self:
        if self._state == "not launched":
            await self.astart()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.ashutdown()

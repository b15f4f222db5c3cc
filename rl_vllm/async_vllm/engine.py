"""The service as TorchRL's scripts, wrappers and weight updaters know it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torchrl.modules.llm.backends.vllm.base import RLvLLMEngine

from rl_vllm.async_vllm.address import HeldPort, routable_address
from rl_vllm.async_vllm.torchrl_weights import LOAD_FROM_STORAGE, ActorIndex, LocalLLM, read_storage, without_copies
from rl_vllm.config import EngineConfig, RefitConfig, ServiceConfig
from rl_vllm.errors import BadInputError, ConfigError
from rl_vllm.service import VLLMService
from rl_vllm.service.executors import Executor, ExecutorChoice
from rl_vllm.types import RefitReceipt
from rl_vllm.weights import ModuleSource, SharedStorageTransport, refit

if TYPE_CHECKING:
    from rl_vllm.engine.args import AsyncEngineArgs


class AsyncVLLM(VLLMService, RLvLLMEngine):
    """Any number of vLLM replicas behind one front, with TorchRL's engine interface; a context manager.

    Methods block and may be called from any thread; what waits has a twin whose name begins with ``a``, to be awaited
    on any event loop. :meth:`launch` starts a service in one call.

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
        super().__init__(engine_args, num_replicas, actor_class, enable_prefix_caching, executor=executor)
        self._port = HeldPort()
        self._master: tuple[str, int] | None = None
        self._transport: SharedStorageTransport | None = None
        self._transport_lock = threading.Lock()
        self.last_receipt: RefitReceipt | None = None

    @property
    def actors(self) -> Sequence[ActorIndex]:
        """Every index that a replica has or had."""
        return [ActorIndex(index) for index in super().actors]

    def get_tp_size(self) -> int:
        """Workers of a replica that share each layer."""
        return self.config.engine.tensor_parallel_size

    def get_model_metadata(self) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """Name, dtype and full shape of every tensor that a trainer must send, in checkpoint names."""
        return {spec.name: (_dtype_of(spec.dtype), torch.Size(spec.shape)) for spec in self.weight_specs()}

    def get_master_address(self) -> str:
        """An address of this process that other hosts reach, or the one given to :meth:`init_weight_update_group`."""
        return routable_address() if self._master is None else self._master[0]

    def get_master_port(self) -> int:
        """A port that is kept for a weight-update group, or the one given to :meth:`init_weight_update_group`."""
        return self._port.number if self._master is None else self._master[1]

    def init_weight_update_group(self, master_address: str | None = None, master_port: int | None = None) -> None:
        """Make :meth:`update_weights` ready: ask the engines what they expect, and hold a place to stage it.

        Weights go through shared storage, which needs no process group: address and port are kept for those who ask.
        Idempotent.

        Raises:
            ConfigError: Only one of address and port is given.
            ServiceNotRunningError: Before launch or after shutdown.
        """
        if (master_address is None) != (master_port is None):
            raise ConfigError(
                f"give both or neither, got master_address={master_address!r} master_port={master_port!r}"
            )
        self.weight_specs()
        if master_address is not None and master_port is not None:
            self._port.release()
            self._master = (master_address, int(master_port))
        self._open_transport()

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Install weights on every replica; returns when all serve them. The receipt is in ``last_receipt``.

        Args:
            weights: Names, as a checkpoint has them, and tensors; read once, in this thread. A tied head and the
                buffers of rotary embeddings may be there.

        Raises:
            BadInputError: A name comes twice, or something is no tensor.
            WeightsMismatchError: They are not the engine's tensors; nothing was sent.
            RefitError: The refit did not take on every replica; names phase, replicas and reason.
            ServiceNotRunningError: Before launch or after shutdown.
        """
        self._running("update_weights()")
        collected: dict[str, torch.Tensor] = {}
        for name, tensor in weights:
            if name in collected:
                raise BadInputError(f"{name} comes twice: send every tensor once")
            collected[name] = tensor
        expected = {spec.name: spec for spec in self.weight_specs()}
        source = ModuleSource(without_copies(collected, expected))
        self.last_receipt = refit(self, source, self._open_transport(), config=RefitConfig())

    async def aupdate_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As :meth:`update_weights`, awaited on any event loop; cancelling the caller does not stop the refit."""
        await asyncio.to_thread(self.update_weights, weights)

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
        *,
        actor_index: int | None = None,
    ) -> list[list[object]]:
        """Call a method on every worker; see the service's.

        ``load_weights_from_storage``, which TorchRL's double buffer calls, is one refit by the files in its folder.

        Raises:
            ConfigError: TorchRL's receiver would start Ray to wait for the answer.
            BadInputError: There are no weights in the folder.
        """
        if method != LOAD_FROM_STORAGE:
            return super().collective_rpc(method, timeout, args, kwargs, actor_index=actor_index)
        self._running("collective_rpc()")
        from rl_vllm.service.ray_cluster import is_up

        if not is_up():
            raise ConfigError(
                "TorchRL's receiver waits with ray.get, which would start Ray, and this service runs without: "
                "create_receiver(service.as_local_llm())"
            )
        if not args:
            raise ConfigError(f"{LOAD_FROM_STORAGE} needs the folder that the sender wrote to, args=(folder, ...)")
        self.update_weights(read_storage(str(args[0])).items())
        # Nothing is left to wait for.
        return []

    def as_local_llm(self) -> LocalLLM:
        """This service as TorchRL's receivers want an engine in their own process; no Ray is needed."""
        return LocalLLM(self.update_weights, self.reset_prefix_cache)

    def shutdown(self) -> None:
        """Stop every engine and give back what it held; calls under way end in an error. Idempotent."""
        try:
            super().shutdown()
        finally:
            self._port.release()
            with self._transport_lock:
                if self._transport is not None:
                    self._transport.close()
                    self._transport = None

    def _open_transport(self) -> SharedStorageTransport:
        with self._transport_lock:
            if self._transport is None:
                self._transport = SharedStorageTransport()
            return self._transport


def make_async_vllm_engine(
    *,
    model_name: str,
    num_devices: int | None = None,
    num_replicas: int = 1,
    verbose: bool = True,
    compile: bool | None = None,  # noqa: A002 (TorchRL's name for it)
    executor: ExecutorChoice | Executor | None = None,
    **keywords: object,
) -> AsyncVLLM:
    """TorchRL's name for :meth:`AsyncVLLM.from_pretrained`; ``num_devices`` is per replica."""
    return AsyncVLLM.from_pretrained(
        model_name,
        num_devices,
        num_replicas,
        verbose=verbose,
        compile=compile,
        executor=executor,
        **keywords,
    )


def _dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"torch has no dtype {name!r}")
    return dtype

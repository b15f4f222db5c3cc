"""TorchRL's weight-sync interface over :func:`~rl_vllm.weights.refit`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.weight_update.weight_sync_schemes import WeightSyncScheme

from rl_vllm.config import RefitConfig
from rl_vllm.errors import ConfigError, RefitError
from rl_vllm.protocols import GenerationService, SendingTransport, WeightSource, WeightTransport
from rl_vllm.types import RefitReceipt, Verify
from rl_vllm.weights.adapter import refit_adapter, require_adapter_settings
from rl_vllm.weights.auto import TransportChoice, choose_transport, gather_facts
from rl_vllm.weights.broadcast import BroadcastTransport
from rl_vllm.weights.ipc import IPCTransport
from rl_vllm.weights.object_store import ObjectStoreTransport
from rl_vllm.weights.shared_storage import SharedStorageTransport
from rl_vllm.weights.source import ModuleSource
from rl_vllm.weights.trained_adapter import TrainedAdapter
from rl_vllm.weights.update import refit
from rl_vllm.weights.vllm_nccl import VLLMNCCLTransport

logger = logging.getLogger(__name__)

Weights: TypeAlias = nn.Module | Mapping[str, torch.Tensor] | TensorDictBase | WeightSource

Transport: TypeAlias = WeightTransport | SendingTransport
Folder: TypeAlias = str | os.PathLike[str] | None

# A transport is one file and one line here.
TRANSPORTS: dict[str, Callable[[TransportChoice, RefitConfig, Folder], Transport]] = {
    "broadcast": lambda choice, config, _folder: BroadcastTransport(
        hold=choice.hold, checksum=config.verify is not Verify.NONE
    ),
    "ipc": lambda _choice, config, _folder: IPCTransport(checksum=config.verify is not Verify.NONE),
    "object_store": lambda _choice, config, _folder: ObjectStoreTransport(
        keep_versions=config.keep_versions, checksum=config.verify is not Verify.NONE
    ),
    "shared_storage": lambda _choice, config, folder: SharedStorageTransport(
        folder, keep_versions=config.keep_versions, checksum=config.verify is not Verify.NONE
    ),
    "vllm_nccl": lambda _choice, config, _folder: VLLMNCCLTransport(checksum=config.verify is not Verify.NONE),
}
AUTO = "auto"


class VersionedCollector(Protocol):
    """What a sender needs of a TorchRL collector."""

    def increment_version(self) -> None:
        """Count one more policy version."""
        ...


@runtime_checkable
class _CheckableSource(WeightSource, Protocol):
    """A weight source that can be told from other values."""


class VLLMWeightSyncScheme(WeightSyncScheme):
    """Keeps a vLLM service's weights equal to a trainer's model.

    Two ways to use it, with the same refit underneath::

        sender = VLLMWeightSyncScheme(service=service).create_sender()
        sender.register_model(model)
        receipt = sender.update_weights()

        scheme = VLLMWeightSyncScheme(service=service)
        scheme.register_model(model)
        collector = Collector(env, policy, weight_sync_schemes={"policy": scheme}, ...)
        collector.update_policy_weights_()

    In the second, the collector's construction sends the registered model's weights, so that no rollout is made with
    others; and the collector counts its own versions.

    Args:
        transport: ``shared_storage``, ``broadcast``, ``object_store``; ``auto``, which is one of these three, chosen by
            the first refit (see :attr:`transport_choice`); where there are GPUs ``vllm_nccl`` or ``ipc``; or one that
            you made, for example ``BroadcastTransport(hold="none")``; the scheme closes it.
        service: What to refit; may be given to :meth:`create_sender` or :meth:`create_receiver` instead.
        config: None means the defaults of :class:`~rl_vllm.config.RefitConfig`.
        folder: Where ``shared_storage`` puts its files; None means a private folder on this machine.
        adapter: Send the LoRA adapter of a PEFT model alone, under this name (:func:`~rl_vllm.weights.refit_adapter`),
            for example "policy"; needs ``transport="shared_storage"``. None sends whole weights, adapters merged.

    Raises:
        ConfigError: The transport is not known, or has no use for a folder or an adapter.
    """

    def __init__(
        self,
        transport: str | Transport = "shared_storage",
        *,
        service: GenerationService | None = None,
        config: RefitConfig | None = None,
        folder: Folder = None,
        adapter: str | None = None,
    ) -> None:
        if isinstance(transport, str) and transport not in TRANSPORTS and transport != AUTO:
            raise ConfigError(f"transport must be one of {', '.join(sorted([*TRANSPORTS, AUTO]))}, got {transport!r}")
        if folder is not None and transport not in ("shared_storage", AUTO):
            raise ConfigError(f"folder={os.fspath(folder)!r} is for transport='shared_storage' or 'auto': leave it out")
        if adapter is not None:
            if transport != "shared_storage":
                raise ConfigError(
                    f"adapter={adapter!r} is written to a folder, which engines read: use transport='shared_storage'"
                )
            require_adapter_settings(adapter, config or RefitConfig())
        self._adapter = adapter
        self._transport = None if isinstance(transport, str) else transport
        self._choice = None if transport == AUTO else _given(transport)
        super().__init__(strategy="tensordict")
        self._transport_name = transport if isinstance(transport, str) else None
        self._service = service
        self._config = config or RefitConfig()
        self._folder = folder
        self._trained: Weights | None = None
        self.last_receipt: RefitReceipt | None = None

    def create_sender(self, service: GenerationService | None = None) -> VLLMWeightSender:
        """The trainer's end."""
        self._bind(service)
        return VLLMWeightSender(self)

    def create_receiver(self, service: GenerationService) -> VLLMWeightReceiver:
        """Name the service that receives; the engines load by themselves, so the result only looks and pushes."""
        self._bind(service)
        return VLLMWeightReceiver(self, service)

    @property
    def transport_choice(self) -> TransportChoice | None:
        """Which transport moves the bytes, and why it is that one; None with ``auto`` before the first refit."""
        return self._choice

    def create_transport(self, **kwargs: Any) -> Transport:
        """The transport that moves the bytes, made by the first call; with ``auto`` by the first refit."""
        if kwargs:
            raise ConfigError(f"create_transport takes no arguments, got {sorted(kwargs)}")
        if self._transport is None:
            if self._transport_name is None:
                raise ConfigError("this scheme was shut down, and its transport with it: make both anew")
            if self._choice is None:
                raise ConfigError("transport='auto' is chosen by the first refit: refit first, or name a transport")
            self._transport = TRANSPORTS[self._choice.name](self._choice, self._config, self._folder)
        return self._transport

    def register_model(self, model: Weights) -> None:
        """Remember whose weights to send when none are given; its values are read at each refit.

        Raises:
            BadInputError: It holds no weights that can be sent.
        """
        if self._adapter is None:
            self._trained = _as_source(model)
        else:
            self._trained = _adapted(model)

    def refit(self, weights: Weights | None = None) -> RefitReceipt:
        """Install weights, or the registered model's, on every replica.

        Raises:
            ConfigError: There is no service or nothing to send, or the transport needs a GPU that is not there.
            BadInputError: The weights are of no kind that can be sent, or an entry of theirs is not.
            RefitError: See :func:`~rl_vllm.weights.refit`.
        """
        if self._service is None:
            raise ConfigError("no service to refit: VLLMWeightSyncScheme(service=...) or create_sender(service)")
        trained = self._trained if weights is None else weights
        if trained is None:
            raise ConfigError("no weights to send: call register_model(model) first, or pass weights")
        if self._adapter is not None:
            self.last_receipt = refit_adapter(
                self._service, _adapted(trained), name=self._adapter, folder=self._folder, config=self._config
            )
            return self.last_receipt
        source = _as_source(trained)
        if self._choice is None:
            self._choice = self._choose(self._service, source)
        self.last_receipt = refit(self._service, source, self.create_transport(), config=self._config)
        return self.last_receipt

    def send(self, weights: Weights | None = None, worker_ids: int | list[int] | None = None) -> None:
        """Refit on behalf of a collector, which counts the version itself.

        Raises:
            ConfigError: ``worker_ids`` is given: replicas are refitted together.
        """
        if worker_ids is not None:
            raise ConfigError(f"worker_ids={worker_ids!r}: all replicas are refitted together, leave it out")
        self.refit(weights)

    def shutdown(self) -> None:
        """Close the transport. Idempotent."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None
        super().shutdown()

    def _choose(self, service: GenerationService, source: WeightSource) -> TransportChoice:
        receivers = service.weight_receivers()
        if not receivers:
            reason = "no replica is up, so that transport='auto' could be chosen: wait for one, or launch a new service"
            raise RefitError(service.weight_version + 1, "check", (), reason)
        choice = choose_transport(gather_facts(self._folder, receivers, source))
        logger.info("transport='auto' is %r: %s", choice.name, choice.reason)
        return choice

    def _bind(self, service: GenerationService | None) -> None:
        if service is None:
            return
        if self._service is not None and self._service is not service:
            raise ConfigError("this scheme refits another service already: make one scheme for each service")
        self._service = service

    def _init_on_sender_impl(self, *, model_id: str | None = None, context: Any = None, **kwargs: Any) -> None:
        if kwargs:
            raise ConfigError(
                f"weights go to the vLLM service, not to collector workers ({sorted(kwargs)} given): use this scheme "
                "with a collector of one process, or create_sender()"
            )
        self.model_id = model_id
        self.context = context

    def _init_on_receiver_impl(self, model_id: str, context: Any = None, **kwargs: Any) -> None:  # noqa: ARG002
        raise ConfigError(
            f"model {model_id!r}: weights go to the vLLM service, a collector worker has nothing to receive: use this "
            "scheme in the process of the trainer"
        )

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any | None = None
    ) -> None:
        if weights is not None or self._trained is not None:
            self.send(weights, worker_ids=worker_idx)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        chosen = None if self._transport_name == AUTO else self._choice
        return state | {"_transport": None, "_service": None, "_trained": None, "_choice": chosen}


class VLLMWeightSender:
    """The trainer's end of a scheme, with the methods that TorchRL's scripts call."""

    def __init__(self, scheme: VLLMWeightSyncScheme) -> None:
        self._scheme = scheme
        self._collectors: list[VersionedCollector] = []

    def register_model(self, model: Weights) -> None:
        """See :meth:`VLLMWeightSyncScheme.register_model`."""
        self._scheme.register_model(model)

    def register_collector(self, collector: VersionedCollector) -> None:
        """Count one more policy version on this collector after each update that took."""
        if collector not in self._collectors:
            self._collectors.append(collector)

    def update_weights(self, weights: Weights | None = None) -> RefitReceipt:
        """Install weights, or the registered model's; returns when every replica serves them.

        Raises:
            ConfigError: There is no service or nothing to send.
            RefitError: See :func:`~rl_vllm.weights.refit`; no collector's version moves.
        """
        receipt = self._scheme.refit(weights)
        for collector in self._collectors:
            collector.increment_version()
        return receipt

    def shutdown(self) -> None:
        """Close the scheme's transport. Idempotent."""
        self._collectors.clear()
        self._scheme.shutdown()


class VLLMWeightReceiver:
    """The engines' end: they load on commit, so there is nothing to poll."""

    def __init__(self, scheme: VLLMWeightSyncScheme, service: GenerationService) -> None:
        self._scheme = scheme
        self._service = service

    @property
    def weight_version(self) -> int:
        """The newest version that every serving replica has."""
        return self._service.weight_version

    def apply_weights(self, weights: Weights) -> RefitReceipt:
        """Install these weights; see :meth:`VLLMWeightSyncScheme.refit`."""
        return self._scheme.refit(weights)


def _adapted(weights: Weights) -> nn.Module:
    """The module with the adapter in it; refuses what holds none."""
    TrainedAdapter(weights)
    assert isinstance(weights, nn.Module), "else it was refused"
    return weights


def _given(transport: str | Transport) -> TransportChoice:
    name = transport if isinstance(transport, str) else transport.name
    return TransportChoice(name, f"transport={name!r} was {'named' if isinstance(transport, str) else 'given'}")


def _as_source(weights: Weights) -> WeightSource:
    if isinstance(weights, nn.Module | Mapping | TensorDictBase) or not isinstance(weights, _CheckableSource):
        return ModuleSource(weights)
    return weights

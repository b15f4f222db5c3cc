"""Adapter-only refits: the LoRA matrices alone are sent, and swapped while requests run."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from rl_vllm.config import RefitConfig
from rl_vllm.errors import AdapterMismatchError, AdapterRefitError, ConfigError, RefitError, RLVLLMError
from rl_vllm.protocols import AdapterService, GenerationService
from rl_vllm.types import AdapterUpdate, InFlight, KVCache, RefitReceipt, Verify
from rl_vllm.weights.adapter_folder import AdapterFolder
from rl_vllm.weights.ledger import Ledger, turn
from rl_vllm.weights.trained_adapter import TrainedAdapter, find_problems
from rl_vllm.weights.verify import LogprobDifference, LogprobProbe, prepare_probe

logger = logging.getLogger(__name__)

TRANSPORT = "adapter"

# Loading it; what the engines take is asked once in the life of a service.
RPCS_PER_ADAPTER = 1

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def refit_adapter(
    service: GenerationService,
    model: nn.Module,
    *,
    name: str = "policy",
    folder: str | os.PathLike[str] | None = None,
    version: int | None = None,
    config: RefitConfig | None = None,
    default: bool = True,
) -> RefitReceipt:
    """Install a model's LoRA adapter on every replica; the base weights stay, and nothing pauses.

    Requests that begin from now on and name this adapter, or none, get the new version. Those in flight end under the
    version they began with, which goes afterwards. Versions are those of :func:`~rl_vllm.weights.refit`: they only
    grow, and refits of one service wait for each other. Files go when a later refit finds that no replica needs them.

    Args:
        service: Its engines run with LoRA and have a free slot (``max_cpu_loras`` of at least 2): the old version stays
            until the new one serves, and longer while requests use it.
        model: A ``PeftModel`` with one active LoRA adapter, or a module that contains exactly one.
        name: What requests call the adapter.
        folder: Where versions are written, seen by every engine under the same path; kept at the end. None means a
            private folder on this machine.
        version: Above every version tried before and below 2**31; None means the next one.
        config: None means the defaults. ``in_flight`` and ``kv`` have no other value here; ``Verify.CHECKSUM`` has
            every engine compare what it reads with what was written, ``Verify.LOGPROBS`` also has every replica score
            the probe batch as the model does, before any request gets the adapter.
        default: Whether requests that name no adapter get it too; :data:`~rl_vllm.types.BASE_MODEL` then names the
            base model.

    Raises:
        BadInputError: There is no single PEFT model with one active LoRA adapter, or nothing can be scored.
        AdapterMismatchError: It does not fit the service; lists every reason; nothing was written.
        ConfigError: A setting has no meaning here, or the service takes no adapters.
        AdapterRefitError: Names version, phase, replicas and reason. Every replica still answers by what it had, and
            what was loaded of the new version has been removed.
        DeadlineError: Another refit of this service did not end in time.
    """
    config = config or RefitConfig()
    require_adapter_settings(name, config)
    if not isinstance(service, AdapterService):
        raise ConfigError(f"a {type(service).__name__} takes no adapters: send merged weights by refit")
    adapter = TrainedAdapter(model)
    where = None if folder is None else Path(folder).expanduser().absolute()
    with turn(service, config, version) as (ledger, next_version):
        files = ledger.adapter_folders.setdefault(where, AdapterFolder(where))
        receipt = _refit_adapter(service, adapter, _Wish(name, next_version, default), config, ledger, files)
    logger.info("adapter refit %s", receipt)
    return receipt


def require_adapter_settings(name: str, config: RefitConfig) -> None:
    """Raise :class:`ConfigError` for a name that is none, and for settings that only whole weights have."""
    if _NAME.fullmatch(name) is None:
        raise ConfigError(f"an adapter's name is letters, digits, dots, dashes and underscores, got {name!r}")
    if config.in_flight is not InFlight.KEEP:
        raise ConfigError(
            f"in_flight={config.in_flight} is for whole weights: requests in flight end under the adapter they began "
            "with; use InFlight.KEEP, and abort_request() what is not wanted any more"
        )
    if config.kv is not KVCache.RECOMPUTE:
        raise ConfigError(f"kv={config.kv} is for whole weights: every version of an adapter has its own KV; leave it")


@dataclass(frozen=True, slots=True)
class _Wish:
    """What the caller wants the version to be."""

    name: str
    version: int
    default: bool


def _refit_adapter(
    service: AdapterService,
    adapter: TrainedAdapter,
    wish: _Wish,
    config: RefitConfig,
    ledger: Ledger,
    files: AdapterFolder,
) -> RefitReceipt:
    started = time.perf_counter()
    tensors, expected = adapter.tensors(), service.weight_specs()
    problems = find_problems(wish.name, tensors, adapter.config, service.adapter_state(), expected)
    if problems:
        raise AdapterMismatchError(problems)
    probe = prepare_probe(service, adapter.source(), expected, config, None)
    checked = time.perf_counter()
    # Before anything is loaded: what a replica may have had under a name is never another version.
    ledger.tried = wish.version
    try:
        update = _write(files, adapter, tensors, wish, config)
        left_s = max(config.stage_timeout_s - (time.perf_counter() - checked), 0.001)
        phase_s, difference = {"check": checked - started}, None
        try:
            stall_s = service.stage_adapter(update, timeout_s=left_s)
            staged = time.perf_counter()
            phase_s["stage"] = staged - checked
            if probe is not None:
                difference = _compare(probe, service, update)
                phase_s["verify"] = time.perf_counter() - staged
            committing = time.perf_counter()
            num_replicas = service.commit_adapter(update, default=wish.default)
            phase_s["commit"] = time.perf_counter() - committing
        except BaseException:
            # A service that has ended has no adapter left to remove.
            with suppress(RLVLLMError):
                service.discard_adapter(update)
            raise
    finally:
        _tidy(service, files)
    return RefitReceipt(
        version=wish.version,
        transport=TRANSPORT,
        in_flight=InFlight.KEEP,
        kv=KVCache.SEPARATE,
        num_replicas=num_replicas,
        num_tensors=update.num_tensors,
        num_bytes=update.num_bytes,
        phase_s=phase_s,
        stall_s=stall_s,
        checksum=update.checksum or "",
        num_rpcs=RPCS_PER_ADAPTER,
        logprob_max_difference=None if difference is None else difference.largest,
        logprob_mean_difference=None if difference is None else difference.mean,
    )


def _write(
    files: AdapterFolder,
    adapter: TrainedAdapter,
    tensors: Mapping[str, torch.Tensor],
    wish: _Wish,
    config: RefitConfig,
) -> AdapterUpdate:
    try:
        return files.write(wish.name, wish.version, tensors, adapter.config, checksum=config.verify is not Verify.NONE)
    except OSError as error:
        reason = f"the adapter cannot be written: {error}: free space, or choose another folder"
        raise AdapterRefitError(wish.version, "stage", (), reason) from error


def _compare(probe: LogprobProbe, service: AdapterService, update: AdapterUpdate) -> LogprobDifference:
    try:
        return probe.compare(service, update.version, adapter=update.full_name)
    except RefitError as error:
        raise AdapterRefitError(error.version, error.phase, error.replicas, error.reason) from error


def _tidy(service: AdapterService, files: AdapterFolder) -> None:
    """Remove the files of versions that no engine could need again, also one that starts later."""
    with suppress(RLVLLMError):
        state = service.adapter_state()
        files.keep({*state.loaded, *state.leaving})

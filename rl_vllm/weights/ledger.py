"""One refit of a service at a time, and versions that only grow, whatever it is that is refitted."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rl_vllm.config import RefitConfig
from rl_vllm.errors import DeadlineError, RefitError
from rl_vllm.protocols import GenerationService
from rl_vllm.weights.adapter_folder import AdapterFolder

# Completions carry the version of each token as int32.
MAX_VERSION = 2**31 - 1


@dataclass(eq=False)
class Ledger:
    """What this process knows of one service: who refits it now, and the newest version it tried to install.

    Attributes:
        lock: Held by the refit under way.
        tried: The newest version that a replica may have had.
        adapter_folders: Where its adapters lie, by the folder that the caller chose.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    tried: int = 0
    adapter_folders: dict[Path | None, AdapterFolder] = field(default_factory=dict)


_ledgers: dict[int, Ledger] = {}
_ledgers_lock = threading.Lock()


@contextmanager
def turn(service: GenerationService, config: RefitConfig, version: int | None) -> Iterator[tuple[Ledger, int]]:
    """Wait for the refit of this service that is under way, then be it.

    Args:
        service: What is refitted.
        config: Its two limits together are the limit for waiting.
        version: The caller's wish; None means the next one.

    Yields:
        The service's ledger and the version to install.

    Raises:
        RefitError: Phase "check": the version has been used, or is above ``MAX_VERSION``.
        DeadlineError: The other refit did not end in time.
    """
    ledger = _ledger_of(service)
    limit_s = config.stage_timeout_s + config.commit_timeout_s
    if not ledger.lock.acquire(timeout=limit_s):
        raise DeadlineError("another refit of this service", limit_s)
    try:
        yield ledger, _next_version(service, ledger, version)
    finally:
        ledger.lock.release()


def _next_version(service: GenerationService, ledger: Ledger, version: int | None) -> int:
    newest = max(service.weight_version, ledger.tried)
    if version is None:
        version = newest + 1
    if version > MAX_VERSION:
        reason = f"a version is at most {MAX_VERSION}, which int32 holds, and {version} is above: pass a lower one"
        raise RefitError(version, "check", (), reason)
    if version <= newest:
        reason = f"versions only grow and {newest} has been used: pass a higher one, or none"
        raise RefitError(version, "check", (), reason)
    return version


def _ledger_of(service: GenerationService) -> Ledger:
    with _ledgers_lock:
        key = id(service)
        if key not in _ledgers:
            _ledgers[key] = Ledger()
            weakref.finalize(service, _ledgers.pop, key, None)
        return _ledgers[key]

"""One refit from end to end: check, stage, commit, prove."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import Counter
from dataclasses import dataclass, field

from rl_vllm.config import RefitConfig
from rl_vllm.errors import DeadlineError, RefitError
from rl_vllm.protocols import GenerationService, WeightSource, WeightTransport
from rl_vllm.types import CommitReport, RefitReceipt, WeightUpdate
from rl_vllm.weights.check import check_specs
from rl_vllm.weights.source import CastSource

logger = logging.getLogger(__name__)

# Stage and commit; the specs are asked for once in the life of a service.
RPCS_PER_REFIT = 2

# Completions carry the version of each token as int32.
MAX_VERSION = 2**31 - 1


@dataclass(eq=False)
class _Ledger:
    """What this process knows of one service: who refits it now, and the newest version it tried to commit."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    tried: int = 0


_ledgers: dict[int, _Ledger] = {}
_ledgers_lock = threading.Lock()


def refit(
    service: GenerationService,
    source: WeightSource,
    transport: WeightTransport,
    *,
    version: int | None = None,
    config: RefitConfig | None = None,
) -> RefitReceipt:
    """Install the source's weights on every replica, or leave every replica as it was.

    Refits of one service wait for each other. Weights are cast to the engine's dtypes on the way.

    Args:
        service: The replicas.
        source: The trainer's weights.
        transport: How they move.
        version: Above every version tried before and below 2**31; None means the next one.
        config: None means the defaults of :class:`~rl_vllm.config.RefitConfig`.

    Raises:
        WeightsMismatchError: The tensors are not the engine's; lists every difference; nothing moved.
        RefitError: Names version, phase, replicas and reason. What was staged has been removed, unless replicas serve
            it now. After a failure in commit the version number is not used again, because a replica may serve it.
        DeadlineError: Another refit of this service did not end in time.
    """
    config = config or RefitConfig()
    ledger = _ledger_of(service)
    limit_s = config.stage_timeout_s + config.commit_timeout_s
    if not ledger.lock.acquire(timeout=limit_s):
        raise DeadlineError("another refit of this service", limit_s)
    try:
        return _refit(service, source, transport, _next_version(service, ledger, version), config, ledger)
    finally:
        ledger.lock.release()


def _refit(
    service: GenerationService,
    source: WeightSource,
    transport: WeightTransport,
    version: int,
    config: RefitConfig,
    ledger: _Ledger,
) -> RefitReceipt:
    started = time.perf_counter()
    expected = service.weight_specs()
    check_specs(source.specs(), expected)
    checked = time.perf_counter()
    update = transport.stage(CastSource(source, expected), version, timeout_s=config.stage_timeout_s)
    try:
        left_s = max(config.stage_timeout_s - (time.perf_counter() - checked), 0.001)
        service.stage_weights(update, timeout_s=left_s)
        staged = time.perf_counter()
        ledger.tried = version
        reports = service.commit_weights(
            update, in_flight=config.in_flight, kv=config.kv, timeout_s=config.commit_timeout_s
        )
        checksum = _agreed_checksum(update, reports)
    except BaseException:
        # When some replicas took it, those that start again must find it.
        if service.weight_version < version:
            transport.discard(update)
        raise
    committed = time.perf_counter()
    try:
        transport.retire(version)
    except OSError as error:
        logger.warning("versions older than %d could not be removed: %s", version, error)
    receipt = RefitReceipt(
        version=version,
        transport=update.transport,
        in_flight=config.in_flight,
        kv=config.kv,
        num_replicas=len(reports),
        num_tensors=update.num_tensors,
        num_bytes=update.num_bytes,
        phase_s={"check": checked - started, "stage": staged - checked, "commit": committed - staged},
        stall_s=max(report.stall_s for report in reports),
        checksum=checksum,
        num_rpcs=RPCS_PER_REFIT,
    )
    logger.info("refit %s", receipt)
    return receipt


def _next_version(service: GenerationService, ledger: _Ledger, version: int | None) -> int:
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


def _agreed_checksum(update: WeightUpdate, reports: tuple[CommitReport, ...]) -> str:
    """The digest that every replica computed from the bytes it received, and the trainer from those it sent."""
    if not reports:
        raise RefitError(update.version, "commit", (), "no replica reported a commit: none is serving")
    late = tuple(index for index, report in enumerate(reports) if report.version != update.version)
    if late:
        raise RefitError(update.version, "commit", late, f"they report version {reports[late[0]].version}")
    counts = Counter(report.checksum for report in reports)
    agreed = update.checksum if update.checksum is not None else counts.most_common(1)[0][0]
    wrong = tuple(index for index, report in enumerate(reports) if report.checksum != agreed)
    if wrong:
        reason = f"they loaded other weights: checksum {reports[wrong[0]].checksum}, expected {agreed}"
        raise RefitError(update.version, "commit", wrong, reason)
    return agreed


def _ledger_of(service: GenerationService) -> _Ledger:
    with _ledgers_lock:
        key = id(service)
        if key not in _ledgers:
            _ledgers[key] = _Ledger()
            weakref.finalize(service, _ledgers.pop, key, None)
        return _ledgers[key]

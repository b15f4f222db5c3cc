"""One refit from end to end: check, stage, commit, prove."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import replace
from functools import partial

from rl_vllm.config import RefitConfig
from rl_vllm.errors import BadInputError, RefitError
from rl_vllm.protocols import AdapterService, GenerationService, SendingTransport, WeightSource, WeightTransport
from rl_vllm.types import BASE_MODEL, CommitReport, RefitReceipt, Sending, Verify, WeightReceiver, WeightUpdate
from rl_vllm.weights.check import check_specs
from rl_vllm.weights.ledger import Ledger, turn
from rl_vllm.weights.lockstep import LeadingSource
from rl_vllm.weights.sending import Sender
from rl_vllm.weights.source import CastSource, ModuleSource
from rl_vllm.weights.verify import Scorer, prepare_probe

logger = logging.getLogger(__name__)

# Stage and commit; the specs are asked for once in the life of a service.
RPCS_PER_REFIT = 2


def refit(
    service: GenerationService,
    source: WeightSource,
    transport: WeightTransport | SendingTransport,
    *,
    version: int | None = None,
    config: RefitConfig | None = None,
    scorer: Scorer | None = None,
) -> RefitReceipt:
    """Install the source's weights on every replica, or leave every replica as it was.

    Refits of one service wait for each other. Weights are cast to the engine's dtypes on the way.

    Args:
        service: The replicas.
        source: The trainer's weights.
        transport: How they move.
        version: Above every version tried before and below 2**31; None means the next one.
        config: None means the defaults of :class:`~rl_vllm.config.RefitConfig`.
        scorer: With ``Verify.LOGPROBS``, the trainer's logprobs of tokens 1.. of each sequence, float32 [length - 1];
            None means the source's own Hugging Face model.

    Raises:
        BadInputError: With ``Verify.LOGPROBS``: nothing can score on the trainer's side, or a probe prompt does not fit
            the model. Or the source merges adapters and the service has a trained one, which would be applied to them
            again. Nothing moved.
        WeightsMismatchError: The tensors are not the engine's; lists every difference; nothing moved.
        RefitError: Names version, phase, replicas and reason. What was staged has been removed, unless replicas serve
            it now. After a failure in commit the version number is not used again, because a replica may serve it.
            Phase "verify": the weights are committed and every replica serves them; what differs is the model.
        DeadlineError: Another refit of this service did not end in time.
    """
    config = config or RefitConfig()
    with turn(service, config, version) as (ledger, next_version):
        return _refit(service, source, transport, next_version, config, ledger, scorer)


def _refit(
    service: GenerationService,
    source: WeightSource,
    transport: WeightTransport | SendingTransport,
    version: int,
    config: RefitConfig,
    ledger: Ledger,
    scorer: Scorer | None,
) -> RefitReceipt:
    started = time.perf_counter()
    expected = service.weight_specs()
    check_specs(source.specs(), expected)
    has_adapters = _require_adapters_once(service, source)
    probe = prepare_probe(service, source, expected, config, scorer)
    checked = time.perf_counter()
    cast = CastSource(source, expected)
    update = _begin(service, cast, transport, version, config)
    sender = Sender(transport, cast, update)
    try:
        left_s = max(config.stage_timeout_s - (time.perf_counter() - checked), 0.001)
        sender.during(Sending.WHILE_STAGING, lambda: service.stage_weights(update, timeout_s=left_s), left_s)
        staged = time.perf_counter()
        ledger.tried = version
        commit = partial(service.commit_weights, update, in_flight=config.in_flight, kv=config.kv)
        limit_s = config.commit_timeout_s
        reports = sender.during(Sending.WHILE_COMMITTING, lambda: commit(timeout_s=limit_s), limit_s)
        checksum = _agreed_checksum(update, reports, config.verify)
    except BaseException:
        # When some replicas took it, those that start again must find it.
        if service.weight_version < version:
            transport.discard(update)
        raise
    committed = time.perf_counter()
    _retire(transport, version)
    phase_s = {"check": checked - started, "stage": staged - checked, "commit": committed - staged}
    difference = None
    if probe is not None:
        difference = probe.compare(service, version, adapter=BASE_MODEL if has_adapters else None)
        phase_s["verify"] = time.perf_counter() - committed
    receipt = RefitReceipt(
        version=version,
        transport=update.transport,
        in_flight=config.in_flight,
        kv=config.kv,
        num_replicas=len(reports),
        num_tensors=update.num_tensors,
        num_bytes=update.num_bytes,
        phase_s=phase_s,
        stall_s=max(report.stall_s for report in reports),
        checksum=checksum,
        num_rpcs=RPCS_PER_REFIT,
        is_double_buffered=all(report.is_double_buffered for report in reports),
        logprob_max_difference=None if difference is None else difference.largest,
        logprob_mean_difference=None if difference is None else difference.mean,
    )
    logger.info("refit %s", receipt)
    return receipt


def _begin(
    service: GenerationService,
    source: WeightSource,
    transport: WeightTransport | SendingTransport,
    version: int,
    config: RefitConfig,
) -> WeightUpdate:
    """What the engines are told: the bytes lie ready, or are announced."""
    receivers = service.weight_receivers()
    if isinstance(transport, SendingTransport):
        update = transport.announce(source, version, receivers=receivers, timeout_s=config.stage_timeout_s)
    else:
        update = transport.stage(source, version, timeout_s=config.stage_timeout_s)
    return replace(update, double_buffer=config.double_buffer, workers_per_host=_workers_per_host(receivers))


def _workers_per_host(receivers: tuple[WeightReceiver, ...]) -> int:
    """At most; replicas of which nobody knows where they are may all be on one machine."""
    workers: Counter[str] = Counter()
    for receiver in receivers:
        for host in receiver.hosts or ("",):
            workers[host] += receiver.num_workers
    unknown = workers.pop("", 0)
    return max(max(workers.values(), default=0) + unknown, 1)


def _require_adapters_once(service: GenerationService, source: WeightSource) -> bool:
    """Whether the service has trained adapters.

    Raises:
        BadInputError: It has, and the source merges its own into the weights.
    """
    trained = service.trained_adapters() if isinstance(service, AdapterService) else {}
    if trained and isinstance(source, ModuleSource | LeadingSource) and source.merges_adapters:
        name = next(iter(trained))
        raise BadInputError(
            f"the model's adapter would be merged into the base weights and {name!r} applied to them again: send the "
            f"adapter alone (refit_adapter), or remove_lora({name!r}) first, or disable the model's adapter to send "
            "the base model"
        )
    return bool(trained)


def _retire(transport: WeightTransport | SendingTransport, version: int) -> None:
    try:
        transport.retire(version)
    except OSError as error:
        logger.warning("versions older than %d could not be removed: %s", version, error)


def _agreed_checksum(update: WeightUpdate, reports: tuple[CommitReport, ...], verify: Verify) -> str:
    """The digest that every replica computed from the bytes it received, and the trainer from those it sent.

    Empty with ``Verify.NONE``: versions are compared all the same.
    """
    if not reports:
        raise RefitError(update.version, "commit", (), "no replica reported a commit: none is serving")
    late = tuple(index for index, report in enumerate(reports) if report.version != update.version)
    if late:
        raise RefitError(update.version, "commit", late, f"they report version {reports[late[0]].version}")
    if verify is Verify.NONE:
        return ""
    counts = Counter(report.checksum for report in reports)
    agreed = update.checksum if update.checksum is not None else counts.most_common(1)[0][0]
    wrong = tuple(index for index, report in enumerate(reports) if report.checksum != agreed)
    if wrong:
        reason = f"they loaded other weights: checksum {reports[wrong[0]].checksum}, expected {agreed}"
        raise RefitError(update.version, "commit", wrong, reason)
    if not agreed:
        reason = "the transport computes no checksums: make it with checksum=True, or refit with verify=Verify.NONE"
        raise RefitError(update.version, "verify", (), reason)
    return agreed

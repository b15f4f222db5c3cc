"""Refit inside a vLLM worker: a weight-transfer backend, and the worker methods that drive it.

How an engine is set up::

    AsyncEngineArgs(
        weight_transfer_config=WeightTransferConfig(backend="rl_vllm"),
        worker_extension_cls="rl_vllm.engine.transfer.WeightWorkerExtension",
    )

Staging runs in a thread of the worker beside generation: it reads and verifies a whole version without touching the
model. Committing, while generation is paused, loads what was verified; by then nothing is left that the data could get
wrong. :mod:`rl_vllm.engine.refit` makes the calls in order.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol

import psutil
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rl_vllm.engine import reload
from rl_vllm.engine.back_buffer import BackBuffer, is_supported, num_bytes
from rl_vllm.engine.broadcast import ReceivedWeights
from rl_vllm.engine.ipc import IPCWeights
from rl_vllm.engine.plugin import BACKEND
from rl_vllm.engine.shared_storage import StagedFolder
from rl_vllm.engine.vllm_nccl import NCCLWeights
from rl_vllm.engine.weight_specs import expected_from_config
from rl_vllm.engine.worker_place import WorkerPlace
from rl_vllm.errors import ConfigError, RefitError
from rl_vllm.types import TensorSpec, WeightUpdate

logger = logging.getLogger(__name__)


class StagedWeights(Protocol):
    """One version in reach of this worker."""

    @property
    def checksum(self) -> str: ...

    @property
    def is_here(self) -> bool:
        """Whether everything has come when :meth:`verify` returns, and not only when the tensors are asked for."""

    def verify(self, expected: Sequence[TensorSpec], cancelled: threading.Event) -> None: ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...

    def close(self) -> None: ...


# A transport's receiving end is one file and one line here.
READERS: dict[str, Callable[[WeightUpdate, WorkerPlace], StagedWeights]] = {
    "broadcast": lambda update, place: ReceivedWeights(update, place.rank),
    "ipc": IPCWeights,
    "shared_storage": lambda update, _place: StagedFolder(update),
    "vllm_nccl": NCCLWeights,
}


@dataclass
class RefitInitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class RefitUpdateInfo(WeightTransferUpdateInfo):
    """Load the version that was staged.

    Attributes:
        version: Must be the one staged last.
    """

    version: int


@dataclass
class _Staging:
    """One version on its way through a worker's thread."""

    update: WeightUpdate
    cancelled: threading.Event
    thread: threading.Thread | None = None
    weights: StagedWeights | None = None
    back_buffer: BackBuffer | None = None
    failure: str | None = None
    ready: bool = False

    def close_back_buffer(self) -> None:
        if self.back_buffer is not None:
            self.back_buffer.close()


class RefitTransferEngine(WeightTransferEngine[RefitInitInfo, RefitUpdateInfo]):
    """vLLM's weight-transfer interface over whole, verified versions; the transport is named in the update."""

    init_info_cls = RefitInitInfo
    update_info_cls = RefitUpdateInfo
    supports_draft_weight_update: ClassVar[bool] = False

    _staging: _Staging | None = None
    _expected: tuple[TensorSpec, ...] | None = None
    _loaded_checksum: str = ""
    _has_swapped: bool = False

    def stage(self, update: WeightUpdate) -> None:
        """Start to read and verify a version in a thread; a version staged before and not committed is dropped.

        Raises:
            ConfigError: No transport has the update's name.
        """
        if update.transport not in READERS:
            raise ConfigError(f"transport must be one of {', '.join(READERS)}, got {update.transport!r}")
        self.discard()
        staging = _Staging(update, threading.Event())
        staging.thread = threading.Thread(
            target=self._stage_in_thread, args=(staging,), name=f"rl_vllm-stage-{update.version}", daemon=True
        )
        self._staging = staging
        staging.thread.start()

    def stage_state(self) -> tuple[bool, str | None]:
        """Whether the staged version is ready to load, and if it never will be, why: how staging or loading failed."""
        if self._staging is None:
            return False, "nothing is staged"
        return self._staging.ready, self._staging.failure

    def discard(self) -> None:
        """Drop what is staged. Idempotent."""
        staging, self._staging = self._staging, None
        if staging is None:
            return
        staging.cancelled.set()
        if staging.weights is not None:
            staging.weights.close()
        if staging.ready:
            staging.close_back_buffer()

    def init_transfer_engine(self, init_info: RefitInitInfo) -> None:
        """Do nothing: no transport needs a rendezvous."""

    def start_weight_update(self) -> None:
        """Refuse to begin before a version is staged and verified.

        Raises:
            RuntimeError: There is none; the model is untouched.
        """
        self._staged()

    def receive_weights(self, update_info: RefitUpdateInfo) -> None:
        """Load the staged version, from the first layer to the last correction.

        All of it happens here and none in start or finish, because this is the call after whose failure vLLM lets a new
        update begin.

        Raises:
            RuntimeError: Another version is staged, or none; the model is untouched.
            Exception: Loading failed, and :meth:`stage_state` says how; the model can take the next refit, but must not
                serve before.
        """
        staging = self._staged()
        if update_info.version != staging.update.version:
            raise RuntimeError(f"version {staging.update.version} is staged, not {update_info.version}")
        assert staging.weights is not None
        try:
            self._has_swapped = staging.back_buffer is not None
            if staging.back_buffer is not None:
                staging.back_buffer.swap()
            else:
                reload.load_whole_model(self.model, self.model_config, staging.weights)
        except Exception as error:
            staging.ready, staging.failure = False, f"{type(error).__name__}: {error}"
            staging.weights.close()
            raise
        # Not before: what is received while loading has no digest until its last byte.
        self._loaded_checksum = staging.weights.checksum
        self.discard()

    def finish_weight_update(self) -> None:
        """Do nothing: :meth:`receive_weights` leaves a finished model."""

    def shutdown(self) -> None:
        """Drop what is staged."""
        self.discard()

    def loaded_checksum(self) -> str:
        """Digest of the version loaded last, computed from the bytes that this worker had."""
        return self._loaded_checksum

    def has_swapped(self) -> bool:
        """Whether the last commit swapped two sets of parameters, see :class:`~rl_vllm.config.RefitConfig`."""
        return self._has_swapped

    def _place(self) -> WorkerPlace:
        parallel = self.vllm_config.parallel_config
        rank: int = parallel.rank + parallel.data_parallel_index * parallel.world_size
        return WorkerPlace(rank, self.device, self.config, self.vllm_config)

    def _wants_back_buffer(self, update: WeightUpdate) -> bool:
        if update.double_buffer is False or not is_supported(self.model):
            return False
        if update.double_buffer is None:
            # Twice: memory that others ask for meanwhile must be there too.
            wanted = 2 * update.workers_per_host * num_bytes(self.model)
            room: int = psutil.virtual_memory().available
            return self.device.type == "cpu" and wanted < room
        return True

    def _staged(self) -> _Staging:
        ready, failure = self.stage_state()
        if self._staging is None or not ready:
            raise RuntimeError(f"no version is ready to load: {failure or 'staging has not ended'}")
        return self._staging

    def _stage_in_thread(self, staging: _Staging) -> None:
        try:
            if self._expected is None:
                self._expected = expected_from_config(
                    self.model_config.hf_config,
                    dtype=str(self.model_config.dtype).removeprefix("torch."),
                    trust_remote_code=self.model_config.trust_remote_code,
                )
            staging.weights = READERS[staging.update.transport](staging.update, self._place())
            staging.weights.verify(self._expected, staging.cancelled)
            if staging.weights.is_here and self._wants_back_buffer(staging.update):
                staging.back_buffer = BackBuffer(self.model)
                staging.back_buffer.load(self._while_wanted(staging, staging.weights))
                # Of what came only the digest is needed still.
                staging.weights.close()
        except RefitError as error:
            staging.failure = error.reason
        except BaseException as error:
            staging.failure = f"{type(error).__name__}: {error}"
            raise
        else:
            staging.ready = True
        finally:
            if staging.cancelled.is_set() or not staging.ready:
                staging.close_back_buffer()

    @staticmethod
    def _while_wanted(staging: _Staging, weights: StagedWeights) -> Iterator[tuple[str, torch.Tensor]]:
        for pair in weights:
            if staging.cancelled.is_set():
                raise RefitError(staging.update.version, "stage", (), "staging was given up")
            yield pair


class WeightWorkerExtension:
    """Methods that vLLM mixes into its worker, called by name through ``collective_rpc``."""

    # Both are the worker's own.
    weight_transfer_engine: Any
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, object]], None]
    finish_weight_update: Callable[[], None]

    def rl_vllm_stage(self, update: Mapping[str, Any]) -> None:
        """Begin to stage; ``update`` is a :class:`~rl_vllm.types.WeightUpdate` as a dict."""
        self._rl_vllm_engine().stage(WeightUpdate(**update))

    def rl_vllm_stage_state(self) -> tuple[bool, str | None]:
        """See :meth:`RefitTransferEngine.stage_state`."""
        return self._rl_vllm_engine().stage_state()

    def rl_vllm_discard(self) -> None:
        """See :meth:`RefitTransferEngine.discard`."""
        self._rl_vllm_engine().discard()

    def rl_vllm_commit(self, version: int) -> tuple[str, bool]:
        """Load the staged version; generation must be paused.

        Returns:
            The digest of the loaded tensors, see :func:`~rl_vllm.types.weights_digest`; and whether they had been
            loaded before, into a second set of parameters.
        """
        engine = self._rl_vllm_engine()
        self.start_weight_update()
        self.update_weights(asdict(RefitUpdateInfo(version)))
        self.finish_weight_update()
        return engine.loaded_checksum(), engine.has_swapped()

    def _rl_vllm_engine(self) -> RefitTransferEngine:
        engine = self.weight_transfer_engine
        if not isinstance(engine, RefitTransferEngine):
            raise ConfigError(
                f"this engine's weight-transfer backend is {type(engine).__name__}: start it with "
                f"weight_transfer_config=WeightTransferConfig(backend={BACKEND!r})"
            )
        return engine

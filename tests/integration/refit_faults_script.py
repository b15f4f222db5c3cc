"""Refits a service of two replicas while one thing after the other goes wrong, and prints what became of it, as JSON.

Usage: ``refit_faults_script.py MODEL``. Each fault hits a refit to new weights; before it every replica serves weights
that shared storage keeps, and after it the next refit has to reach both replicas.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import psutil
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rl_vllm import AsyncVLLM, EngineConfig, ServiceConfig
from rl_vllm.config import HealthConfig, RefitConfig
from rl_vllm.errors import EngineDiedError, NoReplicaServesError, RefitError
from rl_vllm.protocols import SendingTransport, WeightSource, WeightTransport
from rl_vllm.types import PromptBatch, TensorSpec, WeightUpdate
from rl_vllm.weights import BroadcastTransport, ModuleSource, SharedStorageTransport, refit
from tests.integration.facts import tell
from tests.integration.refit_checks import LONG, ROWS, Models, engine_cores, error_of, wait_for
from tests.integration.truth import load_trainer, train_a_bit

LIMIT_S = 60.0
RESTART_S = 240.0
SHORT_LIMIT_S = 4.0
SMALL_BUCKET_BYTES = 1 << 14
Transport = WeightTransport | SendingTransport


class Interrupted:
    """A source that lets something happen when half of its tensors are out."""

    def __init__(self, source: WeightSource, event: Callable[[], None]) -> None:
        self._source = source
        self._event = event

    def specs(self) -> tuple[TensorSpec, ...]:
        return self._source.specs()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        half = len(self._source.specs()) // 2
        for number, pair in enumerate(self._source):
            if number == half:
                self._event()
            yield pair


class ForkedUpdate(WeightUpdate):
    """Sends replica 1 to another folder than the others."""

    other: ClassVar[WeightUpdate]

    def addressed_to(self, replica: int) -> WeightUpdate:
        update = self.other if replica == 1 else WeightUpdate(**{f.name: getattr(self, f.name) for f in fields(self)})
        return replace(update, payload={**update.payload, "replica": replica})


class Tampering(SharedStorageTransport):
    """Shared storage whose update is changed before the engines hear of it."""

    def __init__(self, tamper: Callable[[WeightUpdate], WeightUpdate]) -> None:
        super().__init__()
        self._tamper = tamper

    def stage(self, source: WeightSource, version: int, *, timeout_s: float) -> WeightUpdate:
        return self._tamper(super().stage(source, version, timeout_s=timeout_s))


def torn(update: WeightUpdate) -> WeightUpdate:
    shard = next(Path(str(update.payload["folder"])).glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size - 1000)
    return update


def another_shape_for_one(other: ModuleSource, transport: SharedStorageTransport) -> Tampering:
    def fork(update: WeightUpdate) -> WeightUpdate:
        # A copy with another field is of the same class, and knows the other folder too.
        there = transport.stage(other, update.version, timeout_s=LIMIT_S)
        forked = type("Forked", (ForkedUpdate,), {"other": there, "__slots__": ()})
        return forked(**{f.name: getattr(update, f.name) for f in fields(update)})

    return Tampering(fork)


class Stage:
    """The service under test, the models that it may serve, and the transport that keeps versions."""

    def __init__(self, service: AsyncVLLM, model: PreTrainedModel) -> None:
        self.service = service
        self.kept = SharedStorageTransport()
        self.old = model
        self.new = copy.deepcopy(model)
        train_a_bit(self.new, 7)
        self.found: dict[str, Any] = {}

    def hit(
        self,
        name: str,
        transport: Transport,
        source: WeightSource,
        *,
        limit_s: float = LIMIT_S,
        during: AbstractContextManager[object] | None = None,
    ) -> None:
        """Run one refit that must fail, then look at what is served, then run one that must not."""
        version = refit(self.service, ModuleSource(self.old), self.kept).version
        models: Models = {version: self.old}
        outcome: dict[str, Any] = {"limit_s": limit_s, "error": None}
        config = RefitConfig(stage_timeout_s=limit_s, commit_timeout_s=limit_s)
        started = time.monotonic()
        with during or nullcontext():
            try:
                models[refit(self.service, source, transport, config=config).version] = self.new
            except RefitError as error:
                outcome["error"] = {"phase": error.phase, "replicas": list(error.replicas), "reason": error.reason}
                models[error.version] = self.new
            except RuntimeError as error:
                outcome["error"] = {"phase": type(error).__name__, "replicas": [], "reason": str(error)}
            outcome["seconds"] = time.monotonic() - started
        transport.close()
        outcome["after"] = self._errors(models)
        wait_for(self._both_are_up, f"both replicas to be up after {outcome}: {self.service.stats()}", RESTART_S)
        receipt = refit(self.service, ModuleSource(self.new), self.kept)
        outcome["next"] = {"replicas": receipt.num_replicas, "errors": self._errors({receipt.version: self.new})}
        self.found[name] = outcome
        print(f"{name}: {json.dumps(outcome)}", flush=True)

    def _errors(self, models: Models) -> list[float | None]:
        """By replica, None for one that serves nothing."""
        errors: list[float | None] = []
        for replica in self.service.stats().replicas:
            try:
                errors.append(error_of(self.service, replica.replica, models))
            except (EngineDiedError, NoReplicaServesError):
                errors.append(None)
        return errors

    def _both_are_up(self) -> bool:
        return len(self.service.weight_receivers()) == 2


def core_of(service: AsyncVLLM, replica: int) -> psutil.Process:
    """The engine core of a replica: the one that works when that replica is asked."""
    cores = engine_cores()

    def worked() -> list[float]:
        return [sum(core.cpu_times()[:2]) for core in cores]

    before = worked()
    service.generate_batch(PromptBatch.from_rows(ROWS), LONG, actor_index=replica)
    spent = [now - then for now, then in zip(worked(), before, strict=True)]
    return cores[spent.index(max(spent))]


def full_disk(*_arguments: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextlib.contextmanager
def suspended(process: psutil.Process) -> Iterator[None]:
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def inject_bad_data(stage: Stage) -> None:
    new, broken = ModuleSource(stage.new), copy.deepcopy(stage.new)
    with torch.no_grad():
        broken.model.norm.weight[3] = torch.nan
    stage.hit("nan", SharedStorageTransport(), ModuleSource(broken))
    stage.hit("nan in a broadcast", BroadcastTransport(), ModuleSource(broken))
    stage.hit("torn shard", Tampering(torn), new)
    full = mock.patch("rl_vllm.weights.shard_writer._write_all", full_disk)
    stage.hit("full disk", SharedStorageTransport(), new, during=full)
    wider = copy.deepcopy(stage.old.config)
    wider.intermediate_size *= 2
    with_other = another_shape_for_one(ModuleSource(AutoModelForCausalLM.from_config(wider)), SharedStorageTransport())
    stage.hit("another shape for one replica", with_other, new)


def inject_lost_members(stage: Stage) -> None:
    service, new = stage.service, ModuleSource(stage.new)

    def fall_over() -> None:
        raise RuntimeError("the trainer fell over")

    stage.hit("trainer fails", BroadcastTransport(), Interrupted(new, fall_over))
    absent = core_of(service, 1)
    for name, transport in (("late reader", SharedStorageTransport()), ("late receiver", BroadcastTransport())):
        stage.hit(name, transport, new, limit_s=SHORT_LIMIT_S, during=suspended(absent))
    # Buckets so small that many are through and many to come when the worker dies.
    staging = BroadcastTransport(bucket_bytes=SMALL_BUCKET_BYTES)
    stage.hit("killed while staging", staging, Interrupted(new, core_of(service, 1).kill))
    committing = BroadcastTransport(bucket_bytes=SMALL_BUCKET_BYTES, hold="none")
    stage.hit("killed while committing", committing, Interrupted(new, core_of(service, 1).kill))


def main() -> None:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="warning")
    engine = EngineConfig(model=sys.argv[1], dtype="float32", max_model_len=512, cpu_kv_cache_gib=0.25)
    # Long enough for a worker that is stopped on purpose not to be taken for a hanging one.
    health = HealthConfig(heartbeat_period_s=1.0, heartbeat_timeout_s=60.0)
    config = ServiceConfig(engine=engine, num_replicas=2, health=health)
    with AsyncVLLM(config) as service:
        stage = Stage(service, load_trainer(Path(sys.argv[1])))
        try:
            inject_bad_data(stage)
            inject_lost_members(stage)
        finally:
            stage.kept.close()
    tell(stage.found)


if __name__ == "__main__":
    main()

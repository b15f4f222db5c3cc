"""Serves a model with two workers per replica and prints, as JSON, what became of it.

Usage: ``tensor_parallel_script.py MODEL EXECUTOR [one-core] [refit] [kill]``. A program of its own: it needs a Ray with
room of its own, and cores of its choice.
"""

from __future__ import annotations

import copy
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from rl_vllm import AsyncVLLM, EngineConfig, SamplingConfig, ServiceConfig, VLLMWeightSyncScheme
from rl_vllm.config import HealthConfig
from rl_vllm.engine.reaper import mapped_segments
from rl_vllm.errors import EngineDiedError
from rl_vllm.types import CompletionBatch, PromptBatch
from tests.integration.facts import tell
from tests.integration.refit_checks import Error, Models, engine_cores, wait_for
from tests.integration.truth import load_trainer, train_a_bit

WAIT_S = 60.0
ROWS = [[7, 3, 300, 41, row] for row in range(8)]


def workers() -> list[psutil.Process]:
    """The engine's workers, by rank."""
    # Told by their parent: a worker bears its own title only once it has set it.
    found = [p for core in engine_cores() for p in core.children() if "resource_tracker" not in " ".join(p.cmdline())]
    return sorted(found, key=lambda process: process.pid)


def computing_cores(process: psutil.Process) -> list[int]:
    """The cores that the threads of one worker's team are bound to, when they are bound to a single one each."""
    masks = [os.sched_getaffinity(thread.id) for thread in process.threads()]
    return sorted({core for mask in masks if len(mask) == 1 for core in mask})


def worst_error(batch: CompletionBatch, models: Models) -> float:
    error = Error()
    error.add(batch, models, ROWS)
    return error.worst


def refit_in_flight(service: AsyncVLLM, old: torch.nn.Module, new: torch.nn.Module) -> dict[str, Any]:
    # A folder first, then a process group: in both every worker takes its part of each tensor.
    schemes = [VLLMWeightSyncScheme(transport=name, service=service) for name in ("shared_storage", "broadcast")]
    first, second = (scheme.create_sender() for scheme in schemes)
    results: list[CompletionBatch] = []
    sampling = SamplingConfig(max_tokens=450, ignore_eos=True)

    def made() -> int:
        return sum(m.generated_tokens for m in service.metrics() if m is not None)

    try:
        before = first.update_weights(old).version
        generating = threading.Thread(
            target=lambda: results.append(service.generate_batch(PromptBatch.from_rows(ROWS), sampling))
        )
        start = made()
        generating.start()
        wait_for(lambda: made() >= start + 100, "a hundred tokens", WAIT_S)
        after = second.update_weights(new).version
        generating.join(WAIT_S)
    finally:
        for scheme in schemes:
            scheme.shutdown()
    spans = [len(results[0].spans(index)) for index in range(len(ROWS))]
    return {"spans": spans, "error": worst_error(results[0], {before: old, after: new})}


def die(service: AsyncVLLM) -> str:
    """Kill one of the workers while both compute, and say how the caller's wait ended."""
    victim = workers()[1]
    errors: list[str] = []

    def generate() -> None:
        try:
            service.generate_batch(PromptBatch.from_rows(ROWS), SamplingConfig(max_tokens=450, ignore_eos=True))
        except EngineDiedError as error:
            errors.append(type(error).__name__)

    waiting = threading.Thread(target=generate)
    waiting.start()
    wait_for(lambda: sum(m.num_running for m in service.metrics() if m is not None) > 0, "a running request", WAIT_S)
    victim.send_signal(signal.SIGKILL)
    waiting.join(WAIT_S)
    return errors[0] if errors else "no error"


def main() -> None:
    model, executor, *parts = sys.argv[1:]
    if "one-core" in parts:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if executor == "ray":
        import ray

        # Room for both workers, on however few cores: they share them then.
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="warning")
    engine = EngineConfig(
        model=model, dtype="float32", max_model_len=512, cpu_kv_cache_gib=0.25, tensor_parallel_size=2
    )
    old = load_trainer(Path(model))
    new = copy.deepcopy(old)
    train_a_bit(new, 7)
    found: dict[str, Any] = {}
    with AsyncVLLM(ServiceConfig(engine=engine, health=HealthConfig(max_restarts=0)), executor=executor) as service:
        found["cores"] = [computing_cores(process) for process in workers()]
        batch = service.generate_batch(PromptBatch.from_rows(ROWS), SamplingConfig(max_tokens=24, ignore_eos=True))
        found["error"] = worst_error(batch, {0: old})
        found["wrong_model_error"] = worst_error(batch, {0: new})
        if "refit" in parts:
            found["refit"] = refit_in_flight(service, old, new)
        family = [process for process in psutil.Process().children(recursive=True) if "VLLM" in process.name()]
        segments = {name for process in family for name in mapped_segments(process.pid)}
        found["segments"] = len(segments)
        if "kill" in parts:
            found["death"] = die(service)
    _, alive = psutil.wait_procs(family, timeout=WAIT_S)
    found["alive"] = [process.pid for process in alive]
    deadline = time.monotonic() + WAIT_S
    while any(Path(name).exists() for name in segments) and time.monotonic() < deadline:
        time.sleep(0.05)
    found["segments_left"] = [name for name in segments if Path(name).exists()]
    tell(found)


if __name__ == "__main__":
    main()

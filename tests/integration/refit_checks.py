"""What scripts that refit a running service check: who answers what, idle and under load."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import psutil
import torch
from transformers import PreTrainedModel

from rl_vllm import AsyncVLLM, SamplingConfig
from rl_vllm.types import CompletionBatch, PromptBatch
from tests.integration.truth import response_logprobs

WAIT_S = 300.0
ROWS = [[7, 3, 300, 41, row] for row in range(4)]
SHORT = SamplingConfig(max_tokens=24, ignore_eos=True)
LONG = SamplingConfig(max_tokens=250, ignore_eos=True)

Models = dict[int, PreTrainedModel]


class Error:
    """Largest difference between an engine's logprobs and those of the model that each token's label names."""

    def __init__(self) -> None:
        self.worst = 0.0

    def add(self, batch: CompletionBatch, models: Models, rows: Sequence[Sequence[int]] = ROWS) -> None:
        for index in range(len(batch)):
            versions = batch.versions(index)
            assert set(versions.tolist()) <= set(models), f"labels {set(versions.tolist())} of {sorted(models)}"
            row = rows[int(batch.numbers_N[index])]
            for version in set(versions.tolist()):
                expected = response_logprobs(models[version], row, batch.tokens(index).tolist())
                error = (torch.tensor(batch.logprobs(index)) - expected)[torch.tensor(versions == version)]
                self.worst = max(self.worst, float(error.abs().max()))


def wait_for(condition: Callable[[], bool], what: str, within_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {within_s:g} s for {what}")
        time.sleep(0.01)


def engine_cores() -> list[psutil.Process]:
    """Processes of this program's engines that lead their workers."""
    family = psutil.Process().children(recursive=True)
    return [process for process in family if process.name().startswith("VLLM::EngineCor")]


def error_of(service: AsyncVLLM, replica: int, models: Models) -> float:
    """How far one replica's answers are from the model that their labels name."""
    error = Error()
    error.add(service.generate_batch(PromptBatch.from_rows(ROWS), SHORT, actor_index=replica), models)
    return error.worst


def errors_by_replica(service: AsyncVLLM, models: Models) -> list[float]:
    return [error_of(service, replica, models) for replica in range(service.num_replicas)]


class Under:
    """Four long responses on their way on every replica while something else happens."""

    def __init__(self, service: AsyncVLLM) -> None:
        self._service = service
        self._results: list[CompletionBatch] = []

    def __enter__(self) -> Under:
        before = self._made()
        self._threads = [
            threading.Thread(
                target=lambda index=index: self._results.append(
                    self._service.generate_batch(PromptBatch.from_rows(ROWS), LONG, actor_index=index)
                )
            )
            for index in range(self._service.num_replicas)
        ]
        for thread in self._threads:
            thread.start()
        wait_for(
            lambda: all(now > then + len(ROWS) for now, then in zip(self._made(), before, strict=True)),
            "tokens of every replica",
        )
        return self

    def __exit__(self, *_error: object) -> None:
        for thread in self._threads:
            thread.join(WAIT_S)

    def results(self) -> list[CompletionBatch]:
        assert len(self._results) == self._service.num_replicas, "a batch did not come back"
        return self._results

    def _made(self) -> list[int]:
        return [0 if metrics is None else metrics.generated_tokens for metrics in self._service.metrics()]

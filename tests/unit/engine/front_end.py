"""vLLM's own front end (requests, collectors, output processor) over an engine core that the test plays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.exceptions import VLLMValidationError
from vllm.pooling_params import PoolingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.outputs import LogprobsLists

from rl_vllm.testing import Gate

REFUSED_TOKEN = 666


class Inputs:
    """Takes every prompt but one with ``REFUSED_TOKEN``."""

    assign_request_id = staticmethod(InputProcessor.assign_request_id)

    def process_inputs(self, name: str, prompt: Any, params: Any, *, lora_request: Any, **_: object) -> Any:
        if REFUSED_TOKEN in prompt["prompt_token_ids"]:
            raise VLLMValidationError("prompt refused")
        sampling, pooling = (None, params) if isinstance(params, PoolingParams) else (params.clone(), None)
        return EngineCoreRequest(
            name, prompt["prompt_token_ids"], None, sampling, pooling, 0.0, lora_request, None, None
        )


class Core:
    """Remembers what reaches it, in order: ``("add" | "abort", id)``."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []
        self.gate = Gate(is_open=True)
        self.add_error: Exception | None = None
        self.ended: dict[str, int] = {}
        self.resources = SimpleNamespace(
            engine_dead=False, engine_manager=SimpleNamespace(finished_procs=lambda: self.ended)
        )

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        await self.gate.passed()
        if self.add_error is not None:
            raise self.add_error
        self.log.append(("add", request.request_id))

    async def abort_requests_async(self, names: list[str]) -> None:
        self.log += [("abort", name) for name in names]

    def shutdown(self, timeout: float | None = None) -> None: ...

    @property
    def working_on(self) -> set[str]:
        """Requests that a real core would still be running."""
        running: set[str] = set()
        for what, name in self.log:
            if what == "add":
                running.add(name)
            else:
                running.discard(name)
        return running


class FrontEnd(AsyncLLM):
    """An ``AsyncLLM`` without processes."""

    def __init__(self) -> None:
        self.engine_core = Core()
        self.input_processor = Inputs()
        self.output_processor = OutputProcessor(None, log_stats=False)
        self.observability_config = SimpleNamespace(otlp_traces_endpoint=None)
        self.scheduler_config = SimpleNamespace(max_num_queued_reqs=None, max_num_queued_tokens=None)
        self.model_config = SimpleNamespace(is_encoder_decoder=False)
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(kv_sharing_fast_prefill=False))
        self.admission_stats = None
        self.log_requests = False
        self.output_handler = None
        self._supported_tasks = ("generate",)

    def _run_output_handler(self) -> None: ...

    async def until_sent(self, count: int) -> None:
        """Wait until the core has been given this many samples."""
        await _until(lambda: sum(what == "add" for what, _ in self.engine_core.log) >= count)

    async def until_known(self) -> None:
        """Wait until the front end knows a request, sent or not."""
        await _until(lambda: bool(self.output_processor.request_states))

    def make(
        self,
        number: int,
        tokens: list[int],
        *,
        sample: int = 0,
        version: int = 0,
        finish: FinishReason | None = None,
        logprob: float = -1.0,
    ) -> None:
        """One step of the core for one sample; logprobs are ``logprob`` for each token."""
        (name,) = (name for what, name in self.engine_core.log if what == "add" and _is(name, number, sample))
        logprobs = None
        if tokens:
            column = np.array(tokens)[:, None]
            logprobs = LogprobsLists(column, np.full(column.shape, logprob), np.ones(len(tokens), np.int64))
        made = EngineCoreOutput(name, tokens, new_logprobs=logprobs, finish_reason=finish)
        self.output_processor.process_outputs([made], weight_version=str(version))

    def die(self, **ended: int) -> None:
        """End as with a process that was killed; ``ended`` holds exit codes by process."""
        self.engine_core.ended = ended
        self.engine_core.resources.engine_dead = True
        self.output_processor.propagate_error(EngineDeadError())

    @property
    def holds_nothing(self) -> bool:
        processor = self.output_processor
        return not (processor.request_states or processor.parent_requests or processor.external_req_ids)


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 (vLLM tells nobody)
            await asyncio.sleep(0)


def _is(name: str, number: int, sample: int) -> bool:
    """Internal ids are ``number-random``, and ``sample_number-random`` where there are several."""
    head = name.split("-")[0]
    return head == (f"{sample}_{number}" if "_" in head else str(number))

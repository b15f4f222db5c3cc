"""vLLM's front end without its statistics of every token, over an engine core that the test plays."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats

from rl_vllm.engine.light_llm import CountingProcessor, LightLLM


class Core:
    """Hands out the steps that a test puts in."""

    def __init__(self) -> None:
        self.steps: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self.steps.get()

    def shutdown(self, timeout: float | None = None) -> None: ...


class Logger:
    """Keeps what it is told, and says when."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def record(self, **what: Any) -> None:
        self.told.put_nowait(what)


def light_llm() -> LightLLM:
    # Its constructor would start processes.
    llm = object.__new__(LightLLM)
    llm.engine_core = Core()
    llm.logger_manager = Logger()
    llm.log_stats = True
    llm.renderer = SimpleNamespace(
        tokenizer=None, mm_processor_cache=None, stat_mm_cache=lambda: None, shutdown=lambda: None
    )
    llm.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(stream_interval=1))
    llm.admission_stats = None
    llm.output_handler = None
    return llm


async def test_tokens_are_counted_and_loggers_get_the_schedulers_report_alone():
    llm = light_llm()
    llm._run_output_handler()
    try:
        for tokens in ([[5], [6, 7]], [[8]]):
            made = [EngineCoreOutput(f"unknown-{i}", ids) for i, ids in enumerate(tokens)]
            stats = SchedulerStats(num_running_reqs=len(tokens))
            llm.engine_core.steps.put_nowait(EngineCoreOutputs(outputs=made, scheduler_stats=stats))
            async with asyncio.timeout(60):
                told = await llm.logger_manager.told.get()
            assert told["scheduler_stats"].num_running_reqs == len(tokens)
            assert told["iteration_stats"] is None
        assert llm.output_processor.generated_tokens == 4
        assert llm.log_stats is True
    finally:
        llm.output_handler.cancel()
        await asyncio.gather(llm.output_handler, return_exceptions=True)


async def test_starting_to_read_twice_keeps_what_is_under_way():
    llm = light_llm()
    llm._run_output_handler()
    processor, handler = llm.output_processor, llm.output_handler
    llm._run_output_handler()
    assert isinstance(processor, CountingProcessor)
    assert llm.output_processor is processor
    assert llm.output_handler is handler
    handler.cancel()
    await asyncio.gather(handler, return_exceptions=True)

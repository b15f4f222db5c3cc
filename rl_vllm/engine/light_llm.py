"""vLLM's front end without its statistics of every token.

They cost it as much time per token as all its other work (10 of 20 microseconds measured), and serve its log lines and
Prometheus metrics. What a service needs is the scheduler's own report of each step and the number of tokens.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor


class CountingProcessor(OutputProcessor):
    """vLLM's output processor, which also counts the tokens that it is given.

    Attributes:
        generated_tokens: Response tokens since the start.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.generated_tokens = 0

    def process_outputs(self, engine_core_outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        self.generated_tokens += sum([len(output.new_token_ids) for output in engine_core_outputs])
        return super().process_outputs(engine_core_outputs, *args, **kwargs)


class LightLLM(AsyncLLM):
    """An ``AsyncLLM`` whose loggers get the scheduler's statistics and none of iterations."""

    log_stats: bool

    def _run_output_handler(self) -> None:
        if self.output_handler is not None:
            return
        # Nothing has been processed yet, so that this one can take the place of vLLM's.
        self.output_processor = CountingProcessor(
            self.renderer.tokenizer,
            log_stats=False,
            stream_interval=self.vllm_config.scheduler_config.stream_interval,
            admission_stats=self.admission_stats,
        )
        # The handler reads it once, now.
        wanted, self.log_stats = self.log_stats, False
        try:
            super()._run_output_handler()
        finally:
            self.log_stats = wanted

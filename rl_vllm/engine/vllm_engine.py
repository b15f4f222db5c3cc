"""One vLLM V1 engine behind the :class:`~rl_vllm.protocols.Engine` protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

import vllm.envs
from vllm.config import VllmConfig
from vllm.inputs.engine import tokens_input
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from rl_vllm.config import EngineConfig
from rl_vllm.engine import refit
from rl_vllm.engine.adapters import Adapters
from rl_vllm.engine.args import build_engine_args
from rl_vllm.engine.columns import to_columns
from rl_vllm.engine.death import answered, check_health
from rl_vllm.engine.embedding import to_embeddings, to_pooling_params
from rl_vllm.engine.landing import landed
from rl_vllm.engine.light_llm import CountingProcessor, LightLLM
from rl_vllm.engine.nodes import own_nodes
from rl_vllm.engine.params import to_vllm
from rl_vllm.engine.prometheus import EnginePrometheus, NoPrometheus
from rl_vllm.engine.requests import Order, Requests
from rl_vllm.engine.sleep import Sleep
from rl_vllm.engine.stats import LatestStats, total
from rl_vllm.engine.weight_specs import expected_from_config
from rl_vllm.errors import ConfigError, UnsupportedByEngineError
from rl_vllm.types import (
    CommitReport,
    CompletionBatch,
    EmbeddingBatch,
    EmbeddingRequest,
    EngineMetrics,
    InFlight,
    KVCache,
    LoRAAdapter,
    LoRALimits,
    ModelInfo,
    PromptBatch,
    RequestBatch,
    SamplingConfig,
    TensorSpec,
    WeightUpdate,
)

T = TypeVar("T")


class VLLMEngine:
    """Build it inside a running event loop; every method runs on that loop.

    Args:
        config: The engine's settings.
        replica: Index of the replica it serves.
        on_cpu: Whether vLLM runs on CPUs here.
    """

    def __init__(self, config: EngineConfig, *, replica: int, on_cpu: bool) -> None:
        self._config = config
        self._replica = replica
        self._stats: dict[int, LatestStats] = {}
        args = build_engine_args(config, replica=replica, on_cpu=on_cpu)
        self._logs_stats = not args.disable_log_stats
        wants_all = config.prometheus or self._logs_stats or args.otlp_traces_endpoint is not None
        kind, prometheus = (AsyncLLM, EnginePrometheus) if wants_all else (LightLLM, NoPrometheus)
        self._llm: AsyncLLM = kind.from_engine_args(args, stat_loggers=[self._make_stats, prometheus])
        self._requests = Requests(self._llm, replica)
        self._adapters = Adapters(self._llm, replica)
        self._sleep = Sleep(self._llm, self._answered, on_cpu=on_cpu)
        self._known_tasks: tuple[str, ...] | None = None
        self._is_profiling = False
        self._log_task: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> None:
        """Label the loaded weights version 0 and run the model once, so that no caller pays for first-use costs."""
        # Built where no loop ran, vLLM reads what its engine says, and that it died, from the first request on only.
        self._llm._run_output_handler()
        await self._answered(self._llm.update_weight_version("0"))
        await self._answered(self._warm_up(await self._tasks()))
        await self._answered(self._llm.reset_prefix_cache())
        if self._logs_stats:
            self._log_task = asyncio.create_task(self._log_stats(), name=f"replica-{self._replica}-log-stats")

    async def _warm_up(self, tasks: Sequence[str]) -> None:
        prompt = tokens_input([0])
        if "generate" in tasks:
            async for _ in self._llm.generate(prompt, SamplingParams(max_tokens=1, detokenize=False), "warm-up"):
                pass
        elif "embed" in tasks or "classify" in tasks:
            pooling = PoolingParams(task="embed" if "embed" in tasks else "classify")
            async for _ in self._llm.encode(prompt, pooling, "warm-up"):
                pass

    async def model_info(self) -> ModelInfo:
        config = self._llm.model_config
        eos, pad = _end_and_pad_ids(self._llm.vllm_config)
        return ModelInfo(
            model=config.model,
            tokenizer=None if config.skip_tokenizer_init else str(config.tokenizer),
            vocab_size=config.get_vocab_size(),
            max_model_len=config.max_model_len,
            eos_token_ids=eos,
            pad_token_id=pad,
            dtype=str(config.dtype).removeprefix("torch."),
            logprobs_mode=str(config.logprobs_mode),
            tasks=await self._tasks(),
            block_size=self._llm.vllm_config.cache_config.block_size,
        )

    async def _tasks(self) -> tuple[str, ...]:
        if self._known_tasks is None:
            self._known_tasks = tuple(await self._answered(self._llm.get_supported_tasks()))
        return self._known_tasks

    async def stream(self, batch: RequestBatch) -> AsyncGenerator[CompletionBatch, None]:
        async with aclosing(self._requests.run(await self._orders(batch, pieces=False))) as chunks:
            async for ready in chunks:
                yield to_columns(ready.outputs, ready.failures)

    async def stream_pieces(self, batch: RequestBatch) -> AsyncGenerator[CompletionBatch, None]:
        async with aclosing(self._requests.run(await self._orders(batch, pieces=True), pieces=True)) as chunks:
            async for ready in chunks:
                chunk = to_columns(ready.outputs, ready.failures, begins=ready.begins)
                for failure in chunk.failures:
                    await self._requests.give_up(failure.number)
                yield chunk

    async def embed(self, request: EmbeddingRequest) -> AsyncGenerator[EmbeddingBatch, None]:
        await self._require_task(request.pooling.task)
        params = to_pooling_params(request.pooling)
        orders = self._with_adapters(request.numbers_B.tolist(), request.prompts, [params] * len(request.prompts))
        async with aclosing(self._requests.run(orders)) as chunks:
            async for ready in chunks:
                yield to_embeddings(ready.outputs, ready.failures)

    async def _orders(self, batch: RequestBatch, *, pieces: bool) -> list[Order]:
        await self._require_task("generate")
        # Rows share one setting object unless the service gave them seeds or limits of their own.
        shared: dict[int, SamplingParams] = {}
        params = [_shared_params(shared, sampling, pieces=pieces) for sampling in batch.sampling_B]
        return self._with_adapters(batch.numbers_B.tolist(), batch.prompts, params)

    def _with_adapters(
        self, numbers: Sequence[int], prompts: PromptBatch, params: Sequence[SamplingParams | PoolingParams]
    ) -> list[Order]:
        """One order per row; a row whose adapter is not there is refused alone."""
        orders: list[Order] = []
        for row, number in enumerate(numbers):
            lora, refusal = None, None
            if prompts.loras is not None:
                try:
                    lora = self._adapters.request_for(prompts.loras[row])
                except ConfigError as error:
                    refusal = str(error)
            orders.append(Order(number, prompts.row(row).tolist(), params[row], lora, refusal))
        return orders

    async def _require_task(self, task: str) -> None:
        tasks = await self._tasks()
        if task not in tasks:
            remedy = (
                'serve it with EngineConfig(engine_kwargs={"runner": "pooling", "convert": "embed"}) or "classify"'
                if "generate" in tasks
                else 'serve it without engine_kwargs["runner"]'
            )
            raise UnsupportedByEngineError(
                f"this engine does not {task}: its model's tasks are {', '.join(tasks)}; {remedy}"
            )

    async def abort(self, numbers: Sequence[int]) -> None:
        await self._requests.abort(numbers)

    async def metrics(self) -> EngineMetrics:
        assert self._stats, "vLLM builds its stat loggers with the engine"
        num_unfinished = self._llm.get_num_unfinished_requests()
        metrics = total([stats.snapshot(num_unfinished=num_unfinished) for stats in self._stats.values()])
        processor = self._llm.output_processor
        # Only with all its statistics does vLLM report tokens to its loggers.
        if isinstance(processor, CountingProcessor):
            return replace(metrics, generated_tokens=processor.generated_tokens)
        return metrics

    async def prometheus(self) -> str:
        """All of vLLM's metrics; empty unless ``EngineConfig.prometheus`` or vLLM's own logging asked for them."""
        manager = self._llm.logger_manager
        loggers = [] if manager is None else manager.stat_loggers
        return "".join(each.text() for each in loggers if isinstance(each, EnginePrometheus))

    async def check_health(self) -> None:
        await check_health(self._llm, self._replica)

    async def engine_config(self) -> object:
        return self._llm.vllm_config

    async def weight_specs(self) -> tuple[TensorSpec, ...]:
        config = self._llm.model_config
        return await asyncio.to_thread(
            expected_from_config,
            config.hf_config,
            dtype=str(config.dtype).removeprefix("torch."),
            trust_remote_code=config.trust_remote_code,
        )

    async def stage_weights(self, update: WeightUpdate, *, timeout_s: float) -> None:
        # Only workers that are Ray actors can be on other machines than this process.
        by_ray = self._llm.vllm_config.parallel_config.distributed_executor_backend == "ray"
        async with landed(update, replica=self._replica, timeout_s=timeout_s, nodes=own_nodes if by_ray else None) as (
            local,
            left_s,
        ):
            await self._answered(refit.stage_weights(self._llm, local, timeout_s=left_s))

    async def commit_weights(self, update: WeightUpdate, *, in_flight: InFlight, kv: KVCache) -> CommitReport:
        self._sleep.require_memory_for_weights(update.version)
        commit = refit.commit_weights(self._llm, update, in_flight=in_flight, kv=kv, resume=not self._sleep.is_sleeping)
        report = await self._answered(commit)
        await self._sleep.weights_came()
        return report

    async def reset_prefix_cache(self) -> bool:
        return bool(await self._answered(self._llm.reset_prefix_cache()))

    async def reset_mm_cache(self) -> None:
        await self._answered(self._llm.reset_mm_cache())

    async def lora_limits(self) -> LoRALimits | None:
        return self._adapters.limits()

    async def add_lora(self, adapter: LoRAAdapter) -> None:
        await self._answered(self._adapters.add(adapter))

    async def remove_lora(self, name: str) -> bool:
        return await self._answered(self._adapters.remove(name))

    async def list_loras(self) -> tuple[LoRAAdapter, ...]:
        return await self._answered(self._adapters.list())

    async def pin_lora(self, name: str) -> None:
        await self._answered(self._adapters.pin(name))

    async def sleep(self, level: int) -> None:
        await self._sleep.sleep(level)

    async def wake_up(self, tags: tuple[str, ...] | None) -> None:
        await self._sleep.wake_up(tags)

    async def is_sleeping(self) -> bool:
        return self._sleep.is_sleeping

    async def start_profile(self) -> None:
        """Record what the workers do, into the folder of the profiler's settings.

        Raises:
            UnsupportedByEngineError: The engine was started without a profiler.
            ConfigError: It is recording already.
        """
        if self._llm.vllm_config.profiler_config.profiler is None:
            raise UnsupportedByEngineError(
                "this engine has no profiler: start it with EngineConfig(engine_kwargs="
                '{"profiler_config": {"profiler": "torch", "torch_profiler_dir": "/a/folder"}})'
            )
        if self._is_profiling:
            raise ConfigError("a profile is being taken already: call stop_profile first")
        await self._answered(self._llm.start_profile())
        self._is_profiling = True

    async def stop_profile(self) -> None:
        """Stop recording and write the trace; without one: no-op."""
        if self._is_profiling:
            self._is_profiling = False
            await self._answered(self._llm.stop_profile())

    async def collective_rpc(
        self, method: str, *, timeout_s: float, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> list[object]:
        return list(await self._answered(self._llm.collective_rpc(method, timeout_s, args, kwargs)))

    async def shutdown(self) -> None:
        if not self._closed:
            self._closed = True
            if self._log_task is not None:
                self._log_task.cancel()
            await asyncio.to_thread(self._llm.shutdown)

    async def _answered(self, call: Coroutine[Any, Any, T]) -> T:
        return await answered(self._llm, self._replica, call)

    async def _log_stats(self) -> None:
        """What vLLM's own server does for those who asked for its log lines."""
        while True:
            await asyncio.sleep(vllm.envs.VLLM_LOG_STATS_INTERVAL)
            await self._llm.do_log_stats()

    def _make_stats(self, vllm_config: VllmConfig, engine_index: int) -> LatestStats:
        stats = self._stats[engine_index] = LatestStats(vllm_config, engine_index)
        return stats


def _shared_params(shared: dict[int, SamplingParams], sampling: SamplingConfig, *, pieces: bool) -> SamplingParams:
    params = shared.get(id(sampling))
    if params is None:
        params = shared[id(sampling)] = to_vllm(sampling, pieces=pieces)
    return params


def _end_and_pad_ids(config: VllmConfig) -> tuple[tuple[int, ...], int | None]:
    """Ids that end a response and the padding id, from the generation config first, then the model's."""
    generation = config.model_config.try_get_generation_config()
    text_config = config.model_config.hf_text_config
    eos = generation.get("eos_token_id", text_config.eos_token_id)
    pad = generation.get("pad_token_id", text_config.pad_token_id)
    ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    return ids, pad

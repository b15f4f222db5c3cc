"""One vLLM V1 engine behind the :class:`~rl_vllm.protocols.Engine` protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from vllm.config import VllmConfig
from vllm.exceptions import VLLMError
from vllm.inputs.engine import tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from rl_vllm.config import EngineConfig
from rl_vllm.engine import refit
from rl_vllm.engine.args import build_engine_args
from rl_vllm.engine.columns import to_columns
from rl_vllm.engine.params import to_vllm
from rl_vllm.engine.stats import LatestStats
from rl_vllm.engine.weight_specs import expected_from_config
from rl_vllm.errors import EngineDiedError
from rl_vllm.types import (
    CommitReport,
    CompletionBatch,
    EngineMetrics,
    InFlight,
    KVCache,
    ModelInfo,
    RequestBatch,
    RequestFailure,
    TensorSpec,
    WeightUpdate,
)

# Results that finish within this time of each other travel together: on a busy engine several finish in one step.
_COALESCE_S = 0.004


@dataclass(slots=True)
class _Inbox:
    """Where the tasks of one batch leave their results."""

    finished: list[tuple[int, RequestOutput]] = field(default_factory=list)
    failures: list[RequestFailure] = field(default_factory=list)
    dead: str | None = None
    arrived: asyncio.Event = field(default_factory=asyncio.Event)


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
        self._stats: LatestStats | None = None
        args = build_engine_args(config, replica=replica, on_cpu=on_cpu)
        args.disable_log_stats = True
        self._llm = AsyncLLM.from_engine_args(args, stat_loggers=[self._make_stats])
        self._closed = False

    async def start(self) -> None:
        """Label the loaded weights version 0 and make one token, so that no caller pays for first-use costs."""
        await self._llm.update_weight_version("0")
        warm_up = SamplingParams(max_tokens=1, detokenize=False)
        async for _ in self._llm.generate(tokens_input([0]), warm_up, "warm-up"):
            pass
        await self._llm.reset_prefix_cache()

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
        )

    async def stream(self, batch: RequestBatch) -> AsyncGenerator[CompletionBatch, None]:
        inbox = _Inbox()
        tasks: dict[int, asyncio.Task[None]] = {}
        params: dict[int, SamplingParams] = {}
        try:
            for row, number in enumerate(batch.numbers_B.tolist()):
                sampling = batch.sampling_B[row]
                prompt = batch.prompts.row(row).tolist()
                # Rows share one setting object unless the service gave them seeds or limits of their own.
                shared = params.get(id(sampling))
                if shared is None:
                    shared = params[id(sampling)] = to_vllm(sampling)
                work = self._run(inbox, number, prompt, shared)
                tasks[number] = asyncio.create_task(work, name=f"request-{number}")
            waiting = len(tasks)
            while waiting:
                await inbox.arrived.wait()
                await asyncio.sleep(_COALESCE_S)
                inbox.arrived.clear()
                if inbox.dead is not None:
                    raise EngineDiedError(self._replica, inbox.dead)
                finished, inbox.finished = inbox.finished, []
                failures, inbox.failures = inbox.failures, []
                waiting -= len(finished) + len(failures)
                yield to_columns(finished, failures)
        finally:
            pending = [task for task in tasks.values() if not task.done()]
            for task in pending:
                # vLLM's generate() aborts its request when its task is cancelled.
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def _run(self, inbox: _Inbox, number: int, prompt: list[int], params: SamplingParams) -> None:
        try:
            outputs = [o async for o in self._llm.generate(tokens_input(prompt), params, str(number))]
            # One, since only the final output was asked for; none when the request was aborted before it began.
            if outputs:
                inbox.finished.append((number, outputs[-1]))
            else:
                inbox.failures.append(RequestFailure(number, "the engine returned nothing"))
        except EngineDeadError as error:
            inbox.dead = _reason(error)
        except (VLLMError, ValueError, TypeError) as error:
            # vLLM wraps what one request ran into; the engine goes on, unless it says otherwise.
            if self._llm.errored:
                inbox.dead = _reason(error)
            else:
                inbox.failures.append(RequestFailure(number, _reason(error)))
        inbox.arrived.set()

    async def abort(self, numbers: Sequence[int]) -> None:
        await self._llm.abort([str(number) for number in numbers])

    async def metrics(self) -> EngineMetrics:
        assert self._stats is not None, "vLLM builds its stat loggers with the engine"
        return self._stats.snapshot(num_unfinished=self._llm.get_num_unfinished_requests())

    async def check_health(self) -> None:
        if self._llm.errored:
            raise EngineDiedError(self._replica, _reason(self._llm.dead_error))

    async def weight_specs(self) -> tuple[TensorSpec, ...]:
        config = self._llm.model_config
        return await asyncio.to_thread(
            expected_from_config,
            config.hf_config,
            dtype=str(config.dtype).removeprefix("torch."),
            trust_remote_code=config.trust_remote_code,
        )

    async def stage_weights(self, update: WeightUpdate, *, timeout_s: float) -> None:
        with self._naming_its_death():
            await refit.stage_weights(self._llm, update, timeout_s=timeout_s)

    async def commit_weights(self, update: WeightUpdate, *, in_flight: InFlight, kv: KVCache) -> CommitReport:
        with self._naming_its_death():
            return await refit.commit_weights(self._llm, update, in_flight=in_flight, kv=kv)

    async def reset_prefix_cache(self) -> bool:
        with self._naming_its_death():
            return bool(await self._llm.reset_prefix_cache())

    async def collective_rpc(
        self, method: str, *, timeout_s: float, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> list[object]:
        with self._naming_its_death():
            return list(await self._llm.collective_rpc(method, timeout_s, args, kwargs))

    async def shutdown(self) -> None:
        if not self._closed:
            self._closed = True
            await asyncio.to_thread(self._llm.shutdown)

    @contextmanager
    def _naming_its_death(self) -> Iterator[None]:
        """Tell a dead engine from a call that failed, as the protocol does."""
        try:
            yield
        except EngineDeadError as error:
            raise EngineDiedError(self._replica, _reason(error)) from error

    def _make_stats(self, vllm_config: VllmConfig, engine_index: int) -> LatestStats:
        self._stats = LatestStats(vllm_config, engine_index)
        return self._stats


def _end_and_pad_ids(config: VllmConfig) -> tuple[tuple[int, ...], int | None]:
    """Ids that end a response and the padding id, from the generation config first, then the model's."""
    generation = config.model_config.try_get_generation_config()
    text_config = config.model_config.hf_text_config
    eos = generation.get("eos_token_id", text_config.eos_token_id)
    pad = generation.get("pad_token_id", text_config.pad_token_id)
    ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    return ids, pad


def _reason(error: BaseException) -> str:
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__

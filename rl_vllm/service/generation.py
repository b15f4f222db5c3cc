"""Prompts in, completions out: ``generate`` and ``encode``, blocking and awaited."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Unpack

from rl_vllm.config import ServiceConfig
from rl_vllm.errors import EngineDiedError, ServiceNotRunningError
from rl_vllm.service import jobs, results
from rl_vllm.service.calls import Calls
from rl_vllm.service.hop import Hop
from rl_vllm.service.inputs import InputPreprocessor, Prompts
from rl_vllm.service.jobs import GenerateJob, Job, PoolingParamsLike, RequestOptions
from rl_vllm.service.loop import with_deadline
from rl_vllm.service.observe.progress import Bar, Progress
from rl_vllm.service.outputs import PoolingRequestOutput, RequestOutput
from rl_vllm.types import (
    BadPrompt,
    CompletionBatch,
    ModelInfo,
    PoolingConfig,
    PromptBatch,
    SamplingConfig,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rl_vllm.engine.params import SamplingParams


class GenerationCalls(Calls):
    """``generate``, ``encode`` and their twins."""

    def __init__(self, config: ServiceConfig) -> None:
        super().__init__(config)
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._own_tokenizer: PreTrainedTokenizerBase | None = None
        self._tokenizer_lock = threading.Lock()

    def model_info(self) -> ModelInfo:
        """Facts about the served model."""
        return self._running("model_info()").model

    def get_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The model's tokenizer, loaded on first use; None when the service runs on ids alone."""
        self._load_tokenizer("get_tokenizer()")
        return self._tokenizer

    async def aget_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """As :meth:`get_tokenizer`, awaited on any event loop."""
        return await asyncio.to_thread(self.get_tokenizer)

    def get_input_preprocessor(self) -> InputPreprocessor:
        """What turns prompts into ids; vLLM 0.32 no longer has an object of this name, this one reads as we do."""
        return InputPreprocessor(self._load_tokenizer("get_input_preprocessor()"), self.model_info())

    def generate(
        self,
        prompts: Prompts | None = None,
        sampling_params: SamplingParams | SamplingConfig | Sequence[SamplingParams | SamplingConfig] | None = None,
        *,
        prompt_token_ids: object = None,
        use_tqdm: bool | Callable[..., Bar] = True,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput | list[RequestOutput]:
        """Answer prompts, with the interface of ``vllm.LLM.generate``.

        Args:
            prompts: A string, a ``TokensPrompt``, a list of ids (one prompt), or a list of any of these.
            sampling_params: vLLM's or ours, one for all prompts or one for each; None means vLLM's defaults.
            prompt_token_ids: Ids of one prompt or of many, in place of ``prompts``.
            use_tqdm: Show a progress bar with tokens per second; or what to build it with.
            **options: :class:`RequestOptions`: ``lora_request``, ``timeout_seconds``, ``actor_index``,
                ``request_context`` and ``on_bad_prompt``.

        Returns:
            One output for one prompt; for a list, a list in its order. All ``n`` samples are in ``outputs``. With
            ``on_bad_prompt="mark"`` a row without an answer has no ``outputs`` and the reason in ``error``.

        Raises:
            BadInputError: What is given is no prompt and no list of prompts.
            BadPromptError: A prompt is empty, too long, out of the vocabulary or no prompt; nothing has been sent.
            ConfigError: A setting is wrong, or an adapter is unknown.
            GenerationError: An engine refused prompts.
            DeadlineError: ``timeout_seconds`` passed.
            ServiceAsleepError: The engines sleep, or have no weights.
            ServiceOverloadedError: Too many requests are outstanding and the service was configured to refuse.
            NoReplicaServesError: Fewer replicas serve, or are on their way, than the floor.
        """
        work = self._read("generate()", prompts, sampling_params, prompt_token_ids, options)
        with Progress(total=len(work.job.rows), use_tqdm=use_tqdm) as progress:
            chunks = self._block(
                "generate()",
                lambda: jobs.answer(self._running("generate()"), work, "generate()", progress.update),
                timeout_s=work.job.limit_s,
                waited_for=work.job.waited_for,
            )
        return results.present(work, chunks, self._own_tokenizer)

    async def agenerate(
        self,
        prompts: Prompts | None = None,
        sampling_params: SamplingParams | SamplingConfig | Sequence[SamplingParams | SamplingConfig] | None = None,
        *,
        prompt_token_ids: object = None,
        use_tqdm: bool | Callable[..., Bar] = False,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput | list[RequestOutput]:
        """As :meth:`generate`, awaited on any event loop; cancelling the caller aborts everything in the engines."""
        # Tokenizers work for as long as their texts are: the caller's loop goes on meanwhile.
        work = await asyncio.to_thread(self._read, "agenerate()", prompts, sampling_params, prompt_token_ids, options)
        with Progress(total=len(work.job.rows), use_tqdm=use_tqdm) as progress:
            chunks = await self._wait(
                "agenerate()",
                lambda: jobs.answer(self._running("agenerate()"), work, "agenerate()", progress.update),
                timeout_s=work.job.limit_s,
                waited_for=work.job.waited_for,
            )
        return await asyncio.to_thread(results.present, work, chunks, self._own_tokenizer)

    def generate_batch(
        self,
        prompts: PromptBatch,
        sampling: SamplingConfig | Sequence[SamplingConfig],
        *,
        timeout_s: float | None = None,
        on_bad_prompt: BadPrompt = BadPrompt.RAISE,
        actor_index: int | None = None,
    ) -> CompletionBatch:
        """Answer a batch in columns; see :meth:`rl_vllm.protocols.GenerationService.generate_batch`.

        ``actor_index`` names the one replica that answers; None lets the router choose.
        """
        work = self._read_batch("generate_batch()", prompts, sampling, timeout_s, on_bad_prompt, actor_index)
        chunks = self._block(
            "generate_batch()",
            lambda: jobs.answer(self._running("generate_batch()"), work, "generate_batch()", None),
            timeout_s=work.job.limit_s,
            waited_for=work.job.waited_for,
        )
        return results.collect(work, chunks)

    async def agenerate_batch(
        self,
        prompts: PromptBatch,
        sampling: SamplingConfig | Sequence[SamplingConfig],
        *,
        timeout_s: float | None = None,
        on_bad_prompt: BadPrompt = BadPrompt.RAISE,
        actor_index: int | None = None,
    ) -> CompletionBatch:
        """As :meth:`generate_batch`, awaited on any event loop."""
        work = self._read_batch("agenerate_batch()", prompts, sampling, timeout_s, on_bad_prompt, actor_index)
        chunks = await self._wait(
            "agenerate_batch()",
            lambda: jobs.answer(self._running("agenerate_batch()"), work, "agenerate_batch()", None),
            timeout_s=work.job.limit_s,
            waited_for=work.job.waited_for,
        )
        return results.collect(work, chunks)

    async def stream_batch(
        self,
        prompts: PromptBatch,
        sampling: SamplingConfig | Sequence[SamplingConfig],
        *,
        timeout_s: float | None = None,
        on_bad_prompt: BadPrompt = BadPrompt.RAISE,
        actor_index: int | None = None,
    ) -> AsyncGenerator[CompletionBatch, None]:
        """Chunks as samples finish; see :meth:`rl_vllm.protocols.AsyncGenerationService.stream_batch`.

        What the reader has not asked for yet waits in this process; it is never more than the batch.
        """
        call = "stream_batch()"
        work = self._read_batch(call, prompts, sampling, timeout_s, on_bad_prompt, actor_index)
        core, reader = self._running(call), results.ChunkReader(work)
        assert self._loop is not None
        hop: Hop[CompletionBatch] = Hop(self._loop, stop_timeout_s=self.config.rpc_timeout_s)
        try:
            hop.start(
                lambda: with_deadline(
                    lambda: jobs.pour(core, work, call, lambda _group, chunk: hop.put(chunk)),
                    work.job.limit_s,
                    work.job.waited_for,
                )
            )
            if (refused := reader.refused()) is not None:
                yield refused
            while (chunk := await hop.next()) is not None:
                if (ready := reader.read(chunk)) is not None:
                    yield ready
        except CancelledError:
            raise ServiceNotRunningError("shut down", call) from None
        except EngineDiedError as error:
            # A shutdown ends the engines under the calls that use them.
            if self._state == "shut down":
                raise ServiceNotRunningError("shut down", call) from error
            raise
        finally:
            await hop.close()
        reader.end()

    def encode(
        self,
        prompts: Prompts | None = None,
        pooling_params: PoolingParamsLike | PoolingConfig | None = None,
        *,
        prompt_token_ids: object = None,
        **options: Unpack[RequestOptions],
    ) -> PoolingRequestOutput | list[PoolingRequestOutput]:
        """One pooled vector per prompt, from a model that embeds or classifies.

        Args:
            prompts: As for :meth:`generate`.
            pooling_params: vLLM's or ours; None means the embedding.
            prompt_token_ids: Ids of one prompt or of many, in place of ``prompts``.
            **options: :class:`RequestOptions`.

        Returns:
            One output for one prompt, a list for a list; ``outputs.data`` is float32 [D].

        Raises:
            UnsupportedByEngineError: The model does not do this; and what :meth:`generate` raises.
        """
        job, pooling = self._read_pooling("encode()", prompts, pooling_params, prompt_token_ids, options)
        chunks = self._block(
            "encode()",
            lambda: jobs.embed(self._running("encode()"), job, pooling, "encode()"),
            timeout_s=job.limit_s,
            waited_for=job.waited_for,
        )
        return results.present_vectors(job, chunks)

    async def aencode(
        self,
        prompts: Prompts | None = None,
        pooling_params: PoolingParamsLike | PoolingConfig | None = None,
        *,
        prompt_token_ids: object = None,
        **options: Unpack[RequestOptions],
    ) -> PoolingRequestOutput | list[PoolingRequestOutput]:
        """As :meth:`encode`, awaited on any event loop."""
        job, pooling = await asyncio.to_thread(
            self._read_pooling, "aencode()", prompts, pooling_params, prompt_token_ids, options
        )
        chunks = await self._wait(
            "aencode()",
            lambda: jobs.embed(self._running("aencode()"), job, pooling, "aencode()"),
            timeout_s=job.limit_s,
            waited_for=job.waited_for,
        )
        return results.present_vectors(job, chunks)

    def _read(
        self,
        call: str,
        prompts: Prompts | None,
        sampling_params: SamplingParams | SamplingConfig | Sequence[SamplingParams | SamplingConfig] | None,
        prompt_token_ids: object,
        options: RequestOptions,
    ) -> GenerateJob:
        model, tokenizer = self._running(call).model, self._load_tokenizer(call)
        job = jobs.read_job(model, self.config, tokenizer, prompts, prompt_token_ids, options)
        return jobs.generate_job(model, job, sampling_params)

    def _read_batch(
        self,
        call: str,
        prompts: PromptBatch,
        sampling: SamplingConfig | Sequence[SamplingConfig],
        timeout_s: float | None,
        on_bad_prompt: BadPrompt,
        only: int | None,
    ) -> GenerateJob:
        model = self._running(call).model
        job = jobs.batch_job(model, self.config, prompts, timeout_s=timeout_s, on_bad_prompt=on_bad_prompt, only=only)
        return jobs.generate_job(model, job, sampling)

    def _read_pooling(
        self,
        call: str,
        prompts: Prompts | None,
        pooling_params: object,
        prompt_token_ids: object,
        options: RequestOptions,
    ) -> tuple[Job, PoolingConfig]:
        model, tokenizer = self._running(call).model, self._load_tokenizer(call)
        job = jobs.read_job(model, self.config, tokenizer, prompts, prompt_token_ids, options, room=0)
        return job, jobs.read_pooling(pooling_params)

    def _load_tokenizer(self, call: str) -> PreTrainedTokenizerBase | None:
        """The service's own copy: what a user does with the other one must not disturb a call in another thread."""
        name = self._running(call).model.tokenizer
        with self._tokenizer_lock:
            if self._tokenizer is None and name is not None:
                from transformers import AutoTokenizer

                self._tokenizer = AutoTokenizer.from_pretrained(name)
                self._own_tokenizer = copy.deepcopy(self._tokenizer)
            return self._own_tokenizer

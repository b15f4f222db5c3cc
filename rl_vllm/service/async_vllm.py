"""The multi-replica service."""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from rl_vllm.config import EngineConfig, ServiceConfig, start_timeout_s
from rl_vllm.errors import BadInputError, ConfigError, EngineDiedError, GenerationError, ServiceNotRunningError
from rl_vllm.service.dispatch import Dispatcher
from rl_vllm.service.executors import Executor
from rl_vllm.service.inputs import Prompts, parse_prompts
from rl_vllm.service.loop import LoopThread
from rl_vllm.service.outputs import RequestOutput, to_request_outputs
from rl_vllm.service.progress import Progress
from rl_vllm.service.prompts import check_prompts, settings_per_row
from rl_vllm.service.refits import WeightsControl
from rl_vllm.service.replicas import Replica, ReplicaSet
from rl_vllm.service.text import decode_samples
from rl_vllm.types import (
    BadPrompt,
    CommitReport,
    CompletionBatch,
    EngineMetrics,
    InFlight,
    KVCache,
    ModelInfo,
    PromptBatch,
    ReplicaState,
    SamplingConfig,
    TensorSpec,
    WeightUpdate,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rl_vllm.engine.args import AsyncEngineArgs
    from rl_vllm.engine.params import SamplingParams

T = TypeVar("T")
logger = logging.getLogger(__name__)

# Beyond the deadlines of the work itself, so that the work's own error is the one that is seen.
_GRACE_S = 10.0


class AsyncVLLM:
    """Any number of vLLM replicas behind one front; a context manager.

    Args:
        config: The service's settings.
        executor: Where the engines run; None means Ray.

    Methods block and may be called from any thread. :meth:`launch` starts a service in one call.
    """

    def __init__(self, config: ServiceConfig, *, executor: Executor | None = None) -> None:
        self.config = config
        self._executor = executor
        self._lock = threading.Lock()
        self._state = "not launched"
        self._loop: LoopThread | None = None
        self._model: ModelInfo | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._replicas: ReplicaSet | None = None
        self._dispatcher: Dispatcher | None = None
        self._weights: WeightsControl | None = None

    @classmethod
    def launch(
        cls, engine_args: EngineConfig | AsyncEngineArgs, num_replicas: int = 1, *, executor: Executor | None = None
    ) -> AsyncVLLM:
        """Start all replicas in parallel and wait until every one can serve.

        Args:
            engine_args: Our settings or vLLM's.
            num_replicas: How many engines.
            executor: Where they run; None means Ray.

        Raises:
            ConfigError: A setting is wrong or the model cannot be found.
            NotEnoughResourcesError: The cluster cannot hold the replicas.
            EngineStartError: An engine did not start, with its own reason; everything has been stopped.
            DeadlineError: They took longer than ``RL_VLLM_TIMEOUT_SECONDS``.
        """
        if not isinstance(engine_args, EngineConfig):
            from rl_vllm.engine.args import config_from_engine_args

            engine_args = config_from_engine_args(engine_args)
        service = cls(ServiceConfig(engine=engine_args, num_replicas=num_replicas), executor=executor)
        service.start()
        return service

    @classmethod
    def from_pretrained(
        cls,
        model_name: str,
        num_devices: int | None = None,
        num_replicas: int = 1,
        *,
        verbose: bool = True,
        compile: bool | None = None,  # noqa: A002 (TorchRL's name for it)
        enable_fp32_output: bool = False,
        **engine_kwargs: object,
    ) -> AsyncVLLM:
        """From a model name to a running service.

        Args:
            model_name: Path or hub id.
            num_devices: Devices per replica: the tensor-parallel size.
            num_replicas: How many engines.
            verbose: Log what is started.
            compile: Whether vLLM compiles the model; None means on GPUs.
            enable_fp32_output: Compute the output head in float32.
            **engine_kwargs: Fields of :class:`~rl_vllm.config.EngineConfig` or of vLLM's ``AsyncEngineArgs``.

        Raises:
            ConfigError: A name is unknown or two values contradict each other; and what :meth:`launch` raises.
        """
        tensor_parallel = engine_kwargs.pop("tensor_parallel_size", None)
        if num_devices is not None and tensor_parallel not in (None, num_devices):
            raise ConfigError(f"num_devices={num_devices} contradicts tensor_parallel_size={tensor_parallel}: give one")
        if compile is not None and "enforce_eager" in engine_kwargs:
            raise ConfigError("compile and enforce_eager say the same thing: give one")
        fields = set(EngineConfig.__dataclass_fields__) - {"engine_kwargs"}
        ours: dict[str, Any] = {name: value for name, value in engine_kwargs.items() if name in fields}
        if compile is not None:
            ours["enforce_eager"] = not compile
        config = EngineConfig(
            model=model_name,
            tensor_parallel_size=num_devices or tensor_parallel or 1,  # type: ignore[arg-type]
            enable_fp32_output=enable_fp32_output,
            engine_kwargs={name: value for name, value in engine_kwargs.items() if name not in fields},
            **ours,
        )
        if verbose:
            logger.info("launching %d replicas of %s", num_replicas, model_name)
        return cls.launch(config, num_replicas)

    def start(self) -> None:
        """Start the engines; see :meth:`launch`. Does nothing when they run already."""
        with self._lock:
            if self._state == "running":
                return
            if self._state != "not launched":
                raise ServiceNotRunningError(self._state, "start()")
            if self._executor is None:
                from rl_vllm.service.ray_executor import RayExecutor

                self._executor = RayExecutor()
            self._executor.prepare(self.config)
            self._loop = LoopThread("rl_vllm-service")
            self._state = "starting"
            # Before the engines exist: an interrupt while they start must stop them too.
            atexit.register(self.shutdown)
        limit_s = (self.config.launch_timeout_s or start_timeout_s()) + _GRACE_S
        started = time.perf_counter()
        launch = partial(self._executor.launch, self.config)
        try:
            engines, self._model = self._loop.run(launch, timeout_s=limit_s, waited_for="the replicas to start")
        except CancelledError:
            self.shutdown()
            raise ServiceNotRunningError("shut down", "start()") from None
        except BaseException:
            self.shutdown()
            raise
        self._replicas = ReplicaSet(engines)
        self._dispatcher = Dispatcher(self._replicas)
        self._weights = WeightsControl(self._replicas)
        with self._lock:
            if self._state != "starting":
                raise ServiceNotRunningError(self._state, "start()")
            self._state = "running"
        logger.info(
            "%d replicas of %s serve after %.1f s", len(engines), self._model.model, time.perf_counter() - started
        )

    @property
    def num_replicas(self) -> int:
        return self.config.num_replicas

    @property
    def weight_version(self) -> int:
        """The version that every serving replica has; 0 is what was loaded at launch."""
        return self._running("weight_version").version

    def model_info(self) -> ModelInfo:
        self._running("model_info()")
        assert self._model is not None
        return self._model

    def get_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The model's tokenizer, loaded on first use; None when the service runs on ids alone."""
        name = self.model_info().tokenizer
        if self._tokenizer is None and name is not None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(name)
        return self._tokenizer

    def generate(
        self,
        prompts: Prompts | None = None,
        sampling_params: SamplingParams | SamplingConfig | None = None,
        *,
        prompt_token_ids: object = None,
        use_tqdm: bool = True,
        timeout_seconds: float | None = None,
    ) -> RequestOutput | list[RequestOutput]:
        """Answer prompts, with the interface of ``vllm.LLM.generate``.

        Args:
            prompts: A string, a ``TokensPrompt``, a list of ids (one prompt), or a list of any of these.
            sampling_params: vLLM's or ours, one for all prompts; None means vLLM's defaults.
            prompt_token_ids: Ids of one prompt or of many, in place of ``prompts``.
            use_tqdm: Show a progress bar with tokens per second.
            timeout_seconds: Limit for the whole call; on expiry everything is aborted in the engines.

        Returns:
            One output for one prompt; for a list, a list in its order. All ``n`` samples are in ``outputs``.

        Raises:
            BadInputError: A prompt has no known form.
            BadPromptError: A prompt is empty, too long, or out of the vocabulary; nothing has been sent.
            GenerationError: An engine refused prompts.
            DeadlineError: ``timeout_seconds`` passed.
        """
        self._running("generate()")
        sampling, with_logprobs = _read_sampling(sampling_params)
        parsed = parse_prompts(prompts, prompt_token_ids, self.get_tokenizer())
        with Progress(total=len(parsed.batch) * sampling.n, shown=use_tqdm) as progress:
            batch = self._generate(
                parsed.batch, sampling, timeout_seconds, on_bad_prompt=BadPrompt.RAISE, on_chunk=progress.update
            )
        texts = decode_samples(self.get_tokenizer(), parsed.batch, batch, sampling)
        outputs = to_request_outputs(parsed.batch, parsed.texts, batch, texts, with_logprobs=with_logprobs)
        return outputs[0] if parsed.single else outputs

    def generate_batch(
        self,
        prompts: PromptBatch,
        sampling: SamplingConfig,
        *,
        timeout_s: float | None = None,
        on_bad_prompt: BadPrompt = BadPrompt.RAISE,
    ) -> CompletionBatch:
        """Answer a batch in columns; see :meth:`rl_vllm.protocols.GenerationService.generate_batch`."""
        return self._generate(prompts, sampling, timeout_s, on_bad_prompt=on_bad_prompt, on_chunk=None)

    def metrics(self) -> list[EngineMetrics | None]:
        """Each engine's own counts, in the order of the replicas; None for one that is dead."""
        replicas = self._running("metrics()")

        async def ask(replica: Replica) -> EngineMetrics | None:
            if replica.state is ReplicaState.DEAD:
                return None
            try:
                return await replica.engine.metrics()
            except EngineDiedError as error:
                replicas.set_state(replica, ReplicaState.DEAD, str(error))
                return None

        return self._call("metrics", lambda: asyncio.gather(*(ask(replica) for replica in replicas.all)))

    def reset_prefix_cache(self) -> bool:
        """Forget cached KV on every replica; False when running requests hold some of it."""
        replicas = self._running("reset_prefix_cache()")
        targets = replicas.living() or replicas.serving()
        resets = lambda: asyncio.gather(*(r.engine.reset_prefix_cache() for r in targets))  # noqa: E731
        return all(self._call("reset_prefix_cache", resets))

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        """The tensors a trainer must send; asked for once."""
        control = self._control("weight_specs()")
        return self._call("weight_specs", control.specs)

    def stage_weights(self, update: WeightUpdate, *, timeout_s: float) -> None:
        """Stage on every replica; see :meth:`rl_vllm.protocols.GenerationService.stage_weights`."""
        control = self._control("stage_weights()")
        self._call("stage_weights", lambda: control.stage(update, timeout_s), timeout_s=timeout_s + _GRACE_S)

    def commit_weights(
        self, update: WeightUpdate, *, in_flight: InFlight, kv: KVCache, timeout_s: float
    ) -> tuple[CommitReport, ...]:
        """Commit on every replica; see :meth:`rl_vllm.protocols.GenerationService.commit_weights`."""
        control = self._control("commit_weights()")
        work = lambda: control.commit(update, in_flight=in_flight, kv=kv, timeout_s=timeout_s)  # noqa: E731
        return self._call("commit_weights", work, timeout_s=timeout_s + _GRACE_S)

    def shutdown(self) -> None:
        """Stop every engine and give back what it held; calls under way end in an error. Idempotent."""
        with self._lock:
            if self._loop is None or self._state == "shut down":
                self._state = "shut down"
                return
            self._state = "shut down"
            loop, executor = self._loop, self._executor
            assert executor is not None
        atexit.unregister(self.shutdown)
        try:
            limit_s = self.config.shutdown_timeout_s + 2 * _GRACE_S
            loop.run(executor.close, timeout_s=limit_s, waited_for="the replicas to stop")
        finally:
            loop.close()
            executor.release()

    def __enter__(self) -> AsyncVLLM:
        if self._state == "not launched":
            self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def _generate(
        self,
        prompts: PromptBatch,
        sampling: SamplingConfig,
        timeout_s: float | None,
        *,
        on_bad_prompt: BadPrompt,
        on_chunk: Callable[[CompletionBatch], None] | None,
    ) -> CompletionBatch:
        self._running("generate_batch()")
        assert self._model is not None
        assert self._dispatcher is not None
        rows, refused = check_prompts(prompts, self._model, on_bad_prompt)
        settings = settings_per_row(prompts, rows, sampling, self._model)
        stream = partial(self._dispatcher.stream, prompts, rows, settings)
        limit_s = self.config.request_timeout_s if timeout_s is None else timeout_s
        chunks = self._call(f"{len(rows)} prompts", lambda: _gather(stream(), on_chunk), timeout_s=limit_s)
        batch = CompletionBatch.concatenate(chunks).sorted_rows()
        if batch.failures and on_bad_prompt is BadPrompt.RAISE:
            raise GenerationError(tuple((failure.number, failure.reason) for failure in batch.failures))
        return batch.with_failures(sorted([*batch.failures, *refused], key=lambda failure: failure.number))

    def _running(self, call: str) -> ReplicaSet:
        if self._state != "running":
            raise ServiceNotRunningError(self._state, call)
        assert self._replicas is not None
        return self._replicas

    def _control(self, call: str) -> WeightsControl:
        self._running(call)
        assert self._weights is not None
        return self._weights

    def _call(self, what: str, work: Callable[[], Awaitable[T]], *, timeout_s: float | None = None) -> T:
        assert self._loop is not None
        limit_s = self.config.rpc_timeout_s if timeout_s is None else timeout_s
        try:
            return self._loop.run(work, timeout_s=limit_s, waited_for=what)
        except CancelledError:
            raise ServiceNotRunningError("shut down", what) from None


async def _gather(
    stream: AsyncGenerator[CompletionBatch, None], on_chunk: Callable[[CompletionBatch], None] | None
) -> list[CompletionBatch]:
    chunks = []
    async with aclosing(stream):
        async for chunk in stream:
            chunks.append(chunk)
            if on_chunk is not None:
                on_chunk(chunk)
    return chunks


def _read_sampling(given: SamplingParams | SamplingConfig | None) -> tuple[SamplingConfig, bool]:
    """Our settings, and whether the caller wants logprobs in the outputs."""
    if given is None:
        return SamplingConfig(), False
    if isinstance(given, SamplingConfig):
        return given, True
    if isinstance(given, Sequence):
        raise BadInputError("sampling_params is one for all prompts, got a list: call generate once per setting")
    from rl_vllm.engine.params import from_vllm

    return from_vllm(given), given.logprobs is not None

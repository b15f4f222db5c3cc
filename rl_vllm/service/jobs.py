"""What a call was asked, read and checked in the caller's thread; and its answer as the caller wants it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypedDict, runtime_checkable

from rl_vllm.config import ServiceConfig, require_above_zero
from rl_vllm.errors import BadInputError, ConfigError
from rl_vllm.service.adapters import Adapter, LoRARequestLike
from rl_vllm.service.core import Core
from rl_vllm.service.inputs import ParsedPrompts, Prompts, parse_prompts
from rl_vllm.service.prompts import check_prompts, settings_per_row
from rl_vllm.types import (
    BadPrompt,
    CompletionBatch,
    EmbeddingBatch,
    LoRAAdapter,
    ModelInfo,
    PoolingConfig,
    PromptBatch,
    RequestFailure,
    SamplingConfig,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rl_vllm.engine.params import SamplingParams


class RequestOptions(TypedDict, total=False):
    """What every call that sends prompts takes by keyword.

    Attributes:
        lora_request: Adapter for all prompts, or one for each: a ``LoRARequest``, or the name it was added under.
        timeout_seconds: Limit for the whole call; on expiry everything is aborted in the engines.
        actor_index: Index of the one replica that answers; None lets the router choose.
        request_context: ``{"session_id": ...}`` for all prompts, or one for each: a session stays on its replica.
        on_bad_prompt: "raise" refuses the batch before anything is sent; "mark" gives the row an ``error``.
    """

    lora_request: Adapter | Sequence[Adapter | None] | None
    timeout_seconds: float | None
    actor_index: int | None
    request_context: Mapping[str, str | None] | Sequence[Mapping[str, str | None] | None] | None
    on_bad_prompt: BadPrompt | str


@runtime_checkable
class PoolingParamsLike(Protocol):
    """What is read of vLLM's ``PoolingParams``."""

    task: str | None
    use_activation: bool | None
    dimensions: int | None


@dataclass(frozen=True, slots=True)
class Job:
    """A call's prompts, read and checked.

    Attributes:
        parsed: The prompts.
        prompts: The same with their sessions.
        rows: Rows to send.
        refused: Rows that cannot be sent.
        adapters: What each prompt asked for, as the caller named it.
        only: Index of the one replica that answers, or None.
        limit_s: Limit for the whole call, in seconds.
        on_bad_prompt: What a row without an answer does.
        began_s: When the call came, by ``time.perf_counter``.
    """

    parsed: ParsedPrompts
    prompts: PromptBatch
    rows: list[int]
    refused: tuple[RequestFailure, ...]
    adapters: Sequence[Adapter | None]
    only: int | None
    limit_s: float
    on_bad_prompt: BadPrompt
    began_s: float

    @property
    def waited_for(self) -> str:
        return f"{len(self.rows)} prompts"


@dataclass(frozen=True, slots=True)
class GenerateJob:
    """What a generating call was asked.

    Attributes:
        job: Prompts and options.
        sampling: One for all prompts, or one for each, as asked.
        settings: What is sent: one per entry of ``job.rows``.
        with_logprobs: Whether the outputs show logprobs, for all prompts or for each.
    """

    job: Job
    sampling: SamplingConfig | Sequence[SamplingConfig]
    settings: Sequence[SamplingConfig]
    with_logprobs: Sequence[bool]

    def groups(self) -> list[list[int]]:
        """Positions in ``job.rows`` of requests that ask for the same columns: only those can share a batch."""
        if isinstance(self.sampling, SamplingConfig):
            return [list(range(len(self.settings)))]
        found: dict[tuple[bool, bool], list[int]] = {}
        for position, setting in enumerate(self.settings):
            found.setdefault((setting.logprobs > 0, setting.prompt_logprobs is not None), []).append(position)
        return list(found.values())

    def fill(self, chunk: CompletionBatch) -> CompletionBatch:
        """Give a chunk the optional columns that rows of other groups asked for, so that it can join theirs."""
        if isinstance(self.sampling, SamplingConfig):
            return chunk
        wants_prompt = any(setting.prompt_logprobs is not None for setting in self.settings)
        return chunk.filled(
            top_logprobs=any(setting.logprobs > 0 for setting in self.settings),
            prompt_lengths_B=self.job.prompts.lengths_B if wants_prompt else None,
        )


def read_job(
    model: ModelInfo,
    config: ServiceConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    prompts: Prompts | None,
    prompt_token_ids: object,
    options: RequestOptions,
    *,
    room: int = 1,
) -> Job:
    """Read and check prompts and options; ``room`` is the tokens that an answer needs at least.

    Raises:
        BadInputError, BadPromptError, ConfigError: As ``generate`` says.
    """
    began_s = time.perf_counter()
    unknown = sorted(set(options) - set(RequestOptions.__annotations__))
    if unknown:
        raise TypeError(f"unknown keyword {unknown[0]!r}: the options are {', '.join(RequestOptions.__annotations__)}")
    policy = as_bad_prompt(options.get("on_bad_prompt", BadPrompt.RAISE))
    parsed = parse_prompts(
        prompts, prompt_token_ids, tokenizer, max_model_len=model.max_model_len, on_bad_prompt=policy
    )
    rows, refused = check_prompts(parsed.batch, model, policy, parsed.bad, room=room)
    count = len(parsed.batch)
    sessions = _sessions(options.get("request_context"), count)
    return Job(
        parsed=parsed,
        prompts=parsed.batch if sessions is None else replace(parsed.batch, session_ids=sessions),
        rows=rows,
        refused=refused,
        adapters=_adapters(options.get("lora_request"), count),
        only=options.get("actor_index"),
        limit_s=limit_of(options.get("timeout_seconds"), config),
        on_bad_prompt=policy,
        began_s=began_s,
    )


def batch_job(
    model: ModelInfo,
    config: ServiceConfig,
    prompts: PromptBatch,
    *,
    timeout_s: float | None,
    on_bad_prompt: BadPrompt,
    only: int | None,
) -> Job:
    """A batch that is in columns already; adapters are named in it."""
    began_s = time.perf_counter()
    rows, refused = check_prompts(prompts, model, on_bad_prompt)
    adapters = prompts.loras if prompts.loras is not None else (None,) * len(prompts)
    parsed = ParsedPrompts(prompts, (), single=False)
    return Job(parsed, prompts, rows, refused, adapters, only, limit_of(timeout_s, config), on_bad_prompt, began_s)


def generate_job(
    model: ModelInfo,
    job: Job,
    sampling_params: SamplingParams | SamplingConfig | Sequence[SamplingParams | SamplingConfig] | None,
) -> GenerateJob:
    """Add the sampling settings.

    Raises:
        ConfigError: There is not one for each prompt, or a value is out of range.
    """
    count = len(job.prompts)
    if isinstance(sampling_params, Sequence):
        if len(sampling_params) != count:
            raise ConfigError(f"{len(sampling_params)} sampling_params for {count} prompts: give one, or one for each")
        # Most lists hold few distinct objects, and rows of one object can share what is sent.
        read = {id(given): read_sampling(given) for given in sampling_params}
        pairs = [read[id(given)] for given in sampling_params]
        sampling = [each for each, _ in pairs]
        settings = settings_per_row(job.prompts, job.rows, sampling, model)
        return GenerateJob(job, sampling, settings, [shown for _, shown in pairs])
    one, shown = read_sampling(sampling_params)
    return GenerateJob(job, one, settings_per_row(job.prompts, job.rows, one, model), [shown] * count)


def read_sampling(given: SamplingParams | SamplingConfig | None) -> tuple[SamplingConfig, bool]:
    """Our settings, and whether the caller wants logprobs in the outputs."""
    if given is None:
        return SamplingConfig(), False
    if isinstance(given, SamplingConfig):
        return given, True
    if isinstance(given, str | Mapping | int | float):
        raise BadInputError(f"sampling_params must be SamplingParams or SamplingConfig, got {given!r}")
    from rl_vllm.engine.params import from_vllm

    return from_vllm(given), given.logprobs is not None


def read_pooling(given: object) -> PoolingConfig:
    """Our settings from vLLM's ``PoolingParams`` or ours."""
    if given is None:
        return PoolingConfig()
    if isinstance(given, PoolingConfig):
        return given
    if not isinstance(given, PoolingParamsLike):
        raise BadInputError(f"pooling_params must be PoolingParams or PoolingConfig, got {given!r}")
    return PoolingConfig(task=given.task or "embed", use_activation=given.use_activation, dimensions=given.dimensions)


def as_bad_prompt(given: BadPrompt | str) -> BadPrompt:
    """The policy, from its name or itself."""
    names = [each.value for each in BadPrompt]
    if isinstance(given, BadPrompt) or given in names:
        return BadPrompt(given)
    raise ConfigError(f"on_bad_prompt must be one of {', '.join(map(repr, names))}, got {given!r}")


def limit_of(timeout_s: float | None, config: ServiceConfig) -> float:
    """The call's own limit, or the configured one; 0 expires at once."""
    if timeout_s is None:
        return config.request_timeout_s
    if timeout_s != 0:
        require_above_zero("timeout_seconds", timeout_s)
    return float(timeout_s)


async def answer(
    core: Core, work: GenerateJob, call: str, on_chunk: Callable[[CompletionBatch], None] | None
) -> list[list[CompletionBatch]]:
    """Generate on the service's loop; the chunks of each of ``work.groups()``."""
    groups: list[list[CompletionBatch]] = [[] for _ in work.groups()]

    def keep(group: int, chunk: CompletionBatch) -> None:
        groups[group].append(chunk)
        if on_chunk is not None:
            on_chunk(chunk)

    await pour(core, work, call, keep)
    return groups


async def pour(core: Core, work: GenerateJob, call: str, on_chunk: Callable[[int, CompletionBatch], None]) -> None:
    """Generate on the service's loop, handing over each chunk with the position of its group as it comes."""
    job = work.job
    if not job.rows:
        return
    with core.sleep.awake(call, job.only):
        async with core.policies.lease(job.prompts, job.adapters) as lease:

            async def one(group: int, positions: Sequence[int]) -> None:
                rows = [job.rows[position] for position in positions]
                settings = [work.settings[position] for position in positions]
                stream = core.dispatcher.stream(lease.prompts, rows, settings, only=job.only)
                async with aclosing(stream):
                    async for chunk in stream:
                        on_chunk(group, lease.label(chunk).arrived(time.perf_counter() - job.began_s))

            await _together([one(*each) for each in enumerate(work.groups())])


async def _together(works: Sequence[Coroutine[None, None, None]]) -> None:
    """Run all at once; when one fails the others are stopped first."""
    if len(works) == 1:
        return await works[0]
    tasks = [asyncio.create_task(work, name="generate-group") for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def embed(core: Core, job: Job, pooling: PoolingConfig, call: str) -> list[EmbeddingBatch]:
    """Embed on the service's loop."""
    if not job.rows:
        return []
    with core.sleep.awake(call, job.only):
        async with core.policies.lease(job.prompts, job.adapters) as lease:
            stream = core.dispatcher.embed(lease.prompts, job.rows, pooling, only=job.only)
            async with aclosing(stream):
                return [chunk async for chunk in stream]


def _adapters(given: Adapter | Sequence[Adapter | None] | None, count: int) -> Sequence[Adapter | None]:
    if given is None or isinstance(given, str | LoRAAdapter | LoRARequestLike):
        return (given,) * count
    if len(given) != count:
        raise ConfigError(f"{len(given)} lora_request for {count} prompts: give one, or one for each")
    return tuple(given)


def _sessions(
    given: Mapping[str, str | None] | Sequence[Mapping[str, str | None] | None] | None, count: int
) -> tuple[str | None, ...] | None:
    if given is None:
        return None
    each = [given] * count if isinstance(given, Mapping) else list(given)
    if len(each) != count:
        raise ConfigError(f"{len(each)} request_context for {count} prompts: give one, or one for each")
    return tuple(None if context is None else _session(context) for context in each)


def _session(context: Mapping[str, str | None]) -> str | None:
    if not isinstance(context, Mapping):
        raise ConfigError(f"request_context must be a mapping with session_id, got {context!r}")
    unknown = sorted(set(context) - {"session_id"})
    if unknown:
        raise ConfigError(f"request_context has {unknown[0]!r}: only session_id is known")
    session = context.get("session_id")
    return None if session is None else str(session)

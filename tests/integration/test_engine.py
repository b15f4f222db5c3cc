"""One real engine behind the Engine protocol, against the Hugging Face model."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from transformers import AutoModel, PreTrainedModel

from rl_vllm.config import EngineConfig
from rl_vllm.engine.starting import EngineHost
from rl_vllm.errors import EngineDiedError, RefitError, UnsupportedByEngineError
from rl_vllm.protocols import Engine
from rl_vllm.types import (
    CompletionBatch,
    EmbeddingBatch,
    EmbeddingRequest,
    FinishReason,
    InFlight,
    KVCache,
    PoolingConfig,
    PromptBatch,
    RequestBatch,
    SamplingConfig,
)
from rl_vllm.weights.shared_storage import SharedStorageTransport
from rl_vllm.weights.source import ModuleSource
from tests.integration.truth import load_trainer, response_logprobs, train_a_bit

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

MAX_MODEL_LEN = 1024
TOLERANCE_NATS = 1e-4
PROMPT = [7, 3, 300, 41, 9, 120, 77]
# Far more tokens than are made before the test has done what it wants to do meanwhile.
LONG = SamplingConfig(max_tokens=MAX_MODEL_LEN - 16, ignore_eos=True)

_next_number = iter(range(1_000_000))


@asynccontextmanager
async def running(model: Path, **settings: object) -> AsyncIterator[Engine]:
    config = EngineConfig(model=str(model), max_model_len=MAX_MODEL_LEN, cpu_kv_cache_gib=0.25, **settings)
    host = EngineHost(config, 0, on_cpu=True)
    try:
        yield await host.start()
    finally:
        await host.stop(20.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_qwen3_tied: Path) -> AsyncIterator[Engine]:
    """A tiny Qwen3 in float32, version 0 or later: the weights are those of ``trainer``."""
    async with running(tiny_qwen3_tied, dtype="float32") as started:
        yield started


@pytest.fixture(scope="module")
def trainer(tiny_qwen3_tied: Path) -> PreTrainedModel:
    """The model whose weights the engine has; a test that refits changes both."""
    return load_trainer(tiny_qwen3_tied)


class Refits:
    """Gives the engine new weights."""

    def __init__(self, engine: Engine, trainer: PreTrainedModel, folder: Path) -> None:
        self.trainer = trainer
        self.version = 0
        self._engine = engine
        self._transport = SharedStorageTransport(folder)

    async def stage(self) -> Callable[[], object]:
        """Train, stage, and return the commit."""
        self.version += 1
        train_a_bit(self.trainer, seed=self.version)
        update = self._transport.stage(ModuleSource(self.trainer), self.version, timeout_s=60.0)
        await self._engine.stage_weights(update, timeout_s=60.0)
        return lambda: self._engine.commit_weights(update, in_flight=InFlight.KEEP, kv=KVCache.RECOMPUTE)

    def close(self) -> None:
        self._transport.close()


@pytest.fixture(scope="module")
def refits(engine: Engine, trainer: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory):
    made = Refits(engine, trainer, tmp_path_factory.mktemp("weights"))
    yield made
    made.close()


def requests(prompts: Sequence[Sequence[int]], sampling: SamplingConfig) -> RequestBatch:
    numbers = np.array([next(_next_number) for _ in prompts], np.int64)
    return RequestBatch(numbers, PromptBatch.from_rows(prompts), (sampling,) * len(prompts))


async def answer(engine: Engine, batch: RequestBatch) -> CompletionBatch:
    return CompletionBatch.concatenate([chunk async for chunk in engine.stream(batch)]).sorted_rows()


async def pieces(engine: Engine, batch: RequestBatch) -> list[CompletionBatch]:
    return [chunk async for chunk in engine.stream_pieces(batch)]


def joined(chunks: Sequence[CompletionBatch]) -> dict[tuple[int, int], dict[str, list[float]]]:
    """Columns of every sample, its pieces laid end to end, by request and sample."""
    rows: dict[tuple[int, int], dict[str, list[float]]] = {}
    for chunk in chunks:
        for i in range(len(chunk)):
            key = int(chunk.numbers_N[i]), int(chunk.samples_N[i])
            row = rows.setdefault(key, {"tokens": [], "logprobs": [], "versions": [], "finish": []})
            row["tokens"] += chunk.tokens(i).tolist()
            row["logprobs"] += chunk.logprobs(i).tolist()
            row["versions"] += chunk.versions(i).tolist()
            row["finish"].append(int(chunk.finish_N[i]))
    return rows


def worst_error(model: PreTrainedModel, prompt: Sequence[int], batch: CompletionBatch) -> float:
    return max(
        float((torch.from_numpy(batch.logprobs(i)) - response_logprobs(model, prompt, batch.tokens(i))).abs().max())
        for i in range(len(batch))
    )


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait until an awaitable condition holds."""
    async with asyncio.timeout(60):
        while not await holds():  # noqa: ASYNC110 (the engine tells nobody)
            await asyncio.sleep(0.02)


async def until_idle(engine: Engine) -> None:
    async def idle() -> bool:
        metrics = await engine.metrics()
        return metrics.num_running == metrics.num_waiting == 0

    await until(idle)


async def until_it_makes_tokens(engine: Engine) -> None:
    before = (await engine.metrics()).generated_tokens

    async def more() -> bool:
        return (await engine.metrics()).generated_tokens > before + 4

    await until(more)


# Pieces


async def test_pieces_laid_end_to_end_are_responses_that_the_trainers_model_explains(engine, trainer):
    batch = requests([PROMPT, [5]], SamplingConfig(n=2, max_tokens=40, ignore_eos=True))
    chunks = await pieces(engine, batch)
    for chunk in chunks:
        pairs = list(zip(chunk.numbers_N.tolist(), chunk.samples_N.tolist(), strict=True))
        assert len(pairs) == len(set(pairs)), "two pieces of one sample in a chunk"
    rows = joined(chunks)
    assert sorted(rows) == [(number, sample) for number in batch.numbers_B.tolist() for sample in range(2)]
    for (number, _), row in rows.items():
        prompt = batch.prompts.row(batch.numbers_B.tolist().index(number)).tolist()
        assert len(row["tokens"]) == 40
        truth = response_logprobs(trainer, prompt, row["tokens"])
        assert float((torch.tensor(row["logprobs"]) - truth).abs().max()) < TOLERANCE_NATS
        assert row["finish"][-1] == FinishReason.LENGTH
        assert len(row["finish"]) > 1
        assert set(row["finish"][:-1]) == {FinishReason.UNFINISHED}


@pytest.mark.parametrize("stop", [(), ("e",)])
async def test_pieces_of_a_greedy_response_are_the_streamed_response(engine, stop):
    sampling = SamplingConfig(temperature=0.0, max_tokens=60, ignore_eos=True, stop=stop)
    prompts = [[i, i + 1, i + 2] for i in range(10, 18)]
    whole = await answer(engine, requests(prompts, sampling))
    rows = joined(await pieces(engine, requests(prompts, sampling)))
    for i, row in enumerate(dict(sorted(rows.items())).values()):
        assert row["tokens"] == whole.tokens(i).tolist()
        np.testing.assert_allclose(row["logprobs"], whole.logprobs(i), atol=TOLERANCE_NATS)
        assert row["versions"] == whole.versions(i).tolist()
        assert row["finish"][-1] == whole.finish_N[i]
    if stop:
        assert FinishReason.STOP in whole.finish_N


async def test_a_piece_is_labelled_with_the_weights_that_made_it_across_a_refit(engine, refits):
    models = {refits.version: copy.deepcopy(refits.trainer)}
    commit = await refits.stage()
    models[refits.version] = refits.trainer
    batch = requests([PROMPT] * 3, LONG)
    chunks: list[CompletionBatch] = []
    committed: asyncio.Future[object] | None = None
    async for chunk in engine.stream_pieces(batch):
        chunks.append(chunk)
        if committed is None and len(chunks) == 3:
            committed = asyncio.ensure_future(commit())
    assert committed is not None
    await committed
    rows = joined(chunks)
    assert len(rows) == 3
    for row in rows.values():
        assert set(row["versions"]) == set(models), "the refit came while the response was made"
        assert row["versions"] == sorted(row["versions"])
        for version, model in models.items():
            mine = torch.tensor(row["versions"]) == version
            difference = torch.tensor(row["logprobs"]) - response_logprobs(model, PROMPT, row["tokens"])
            assert float(difference[mine].abs().max()) < TOLERANCE_NATS


async def test_a_prompt_that_is_too_long_fails_alone_in_pieces_too(engine):
    batch = requests([[1] * (MAX_MODEL_LEN + 5), PROMPT], SamplingConfig(max_tokens=4, ignore_eos=True))
    whole = CompletionBatch.concatenate(await pieces(engine, batch))
    assert [failure.number for failure in whole.failures] == [batch.numbers_B[0]]
    assert set(whole.numbers_N) == {batch.numbers_B[1]}
    assert len(whole.tokens_T) == 4


# Aborts


@pytest.mark.parametrize("in_pieces", [False, True])
async def test_an_aborted_request_gives_what_was_made_of_each_sample(engine, trainer, in_pieces):
    batch = requests([PROMPT], SamplingConfig(n=3, max_tokens=LONG.max_tokens, ignore_eos=True))
    reading = asyncio.create_task(pieces(engine, batch) if in_pieces else answer_chunks(engine, batch))
    await until_it_makes_tokens(engine)
    await engine.abort(batch.numbers_B.tolist())
    async with asyncio.timeout(60):
        rows = joined(await reading)
    assert sorted(rows) == [(int(batch.numbers_B[0]), sample) for sample in range(3)]
    for row in rows.values():
        assert row["finish"][-1] == FinishReason.ABORT
        assert 0 < len(row["tokens"]) < LONG.max_tokens
        truth = response_logprobs(trainer, PROMPT, row["tokens"])
        assert float((torch.tensor(row["logprobs"]) - truth).abs().max()) < TOLERANCE_NATS
    await until_idle(engine)


async def answer_chunks(engine: Engine, batch: RequestBatch) -> list[CompletionBatch]:
    return [chunk async for chunk in engine.stream(batch)]


async def test_requests_that_have_not_begun_when_they_are_aborted_come_back_empty(engine):
    # More than the engine takes in at once.
    batch = requests([PROMPT] * 400, LONG)
    reading = asyncio.create_task(answer_chunks(engine, batch))
    await until_it_makes_tokens(engine)
    await engine.abort(batch.numbers_B.tolist())
    async with asyncio.timeout(60):
        whole = CompletionBatch.concatenate(await reading).sorted_rows()
    assert whole.numbers_N.tolist() == batch.numbers_B.tolist()
    assert set(whole.finish_N) == {FinishReason.ABORT}
    assert whole.lengths_N.min() == 0
    assert whole.lengths_N.max() > 0
    await until_idle(engine)


async def test_closing_a_stream_of_pieces_leaves_the_engine_idle(engine):
    async with aclosing(engine.stream_pieces(requests([PROMPT] * 4, LONG))) as stream:
        await anext(stream)
    await until_idle(engine)


# Health


def processes(title: str, parent: psutil.Process | None = None) -> list[psutil.Process]:
    """Processes below this one, or below another, that vLLM gave this title."""
    found = (parent or psutil.Process()).children(recursive=True)
    return [process for process in found if process.cmdline()[:1] == [title]]


@pytest.mark.parametrize("title", ["VLLM::EngineCore", "VLLM::Worker"])
async def test_a_process_that_hangs_leaves_the_health_check_without_an_answer(engine, title):
    await engine.check_health()
    (process,) = processes(title)
    process.suspend()
    check = asyncio.create_task(engine.check_health())
    try:
        # However long: there is nobody to answer.
        await asyncio.wait([check], timeout=1.0)
        assert not check.done()
    finally:
        process.resume()
    async with asyncio.timeout(60):
        await check
        await engine.check_health()


async def test_health_is_answered_while_requests_run_and_does_not_disturb_them(engine, trainer):
    batch = requests([PROMPT] * 4, SamplingConfig(max_tokens=300, ignore_eos=True))
    reading = asyncio.create_task(answer(engine, batch))
    await until_it_makes_tokens(engine)
    answered = 0
    while not reading.done():
        await engine.check_health()
        answered += 1
    assert answered > 1
    whole = await reading
    assert whole.lengths_N.tolist() == [300] * 4
    assert worst_error(trainer, PROMPT, whole) < TOLERANCE_NATS


@pytest.mark.parametrize("title", ["VLLM::EngineCore", "VLLM::Worker"])
async def test_a_killed_process_ends_streams_and_calls_with_its_death(tiny_qwen3_tied, title):
    others = processes(title)
    async with running(tiny_qwen3_tied, dtype="float32") as engine:
        (process,) = [each for each in processes(title) if each not in others]
        reading = asyncio.create_task(answer(engine, requests([PROMPT], LONG)))
        await until_it_makes_tokens(engine)
        # It stops first, so that the call is under way when it dies.
        process.suspend()
        call = asyncio.create_task(engine.collective_rpc("check_health", timeout_s=60.0))
        check = asyncio.create_task(engine.check_health())
        await asyncio.sleep(0)
        os.kill(process.pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            for waiting in (reading, call, check):
                with pytest.raises(EngineDiedError, match="replica 0 died"):
                    await waiting
            for later in (engine.check_health(), engine.reset_prefix_cache()):
                with pytest.raises(EngineDiedError):
                    await later
            with pytest.raises(EngineDiedError):
                await answer(engine, requests([PROMPT], LONG))


# What it says of itself


async def test_what_the_prefix_cache_found_is_counted(engine):
    block = (await engine.model_info()).block_size
    prompt = np.random.default_rng(3).integers(0, 500, 2 * block + 5).tolist()
    await engine.reset_prefix_cache()
    one = SamplingConfig(max_tokens=1)
    before = await engine.metrics()
    first = await answer(engine, requests([prompt], one))
    second = await answer(engine, requests([prompt], one))
    assert first.cached_N.tolist() == [0]
    assert second.cached_N.tolist() == [2 * block]

    async def counted() -> bool:
        after = await engine.metrics()
        queries = after.prefix_cache_queries - before.prefix_cache_queries
        return (queries, after.prefix_cache_hits - before.prefix_cache_hits) == (2 * len(prompt), 2 * block)

    await until(counted)


async def test_the_models_tasks_and_blocks_are_told(engine):
    info = await engine.model_info()
    assert info.tasks == ("generate",)
    config = await engine.engine_config()
    assert info.block_size == config.cache_config.block_size


async def test_the_engines_configuration_survives_pickling(engine):
    config = pickle.loads(pickle.dumps(await engine.engine_config()))
    assert type(config).__name__ == "VllmConfig"
    assert config.model_config.max_model_len == MAX_MODEL_LEN


async def test_what_was_not_asked_for_is_not_kept_and_says_how_to_have_it(engine):
    assert await engine.prometheus() == ""
    with pytest.raises(UnsupportedByEngineError, match="profiler_config"):
        await engine.start_profile()
    await engine.stop_profile()
    with pytest.raises(UnsupportedByEngineError, match="does not embed"):
        await embed(engine, [[1]])
    await engine.reset_mm_cache()


# Sleep


async def test_requests_wait_while_the_engine_sleeps_and_go_on_when_it_wakes(engine, trainer):
    running_batch = requests([PROMPT] * 2, SamplingConfig(max_tokens=400, ignore_eos=True))
    frozen = asyncio.create_task(answer(engine, running_batch))
    await until_it_makes_tokens(engine)
    await engine.sleep(1)
    assert await engine.is_sleeping()
    late = asyncio.create_task(answer(engine, requests([PROMPT], SamplingConfig(max_tokens=8, ignore_eos=True))))
    await engine.check_health()
    made = (await engine.metrics()).generated_tokens
    await engine.wake_up(("weights",))
    assert await engine.is_sleeping()
    await engine.check_health()
    assert (await engine.metrics()).generated_tokens == made
    assert not late.done()
    assert not frozen.done()
    await engine.wake_up(("kv_cache",))
    assert not await engine.is_sleeping()
    async with asyncio.timeout(60):
        for batch, length in ((await late, 8), (await frozen, 400)):
            assert set(batch.lengths_N) == {length}
            assert worst_error(trainer, PROMPT, batch) < TOLERANCE_NATS


async def test_after_level_2_nothing_is_generated_before_new_weights_are_there(engine, refits):
    await engine.sleep(2)
    commit = await refits.stage()
    with pytest.raises(RefitError, match="the engine's weights sleep"):
        await commit()
    await engine.wake_up(None)
    waiting = asyncio.create_task(answer(engine, requests([PROMPT], SamplingConfig(max_tokens=8, ignore_eos=True))))
    # A round trip, so that the engine has had the request.
    await engine.check_health()
    assert await engine.is_sleeping()
    assert not waiting.done()
    await commit()
    assert not await engine.is_sleeping()
    async with asyncio.timeout(60):
        batch = await waiting
    assert set(batch.versions_T) == {refits.version}
    assert worst_error(refits.trainer, PROMPT, batch) < TOLERANCE_NATS


# Embeddings


async def embed(engine: Engine, prompts: Sequence[Sequence[int]], **pooling: object) -> EmbeddingBatch:
    numbers = np.array([next(_next_number) for _ in prompts], np.int64)
    request = EmbeddingRequest(numbers, PromptBatch.from_rows(prompts), PoolingConfig(**pooling))
    return EmbeddingBatch.concatenate([chunk async for chunk in engine.embed(request)]).sorted_rows()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pooling_engine(tiny_qwen3_tied: Path) -> AsyncIterator[Engine]:
    async with running(
        tiny_qwen3_tied, dtype="float32", engine_kwargs={"runner": "pooling", "convert": "embed"}
    ) as started:
        yield started


async def test_embeddings_are_the_last_tokens_hidden_state(pooling_engine, tiny_qwen3_tied):
    prompts = [[5, 6, 7], [9], list(range(40, 90))]
    model = AutoModel.from_pretrained(tiny_qwen3_tied, dtype=torch.float32).eval()
    with torch.no_grad():
        raw = torch.cat([model(torch.tensor([prompt])).last_hidden_state[:, -1] for prompt in prompts])
    found = await embed(pooling_engine, prompts)
    assert found.values_ND.dtype == np.float32
    np.testing.assert_allclose(found.values_ND, torch.nn.functional.normalize(raw, dim=-1).numpy(), atol=1e-4)
    unscaled = await embed(pooling_engine, prompts, use_activation=False)
    np.testing.assert_allclose(unscaled.values_ND, raw.numpy(), atol=1e-3)


async def test_a_prompt_that_cannot_be_embedded_fails_alone(pooling_engine):
    found = await embed(pooling_engine, [[1] * (MAX_MODEL_LEN + 5), [5, 6, 7]])
    assert len(found) == 1
    (failure,) = found.failures
    assert failure.number == found.numbers_N[0] - 1


async def test_a_pooling_engine_is_whole_but_does_not_generate(pooling_engine):
    info = await pooling_engine.model_info()
    assert "embed" in info.tasks
    assert "generate" not in info.tasks
    await pooling_engine.check_health()
    for stream in (pooling_engine.stream, pooling_engine.stream_pieces):
        with pytest.raises(UnsupportedByEngineError, match="does not generate"):
            await anext(stream(requests([[1]], LONG)))
    with pytest.raises(UnsupportedByEngineError, match="does not classify"):
        await embed(pooling_engine, [[1]], task="classify")


async def test_closing_a_stream_of_embeddings_leaves_the_engine_idle(pooling_engine):
    numbers = np.array([next(_next_number) for _ in range(500)], np.int64)
    prompts = PromptBatch.from_rows([list(range(400))] * 500)
    async with aclosing(pooling_engine.embed(EmbeddingRequest(numbers, prompts, PoolingConfig()))) as stream:
        await anext(stream)
    await until_idle(pooling_engine)


# What has to be asked for


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def well_equipped(tiny_qwen3_untied: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    """bfloat16 with an output head in float32 whose logits are returned; with vLLM's metrics and a profiler."""
    async with running(
        tiny_qwen3_untied,
        dtype="bfloat16",
        enable_fp32_output=True,
        logprobs_mode="raw_logits",
        engine_kwargs={
            "disable_log_stats": False,
            "profiler_config": {
                "profiler": "torch",
                "torch_profiler_dir": str(tmp_path_factory.mktemp("traces")),
                "torch_profiler_with_stack": False,
            },
        },
    ) as started:
        yield started


async def test_logits_of_a_float32_head_are_not_rounded_to_bfloat16(well_equipped, tiny_qwen3_untied):
    batch = requests([PROMPT], SamplingConfig(max_tokens=32, ignore_eos=True, logprobs=5))
    whole = await answer(well_equipped, batch)
    logits = torch.from_numpy(whole.logprobs_T)
    # A head in bfloat16 leaves no other numbers; here a few may be among them by chance.
    assert float((logits == logits.bfloat16().float()).float().mean()) < 0.2
    # The body's bfloat16 rounds hidden states, by some hundredths of a logit.
    model = load_trainer(tiny_qwen3_untied).bfloat16()
    model.lm_head.float()
    ids = torch.tensor([[*PROMPT, *whole.tokens(0).tolist()]])
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state[0, len(PROMPT) - 1 : -1].float()
        truth = (hidden @ model.lm_head.weight.T).gather(1, ids[0, len(PROMPT) :, None])[:, 0]
    assert float((logits - truth).abs().mean()) < 0.25


async def test_vllms_own_metrics_are_kept_when_asked_for(well_equipped):
    await answer(well_equipped, requests([PROMPT], SamplingConfig(max_tokens=7, ignore_eos=True)))

    async def counted() -> bool:
        text = await well_equipped.prometheus()
        (line,) = [line for line in text.splitlines() if line.startswith("vllm:generation_tokens_total{")]
        return float(line.split()[-1]) == (await well_equipped.metrics()).generated_tokens >= 7

    await until(counted)


async def test_a_profile_leaves_a_trace_of_the_worker(well_equipped):
    folder = Path((await well_equipped.engine_config()).profiler_config.torch_profiler_dir)
    await well_equipped.start_profile()
    await answer(well_equipped, requests([PROMPT], SamplingConfig(max_tokens=3, ignore_eos=True)))
    await well_equipped.stop_profile()
    # The front end leaves a trace too, which is almost empty here.
    assert max(trace_sizes(folder), default=0) > 10_000


def trace_sizes(folder: Path) -> list[int]:
    return [path.stat().st_size for path in folder.rglob("*") if ".pt.trace.json" in path.name]

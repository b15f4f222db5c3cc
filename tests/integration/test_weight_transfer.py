"""Refits of a real engine, against the Hugging Face model that the weights came from."""

from __future__ import annotations

import asyncio
import copy
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rl_vllm.engine import reaper
from rl_vllm.engine.transfer import RefitTransferEngine, WeightWorkerExtension
from rl_vllm.engine.weight_specs import expected_weights
from rl_vllm.errors import RefitError
from rl_vllm.testing.models import build_tiny_model
from rl_vllm.types import InFlight, KVCache, WeightUpdate
from rl_vllm.weights.shared_storage import SharedStorageTransport
from rl_vllm.weights.source import ModuleSource
from tests.integration.truth import response_logprobs, train_a_bit

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

PROMPT = [7, 3, 300, 41, 9, 120, 77]
TOLERANCE_NATS = 1e-4


class BreakableExtension(WeightWorkerExtension):
    """A worker whose next load fails half-way through the model."""

    model_runner: Any

    def break_next_load(self) -> None:
        model = self.model_runner.get_model()
        load = model.load_weights

        def load_half(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            model.load_weights = load
            whole = list(weights)
            load(whole[: len(whole) // 2])
            raise OSError("the disk caught fire")

        model.load_weights = load_half


@asynccontextmanager
async def running_engine(model: Path, extension: type[WeightWorkerExtension]) -> AsyncIterator[Any]:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    others = reaper.descendants(os.getpid())
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=1024,
            logprobs_mode="processed_logprobs",
            weight_transfer_config=WeightTransferConfig(backend="rl_vllm"),
            worker_extension_cls=f"{extension.__module__}.{extension.__name__}",
        )
    )
    family = reaper.descendants(os.getpid()) - others
    segments = {name for pid, _ in family for name in reaper.mapped_segments(pid)}
    try:
        yield engine
    finally:
        # On a busy machine vLLM kills a core before that has removed its shared memory.
        engine.shutdown()
        reaper.remove_when_unused(segments, within_s=15.0)


def label_of(version: str) -> int:
    """The version of weights loaded at start has vLLM's own label, which is no number."""
    return int(version) if version.isdigit() else 0


async def sample(
    engine: Any, request_id: str, *, max_tokens: int = 32, started: asyncio.Event | None = None
) -> tuple[list[int], list[float], list[int]]:
    """Ids, logprobs and weight version of each token of one response."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    settings = SamplingParams(
        max_tokens=max_tokens,
        logprobs=0,
        seed=11,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.CUMULATIVE,
    )
    async for output in engine.generate({"prompt_token_ids": PROMPT}, settings, request_id):
        last = output.outputs[0]
        if started is not None:
            started.set()
    ids = list(last.token_ids)
    logprobs = [step[token].logprob for step, token in zip(last.logprobs, ids, strict=True)]
    versions = [0] * len(ids)
    for span in last.weight_versions:
        start, end = span.start, span.end
        versions[start:end] = [label_of(span.version)] * (end - start)
    return ids, logprobs, versions


async def worst_error(engine: Any, model: PreTrainedModel, request_id: str) -> float:
    ids, logprobs, _ = await sample(engine, request_id)
    return float((torch.tensor(logprobs) - response_logprobs(model, PROMPT, ids)).abs().max())


def flip_a_bit(update: WeightUpdate) -> None:
    shard = next(Path(str(update.payload["folder"])).glob("*.safetensors"))
    damaged = bytearray(shard.read_bytes())
    damaged[-5] ^= 1
    shard.write_bytes(damaged)


async def refit(engine: Any, transport: SharedStorageTransport, model: PreTrainedModel, version: int) -> WeightUpdate:
    from rl_vllm.engine.refit import commit_weights, stage_weights

    update = transport.stage(ModuleSource(model), version, timeout_s=60.0)
    await stage_weights(engine, update, timeout_s=60.0)
    report = await commit_weights(engine, update, in_flight=InFlight.KEEP, kv=KVCache.RECOMPUTE)
    transport.retire(version)
    assert report.version == version
    assert report.prefix_cache_reset
    assert report.checksum == update.checksum
    return update


def padded_moe(path: Path) -> Path:
    """Experts whose width the CPU kernel pads from 40 to a multiple of 32."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=40,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.15,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    return path


def test_registering_the_backend_twice_is_harmless() -> None:
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    from rl_vllm.engine.plugin import BACKEND, register

    register()
    register()
    built = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend=BACKEND), MagicMock(), torch.device("cpu"), torch.nn.Identity()
    )
    assert isinstance(built, RefitTransferEngine)
    with pytest.raises(RuntimeError, match="nothing is staged"):
        built.start_weight_update()


async def test_experts_of_padded_width_follow_the_trainer_through_three_refits_without_a_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = padded_moe(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert {spec.name: spec for spec in expected_weights(str(path), dtype="float32")} == {
        spec.name: spec for spec in ModuleSource(model).specs()
    }
    transport = SharedStorageTransport(tmp_path / "weights")
    errors: dict[str, float] = {}
    async with running_engine(path, WeightWorkerExtension) as engine:
        errors["before"] = await worst_error(engine, model, "before")
        capfd.readouterr()
        for version in (1, 2, 3):
            train_a_bit(model, seed=version)
            assert await worst_error(engine, model, f"stale-{version}") > 100 * TOLERANCE_NATS
            await refit(engine, transport, model, version)
            errors[f"after {version}"] = await worst_error(engine, model, f"after-{version}")
        written = capfd.readouterr()
    transport.close()
    assert {name: error for name, error in errors.items() if error >= TOLERANCE_NATS} == {}
    assert [line for line in (written.out + written.err).splitlines() if "WARNING" in line or "ERROR" in line] == []


@pytest.mark.slow
async def test_every_token_is_explained_by_the_version_on_its_label_and_failures_leave_a_way_on(tmp_path: Path) -> None:
    from rl_vllm.engine.refit import commit_weights, stage_weights

    path = build_tiny_model(tmp_path / "model", "qwen3", tied=True, with_tokenizer=False)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    transport = SharedStorageTransport(tmp_path / "weights")
    async with running_engine(path, BreakableExtension) as engine:
        await sample(engine, "warm-up")

        # A refit under way: eight requests are frozen, and go on under the new weights.
        models = {0: copy.deepcopy(model)}
        train_a_bit(model, seed=1)
        models[1] = model
        started = [asyncio.Event() for _ in range(8)]
        running = [
            asyncio.create_task(sample(engine, f"long-{i}", max_tokens=900, started=event))
            for i, event in enumerate(started)
        ]
        await asyncio.gather(*[event.wait() for event in started])
        await refit(engine, transport, model, 1)
        results = await asyncio.gather(*running)
        for ids, logprobs, versions in results:
            for version, trainer in models.items():
                mine = torch.tensor(versions) == version
                difference = (torch.tensor(logprobs) - response_logprobs(trainer, PROMPT, ids))[mine].abs()
                assert difference.numel() == 0 or float(difference.max()) < TOLERANCE_NATS
        assert any(len(set(versions)) == 2 for _, _, versions in results)

        # A damaged file is found in staging: nothing was loaded, and generation went on all the time.
        newer = copy.deepcopy(model)
        train_a_bit(newer, seed=2)
        update = transport.stage(ModuleSource(newer), 2, timeout_s=60.0)
        flip_a_bit(update)
        with pytest.raises(RefitError, match="wrong checksum"):
            await stage_weights(engine, update, timeout_s=60.0)
        with pytest.raises(RefitError, match="nothing is staged"):
            await commit_weights(engine, update, in_flight=InFlight.KEEP, kv=KVCache.RECOMPUTE)
        transport.discard(update)
        assert await worst_error(engine, model, "after-damage") < TOLERANCE_NATS

        # A load that fails half-way mixes two versions: the engine stays paused until a refit has taken.
        update = transport.stage(ModuleSource(newer), 2, timeout_s=60.0)
        await stage_weights(engine, update, timeout_s=60.0)
        await engine.collective_rpc("break_next_load")
        with pytest.raises(RefitError) as caught:
            await commit_weights(engine, update, in_flight=InFlight.KEEP, kv=KVCache.RECOMPUTE)
        assert caught.value.reason == "OSError: the disk caught fire"
        assert await engine.is_paused()
        transport.discard(update)
        await refit(engine, transport, newer, 3)
        assert await worst_error(engine, newer, "after-recovery") < TOLERANCE_NATS
        _, _, versions = await sample(engine, "labels")
        assert set(versions) == {3}
    transport.close()

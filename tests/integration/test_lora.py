"""LoRA adapters on a real engine, beside PEFT's own models."""

from __future__ import annotations

import copy
import itertools
import shutil
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from rl_vllm import EngineConfig, SamplingConfig
from rl_vllm.engine.starting import EngineHost
from rl_vllm.errors import ConfigError
from rl_vllm.protocols import Engine
from rl_vllm.service.loop import LoopThread
from rl_vllm.types import CompletionBatch, InFlight, KVCache, LoRAAdapter, PromptBatch, RequestBatch
from rl_vllm.weights import ModuleSource, SharedStorageTransport
from tests.integration.truth import load_trainer, response_logprobs, train_a_bit

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

T = TypeVar("T")

TOLERANCE_NATS = 1e-4
# On CPUs vLLM shares the KV of prompts in blocks of this many tokens.
BLOCK_SIZE = 128
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# One reaches the output head, for which vLLM keeps an index of its own; the other leaves half the layers alone.
TARGETS = {"poet": [*LINEARS, "lm_head"], "judge": LINEARS[:4]}
MIXED = (None, "poet", "judge", None, "judge", "poet")
# 30 tokens and more in a prompt: some of the six are processed in parts.
LIMITS = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 3, "max_lora_rank": 8, "max_num_batched_tokens": 128}


def prompts(count: int, length: int = 30) -> list[list[int]]:
    return [[5 + (row * 7 + place * 3) % 200 for place in range(length + row)] for row in range(count)]


def make_adapter(base: Path, folder: Path, targets: Sequence[str], seed: int) -> Path:
    """A random adapter that changes every logit: neither of its matrices is zero."""
    model = get_peft_model(load_trainer(base), LoraConfig(r=8, lora_alpha=16, target_modules=list(targets)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    # Alone: beside it PEFT would keep the base head's weights, and put them back when it reads the adapter.
    model.save_pretrained(folder, save_embedding_layers=False)
    return folder


@dataclass
class Rig:
    """An engine that this thread can call, and the truth about it: a model for each adapter, None being the base."""

    loop: LoopThread
    engine: Engine
    base: Path
    models: dict[str | None, PreTrainedModel] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def run(self, call: Callable[[], Awaitable[T]]) -> T:
        return self.loop.run(call, timeout_s=120, waited_for="the engine")

    def add(self, name: str, number: int, folder: Path) -> None:
        adapter = LoRAAdapter(name=name, number=number, path=str(folder))
        self.run(lambda: self.engine.add_lora(adapter))
        self.models[name] = PeftModel.from_pretrained(load_trainer(self.base), folder).eval()

    def remove(self, name: str) -> None:
        assert self.run(lambda: self.engine.remove_lora(name))

    def refit(self, base: PreTrainedModel, version: int) -> None:
        transport = SharedStorageTransport()
        try:
            update = transport.stage(ModuleSource(base), version, timeout_s=60)
            self.run(lambda: self.engine.stage_weights(update, timeout_s=60))
            self.run(lambda: self.engine.commit_weights(update, in_flight=InFlight.KEEP, kv=KVCache.RECOMPUTE))
        finally:
            transport.close()

    def listed(self) -> list[str]:
        return [adapter.name for adapter in self.run(self.engine.list_loras)]

    def requests(self, rows: Sequence[Sequence[int]], loras: Sequence[str | None], **settings: object) -> RequestBatch:
        sampling = SamplingConfig(**{"max_tokens": 12, "ignore_eos": True, **settings})
        return RequestBatch(
            np.array([next(self.numbers) for _ in rows]),
            replace(PromptBatch.from_rows(rows), loras=tuple(loras)),
            tuple(replace(sampling, seed=row) for row in range(len(rows))),
        )

    def generate(
        self, rows: Sequence[Sequence[int]], loras: Sequence[str | None], **settings: object
    ) -> CompletionBatch:
        """Answers in the order of the rows."""
        requests = self.requests(rows, loras, **settings)

        async def gather() -> list[CompletionBatch]:
            return [chunk async for chunk in self.engine.stream(requests)]

        batch = CompletionBatch.concatenate(self.run(gather)).sorted_rows()
        assert not batch.failures
        return batch

    def worst_error(self, rows: Sequence[Sequence[int]], loras: Sequence[str | None], batch: CompletionBatch) -> float:
        """Largest difference between the engine's logprobs and those of each row's own model."""
        worst = 0.0
        for index, (row, lora) in enumerate(zip(rows, loras, strict=True)):
            expected = response_logprobs(self.models[lora], row, batch.tokens(index).tolist())
            worst = max(worst, float((torch.tensor(batch.logprobs(index)) - expected).abs().max()))
        return worst


@pytest.fixture(scope="module")
def folders(tiny_qwen3_untied: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: make_adapter(tiny_qwen3_untied, root / name, targets, seed)
        for seed, (name, targets) in enumerate(TARGETS.items())
    }


@pytest.fixture(scope="module")
def rig(tiny_qwen3_untied: Path, folders: dict[str, Path]) -> Iterator[Rig]:
    """One engine with both adapters loaded and room for a third."""
    config = EngineConfig(
        model=str(tiny_qwen3_untied), dtype="float32", max_model_len=512, cpu_kv_cache_gib=0.25, engine_kwargs=LIMITS
    )
    loop = LoopThread("lora-tests")
    host = EngineHost(config, 0, on_cpu=True)
    try:
        engine = loop.run(host.start, timeout_s=200, waited_for="the engine to start")
        rig = Rig(loop, engine, tiny_qwen3_untied, {None: load_trainer(tiny_qwen3_untied)})
        for number, (name, folder) in enumerate(folders.items(), start=1):
            rig.add(name, number, folder)
        yield rig
    finally:
        loop.run(lambda: host.stop(20), timeout_s=100, waited_for="the engine to stop")
        loop.close()


def test_each_row_of_a_mixed_batch_is_answered_by_its_own_model(rig: Rig) -> None:
    rows = prompts(len(MIXED))
    batch = rig.generate(rows, MIXED)
    assert rig.worst_error(rows, MIXED, batch) < TOLERANCE_NATS
    # The test can fail: no other model of the three explains a row.
    for shifted in (MIXED[1:] + MIXED[:1], MIXED[2:] + MIXED[:2]):
        for index in range(len(MIXED)):
            if shifted[index] != MIXED[index]:
                only = slice(index, index + 1)
                error = rig.worst_error(rows[only], shifted[only], batch.take(np.array([index])))
                assert error > 1000 * TOLERANCE_NATS


def test_prompts_are_scored_by_each_rows_own_model(rig: Rig) -> None:
    # As many prompt tokens as rows in some, so that a count alone would not tell the two apart.
    rows = [*prompts(4), *prompts(2, length=len(MIXED) + 1)]
    batch = rig.generate(rows, MIXED, prompt_logprobs=0)
    assert rig.worst_error(rows, MIXED, batch) < TOLERANCE_NATS
    assert batch.prompt_logprobs is not None
    for row, lora, scores in zip(rows, MIXED, batch.prompt_logprobs, strict=True):
        expected = response_logprobs(rig.models[lora], row[:1], row[1:])
        assert float((torch.tensor(scores[1:]) - expected).abs().max()) < TOLERANCE_NATS
    after = rig.generate(rows, MIXED)
    assert rig.worst_error(rows, MIXED, after) < TOLERANCE_NATS


def test_no_adapter_finds_the_kv_of_another_or_of_the_base_model(rig: Rig) -> None:
    prompt = prompts(1, length=2 * BLOCK_SIZE + 10)
    for lora in (None, "poet", "judge"):
        batch = rig.generate(prompt, [lora])
        assert batch.cached_N.tolist() == [0]
        assert rig.worst_error(prompt, [lora], batch) < TOLERANCE_NATS
        again = rig.generate(prompt, [lora])
        # The test can fail: its own it does find.
        assert again.cached_N.tolist() == [2 * BLOCK_SIZE]
        assert rig.worst_error(prompt, [lora], again) < TOLERANCE_NATS


def test_other_weights_under_a_used_name_number_and_folder_are_served_without_old_kv(
    rig: Rig, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(folders["judge"], tmp_path / "third"))
    prompt = prompts(1, length=2 * BLOCK_SIZE + 11)
    rig.add("third", 3, folder)
    try:
        rig.generate(prompt, ["third"])
        rig.remove("third")
        tensors = load_file(folder / "adapter_model.safetensors")
        save_file({key: -1.5 * tensor for key, tensor in tensors.items()}, folder / "adapter_model.safetensors")
        rig.add("third", 3, folder)
        batch = rig.generate(prompt, ["third"])
    finally:
        rig.remove("third")
    assert batch.cached_N.tolist() == [0]
    assert rig.worst_error(prompt, ["third"], batch) < TOLERANCE_NATS


def test_three_adapters_take_turns_in_two_slots_although_their_folders_are_gone(
    rig: Rig, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = make_adapter(rig.base, tmp_path / "third", LINEARS, seed=7)
    rig.add("third", 3, folder)
    shutil.rmtree(folder)
    loras = ("third", None, "poet", "judge", "poet", "third")
    try:
        assert rig.listed() == ["poet", "judge", "third"]
        for _ in range(2):
            batch = rig.generate(prompts(6), loras)
            assert rig.worst_error(prompts(6), loras, batch) < TOLERANCE_NATS
        with pytest.raises(ConfigError, match="holds 3 adapters, as many as it may"):
            rig.add("fourth", 4, folders["poet"])
        assert rig.listed() == ["poet", "judge", "third"]
    finally:
        rig.remove("third")
    assert rig.listed() == ["poet", "judge"]


def test_an_adapter_stays_while_a_request_uses_it_and_goes_after(rig: Rig, folders: dict[str, Path]) -> None:
    rig.add("third", 3, folders["judge"])
    requests = rig.requests(prompts(1), ["third"], max_tokens=400)

    async def remove_while_it_runs() -> None:
        async with aclosing(rig.engine.stream_pieces(requests)) as pieces:
            await anext(pieces)
            with pytest.raises(ConfigError, match="used by 1 unfinished requests"):
                await rig.engine.remove_lora("third")

    rig.run(remove_while_it_runs)
    rig.remove("third")
    assert rig.listed() == ["poet", "judge"]


def test_refused_adapters_leave_the_engine_as_it_was(rig: Rig, folders: dict[str, Path], tmp_path: Path) -> None:
    misplaced = Path(shutil.copytree(folders["judge"], tmp_path / "misplaced"))
    tensors = load_file(misplaced / "adapter_model.safetensors")
    elsewhere = {key.replace(".model.layers.", ".model.foo.layers."): tensor for key, tensor in tensors.items()}
    save_file(elsewhere, misplaced / "adapter_model.safetensors")
    wide = tmp_path / "wide"
    get_peft_model(load_trainer(rig.base), LoraConfig(r=16, target_modules=["q_proj"])).save_pretrained(wide)
    for folder, reason in (
        (tmp_path / "nowhere", "no such folder"),
        (tmp_path, r"no adapter_config\.json"),
        (misplaced, r"16 of its 16 keys match no module of the model: .*\.foo\.layers"),
        (wide, "rank 16 is greater than max_lora_rank 8"),
    ):
        with pytest.raises(ConfigError, match=reason):
            rig.add("third", 3, folder)
    assert rig.listed() == ["poet", "judge"]
    rows = prompts(len(MIXED))
    assert rig.worst_error(rows, MIXED, rig.generate(rows, MIXED)) < TOLERANCE_NATS


def test_a_row_whose_adapter_is_not_there_fails_alone(rig: Rig) -> None:
    requests = rig.requests(prompts(2), ["nobody", "poet"])

    async def gather() -> list[CompletionBatch]:
        return [chunk async for chunk in rig.engine.stream(requests)]

    batch = CompletionBatch.concatenate(rig.run(gather))
    assert [failure.number for failure in batch.failures] == requests.numbers_B[:1].tolist()
    assert "no adapter is called 'nobody'; loaded: judge, poet" in batch.failures[0].reason
    assert rig.worst_error(prompts(2)[1:], ["poet"], batch) < TOLERANCE_NATS


def test_a_pinned_adapter_keeps_its_slot_while_others_take_turns(rig: Rig, folders: dict[str, Path]) -> None:
    rig.add("third", 3, folders["poet"])
    try:
        rig.run(lambda: rig.engine.pin_lora("third"))
        with pytest.raises(ConfigError, match="leaves no slot"):
            rig.run(lambda: rig.engine.pin_lora("poet"))
        loras = ("third", "poet", "judge", None, "judge", "third")
        batch = rig.generate(prompts(6), loras)
        assert rig.worst_error(prompts(6), loras, batch) < TOLERANCE_NATS
    finally:
        rig.remove("third")


def test_a_refit_changes_the_base_model_below_adapters_that_stay(rig: Rig, folders: dict[str, Path]) -> None:
    rows, old = prompts(len(MIXED)), rig.models
    trained = load_trainer(rig.base)
    train_a_bit(trained, 5)
    adapted = {name: PeftModel.from_pretrained(copy.deepcopy(trained), folders[name]).eval() for name in TARGETS}
    rig.refit(trained, 1)
    try:
        rig.models = {None: trained, **adapted}
        batch = rig.generate(rows, MIXED)
        assert rig.worst_error(rows, MIXED, batch) < TOLERANCE_NATS
        assert set(batch.versions_T.tolist()) == {1}
        assert rig.listed() == ["poet", "judge"]
    finally:
        rig.models = old
        rig.refit(load_trainer(rig.base), 2)

"""Which adapters an engine takes, on a front end of vLLM that only notes what it is told; the corrected operators."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from xxhash import xxh3_64_digest

pytest.importorskip("vllm")

from vllm.config import LoRAConfig
from vllm.lora.ops.torch_ops import bgmv_expand, bgmv_expand_slice, bgmv_shrink
from vllm.lora.request import LoRARequest
from vllm.lora.utils import is_in_target_modules

from rl_vllm.engine.adapter_folder import check_folder
from rl_vllm.engine.adapters import Adapters
from rl_vllm.engine.cpu_lora import only_adapted_rows
from rl_vllm.errors import ConfigError, UnsupportedByEngineError
from rl_vllm.testing import Gate
from rl_vllm.types import LoRAAdapter, LoRALimits, TensorSpec

HIDDEN, INNER, VOCAB, RANK = 8, 12, 16, 4
MODEL = (
    TensorSpec("model.embed_tokens.weight", "float32", (VOCAB, HIDDEN)),
    TensorSpec("model.layers.0.self_attn.q_proj.weight", "float32", (HIDDEN, HIDDEN)),
    TensorSpec("model.layers.0.mlp.down_proj.weight", "float32", (HIDDEN, INNER)),
    TensorSpec("model.layers.0.mlp.experts.1.up_proj.weight", "float32", (INNER, HIDDEN)),
)
DOWN = "base_model.model.model.layers.0.mlp.down_proj"


SHAPES = {f"{DOWN}.lora_A.weight": (RANK, INNER), f"{DOWN}.lora_B.weight": (HIDDEN, RANK)}


def tensors_of_an_adapter() -> dict[str, torch.Tensor]:
    return {f"{DOWN}.lora_A.weight": torch.ones(RANK, INNER), f"{DOWN}.lora_B.weight": torch.ones(HIDDEN, RANK)}


def write_adapter(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **settings: object) -> Path:
    folder.mkdir(exist_ok=True)
    described = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["down_proj"], **settings}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    save_file(tensors_of_an_adapter() if tensors is None else tensors, folder / "adapter_model.safetensors")
    return folder


def check(
    folder: Path, *, adapts_experts: bool = False, target_modules: list[str] | None = None, checksum: str | None = None
) -> None:
    check_folder(
        LoRAAdapter(name="poet", number=1, path=str(folder), checksum=checksum),
        folder,
        LoRAConfig(max_lora_rank=8, target_modules=target_modules),
        MODEL,
        packed={"gate_down_proj": ["gate_proj", "down_proj"]},
        adapts_experts=adapts_experts,
    )


class NotedLLM:
    """What :class:`Adapters` uses of vLLM's front end, with an engine that knows numbers and nothing else."""

    def __init__(self, lora_config: LoRAConfig | None) -> None:
        self.vllm_config = SimpleNamespace(lora_config=lora_config)
        self.model_config = SimpleNamespace(dtype=torch.float32, hf_config=None, trust_remote_code=False)
        self.output_processor = SimpleNamespace(request_states={})
        self.errored = False
        self.output_handler = None
        self.calls: list[LoRARequest] = []
        self.numbers: set[int] = set()
        self.pinned: set[int] = set()
        self.error: Exception | None = None
        self.gate: Gate | None = None

    async def add_lora(self, request: LoRARequest) -> bool:
        self.calls.append(request)
        if self.gate is not None:
            await self.gate.passed()
        if self.error is not None:
            raise self.error
        self.numbers.add(request.lora_int_id)
        return True

    async def remove_lora(self, number: int) -> bool:
        self.numbers.discard(number)
        return True

    async def list_loras(self) -> list[int]:
        return sorted(self.numbers)

    async def pin_lora(self, number: int) -> bool:
        self.pinned.add(number)
        return True


def engine(*, max_loras: int = 2, max_cpu_loras: int = 3) -> tuple[NotedLLM, Adapters]:
    llm: Any = NotedLLM(LoRAConfig(max_lora_rank=8, max_loras=max_loras, max_cpu_loras=max_cpu_loras))
    adapters = Adapters(llm, 0)
    # Known already, as after the first adapter: no model is built.
    adapters._expected = MODEL
    return llm, adapters


def adapter(folder: Path, name: str = "poet", number: int = 1) -> LoRAAdapter:
    return LoRAAdapter(name=name, number=number, path=str(write_adapter(folder / name)))


def test_tensors_other_than_those_that_were_written_are_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path)
    # By hand: SHA-256 of one line per tensor with its 64-bit XXH3, the first 16 digits.
    ones = {
        name: int.from_bytes(xxh3_64_digest(np.ones(shape, np.float32).tobytes()), "big", signed=True)
        for name, shape in SHAPES.items()
    }
    lines = sorted(f"{name} float32 {list(SHAPES[name])} {xxh3}" for name, xxh3 in ones.items())
    checksum = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    check(tmp_path, checksum=checksum)
    tensors = tensors_of_an_adapter()
    tensors[f"{DOWN}.lora_A.weight"][0, 0] += 1e-6
    write_adapter(tmp_path, tensors)
    with pytest.raises(ConfigError, match=f"not those that were written: checksum .*, expected {checksum}"):
        check(tmp_path, checksum=checksum)


def test_limits_name_modules_as_checkpoints_and_as_the_engine_does() -> None:
    llm, adapters = engine()
    assert adapters.limits() == LoRALimits(max_rank=8, max_loaded=3, max_running=2)
    llm.vllm_config.lora_config.target_modules = ["qkv_proj", "up_proj"]
    packed = {"qkv_proj": ["q_proj", "k_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    llm.model_config.architectures = []
    model = SimpleNamespace(packed_modules_mapping=packed)
    llm.model_config.registry = SimpleNamespace(resolve_model_cls=lambda _names, _config: (model, ""))
    limits = adapters.limits()
    assert limits is not None
    assert limits.target_modules == ("qkv_proj", "up_proj", "q_proj", "k_proj", "gate_up_proj")
    for module, may_be in {"layers.0.q_proj": True, "layers.0.up_proj": True, "layers.0.gate_proj": False}.items():
        assert limits.may_adapt(module) is may_be
        # As vLLM itself decides.
        assert is_in_target_modules(module, ["qkv_proj", "up_proj"], packed) is may_be
    assert Adapters(NotedLLM(None), 0).limits() is None  # type: ignore[arg-type]


def test_a_folder_written_for_the_model_is_accepted(tmp_path: Path) -> None:
    check(write_adapter(tmp_path))
    torch.save(tensors_of_an_adapter(), tmp_path / "adapter_model.bin")
    (tmp_path / "adapter_model.safetensors").unlink()
    check(tmp_path)


def test_an_embeddings_matrices_lie_the_other_way_round(tmp_path: Path) -> None:
    key = "base_model.model.model.embed_tokens.lora_embedding_"
    check(write_adapter(tmp_path, {key + "A": torch.ones(RANK, VOCAB), key + "B": torch.ones(HIDDEN, RANK)}))


def test_base_embeddings_that_peft_saved_beside_the_adapter_are_not_its_own(tmp_path: Path) -> None:
    beside = {"base_model.model.model.embed_tokens.base_layer.weight": torch.ones(VOCAB, HIDDEN)}
    check(write_adapter(tmp_path, tensors_of_an_adapter() | beside))


def test_a_rank_of_its_own_per_module_is_followed(tmp_path: Path) -> None:
    wide = {f"{DOWN}.lora_A.weight": torch.ones(8, INNER), f"{DOWN}.lora_B.weight": torch.ones(HIDDEN, 8)}
    check(write_adapter(tmp_path, wide, rank_pattern={"down_proj": 8}))
    with pytest.raises(ConfigError, match=r"shape \(8, 12\) where rank 4 needs \(4, 12\)"):
        check(write_adapter(tmp_path, wide))


@pytest.mark.parametrize("prefix", ["base_model.model.foo", "base_model.model.model.model", "foo"])
def test_a_wrong_prefix_is_refused_with_the_keys_that_match_nothing(tmp_path: Path, prefix: str) -> None:
    tensors = {key.replace("base_model.model.model", prefix): value for key, value in tensors_of_an_adapter().items()}
    with pytest.raises(ConfigError, match="2 of its 2 keys match no module") as caught:
        check(write_adapter(tmp_path, tensors))
    assert all(key in str(caught.value) for key in tensors)


def test_one_layer_too_many_is_refused_although_the_others_fit(tmp_path: Path) -> None:
    extra = {key.replace("layers.0", "layers.7"): value for key, value in tensors_of_an_adapter().items()}
    with pytest.raises(ConfigError, match=r"2 of its 4 keys match no module of the model: .*layers\.7"):
        check(write_adapter(tmp_path, tensors_of_an_adapter() | extra))


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("base_model.model.model.layers.0.mlp.experts.down_proj.lora_A.weight", (2, RANK, INNER)),
        ("base_model.model.model.layers.0.mlp.experts.lora_A.weight", (2 * RANK, INNER)),
        ("base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight", (2 * RANK, HIDDEN)),
    ],
)
def test_adapters_of_fused_experts_are_refused_with_the_advice_to_merge(
    tmp_path: Path, key: str, shape: tuple[int, ...]
) -> None:
    with pytest.raises(ConfigError, match="not supported, merge them") as caught:
        check(write_adapter(tmp_path, {key: torch.ones(shape)}), adapts_experts=True)
    assert key in str(caught.value)


def test_adapters_of_single_experts_are_for_builds_that_can(tmp_path: Path) -> None:
    key = "base_model.model.model.layers.0.mlp.experts.1.up_proj.lora_"
    tensors = {f"{key}A.weight": torch.ones(RANK, HIDDEN), f"{key}B.weight": torch.ones(INNER, RANK)}
    check(write_adapter(tmp_path, tensors), adapts_experts=True)
    with pytest.raises(ConfigError, match="cannot adapt experts, merge"):
        check(tmp_path, adapts_experts=False)


def test_modules_that_the_engine_does_not_adapt_are_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path)
    for targets in (["down_proj"], ["gate_down_proj"]):
        check(tmp_path, target_modules=targets)
    with pytest.raises(ConfigError, match=r"2 of its 2 keys are outside the engine's target_modules=\['q_proj'\]"):
        check(tmp_path, target_modules=["q_proj"])


def test_matrices_of_another_models_size_are_refused(tmp_path: Path) -> None:
    small = tensors_of_an_adapter() | {f"{DOWN}.lora_B.weight": torch.ones(HIDDEN // 2, RANK)}
    with pytest.raises(ConfigError, match=r"lora_B\.weight has shape \(4, 4\) where rank 4 needs \(8, 4\)"):
        check(write_adapter(tmp_path, small))


def test_half_an_adapter_and_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    tensors = tensors_of_an_adapter()
    del tensors[f"{DOWN}.lora_B.weight"]
    tensors[f"{DOWN}.lora_A.weight"][1, 2] = torch.nan
    with pytest.raises(ConfigError, match=r"not finite.*has only lora_A"):
        check(write_adapter(tmp_path, tensors))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"r": 16}, "rank 16 is greater than max_lora_rank 8"),
        ({"rank_pattern": {"q_proj": 32}}, "rank 32 is greater"),
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "bias is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "does not describe a LoRA adapter"),
        ({"r": "four"}, "adapter_config.json"),
    ],
)
def test_settings_that_vllm_cannot_follow_are_refused(tmp_path: Path, settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check(write_adapter(tmp_path, **settings))


def test_what_is_not_an_adapters_folder_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        check(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"no adapter_config\.json"):
        check(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ConfigError, match="poet"):
        check(tmp_path)
    write_adapter(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(ConfigError, match="cannot be read"):
        check(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no adapter_model\.safetensors"):
        check(tmp_path)


async def test_an_engine_without_lora_says_how_to_get_it(tmp_path: Path) -> None:
    llm: Any = NotedLLM(None)
    adapters = Adapters(llm, 0)
    for call in (adapters.add(adapter(tmp_path)), adapters.pin("poet")):
        with pytest.raises(UnsupportedByEngineError, match=r'engine_kwargs=\{"enable_lora": True\}'):
            await call
    assert await adapters.list() == ()
    assert await adapters.remove("poet") is False


async def test_an_added_adapter_is_listed_and_named_until_it_is_removed(tmp_path: Path) -> None:
    llm, adapters = engine()
    first, second = adapter(tmp_path, "poet", 7), adapter(tmp_path, "judge", 3)
    await adapters.add(first)
    await adapters.add(second)
    assert await adapters.list() == (second, first)
    request = adapters.request_for("poet")
    assert request is not None
    assert (request.lora_int_id, request.lora_path, request.load_inplace) == (7, first.path, False)
    # Loaded afresh, whatever vLLM has under the number; read once, and not again with every request.
    assert [call.load_inplace for call in llm.calls] == [True, True]
    assert adapters.request_for(None) is None
    assert await adapters.remove("poet") is True
    assert await adapters.remove("poet") is False
    assert await adapters.list() == (second,)
    assert llm.numbers == {3}
    with pytest.raises(ConfigError, match="no adapter is called 'poet'; loaded: judge"):
        adapters.request_for("poet")


async def test_what_the_engine_lost_is_not_listed(tmp_path: Path) -> None:
    llm, adapters = engine()
    await adapters.add(adapter(tmp_path))
    llm.numbers.clear()
    assert await adapters.list() == ()


async def test_the_same_adapter_again_is_not_loaded_again(tmp_path: Path) -> None:
    llm, adapters = engine()
    poet = adapter(tmp_path)
    llm.gate = Gate()
    both = [asyncio.create_task(adapters.add(poet)) for _ in range(2)]
    llm.gate.open()
    await asyncio.gather(*both)
    assert len(llm.calls) == 1


async def test_a_taken_name_or_number_is_refused(tmp_path: Path) -> None:
    llm, adapters = engine()
    poet = adapter(tmp_path)
    await adapters.add(poet)
    for other in (
        LoRAAdapter(name="poet", number=1, path=str(tmp_path / "elsewhere")),
        LoRAAdapter(name="poet", number=2, path=poet.path),
    ):
        with pytest.raises(ConfigError, match=r"'poet' is loaded as number 1 from .*: remove it first"):
            await adapters.add(other)
    with pytest.raises(ConfigError, match="number 1 is adapter 'poet'"):
        await adapters.add(adapter(tmp_path, "judge", 1))
    for impossible in (LoRAAdapter(name="", number=1, path="x"), LoRAAdapter(name="x", number=0, path="x")):
        with pytest.raises(ConfigError, match="number of at least 1"):
            await adapters.add(impossible)
    assert len(llm.calls) == 1


async def test_more_adapters_than_the_engines_cache_holds_are_refused_and_none_is_evicted(tmp_path: Path) -> None:
    llm, adapters = engine(max_loras=1, max_cpu_loras=2)
    for number in (1, 2):
        await adapters.add(adapter(tmp_path, f"a{number}", number))
    with pytest.raises(ConfigError, match=r"holds 2 adapters, as many as it may.*max_cpu_loras"):
        await adapters.add(adapter(tmp_path, "a3", 3))
    assert [each.number for each in await adapters.list()] == [1, 2]
    await adapters.remove("a1")
    await adapters.add(adapter(tmp_path, "a3", 3))
    assert llm.numbers == {2, 3}


async def test_pinning_never_takes_the_last_slot_from_the_others(tmp_path: Path) -> None:
    llm, adapters = engine(max_loras=2, max_cpu_loras=4)
    for number in (1, 2, 3):
        await adapters.add(adapter(tmp_path, f"a{number}", number))
    await adapters.pin("a1")
    await adapters.pin("a1")
    with pytest.raises(ConfigError, match="leaves no slot for the 1 others"):
        await adapters.pin("a2")
    await adapters.remove("a3")
    await adapters.pin("a2")
    assert llm.pinned == {1, 2}
    with pytest.raises(ConfigError, match="every slot is pinned"):
        await adapters.add(adapter(tmp_path, "a3", 3))
    with pytest.raises(ConfigError, match="no adapter is called 'a9'"):
        await adapters.pin("a9")


async def test_an_adapter_in_use_is_not_removed(tmp_path: Path) -> None:
    llm, adapters = engine()
    await adapters.add(adapter(tmp_path))
    request = adapters.request_for("poet")
    assert request is not None
    llm.output_processor.request_states["5"] = SimpleNamespace(lora_name=request.lora_name)
    with pytest.raises(ConfigError, match="used by 1 unfinished requests"):
        await adapters.remove("poet")
    llm.output_processor.request_states.clear()
    assert await adapters.remove("poet")


async def test_every_load_has_its_own_name_in_vllm_so_that_no_kv_of_an_earlier_one_is_found(tmp_path: Path) -> None:
    _, adapters = engine()
    poet = adapter(tmp_path)
    names = []
    for _ in range(2):
        await adapters.add(poet)
        request = adapters.request_for("poet")
        assert request is not None
        names.append(request.lora_name)
        await adapters.remove("poet")
    assert names[0] != names[1]


async def test_a_refusal_leaves_everything_as_it_was(tmp_path: Path) -> None:
    llm, adapters = engine()
    poet = adapter(tmp_path)
    llm.error = RuntimeError("Worker failed with error 'no'")
    with pytest.raises(ConfigError, match="Worker failed with error 'no'"):
        await adapters.add(poet)
    tensors = load_file(Path(poet.path) / "adapter_model.safetensors")
    write_adapter(Path(poet.path), {key.replace("layers.0", "layers.1"): value for key, value in tensors.items()})
    llm.error = None
    with pytest.raises(ConfigError, match="match no module"):
        await adapters.add(poet)
    assert await adapters.list() == ()
    write_adapter(Path(poet.path))
    await adapters.add(poet)
    assert await adapters.list() == (poet,)


def test_rows_without_an_adapter_get_nothing_of_any_slot() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, weights = torch.randn(4, 3, generator=generator), torch.randn(2, 1, 5, 3, generator=generator)
    indices = torch.tensor([-1, 1, 0, -1])
    expected = torch.stack([torch.zeros(5), weights[1, 0] @ inputs[1], weights[0, 0] @ inputs[2], torch.zeros(5)])

    shrunk = torch.zeros(4, 5)
    only_adapted_rows(bgmv_shrink)(inputs, weights, shrunk, indices, 2.0)
    torch.testing.assert_close(shrunk, 2 * expected)

    expanded = torch.ones(4, 5)
    only_adapted_rows(bgmv_expand)(inputs, weights, expanded, indices, add_inputs=True)
    torch.testing.assert_close(expanded, 1 + expected)

    sliced = torch.ones(4, 9)
    only_adapted_rows(bgmv_expand_slice)(inputs, weights, sliced, indices, 2, 5, True)
    torch.testing.assert_close(sliced, 1 + torch.nn.functional.pad(expected, (2, 2)))

    # The operators alone do give such rows the last slot's: what is corrected here.
    raw = torch.zeros(4, 5)
    bgmv_shrink(inputs, weights, raw, indices, 2.0)
    torch.testing.assert_close(raw[0], 2 * weights[1, 0] @ inputs[0])


def test_a_broken_adapter_in_the_last_slot_reaches_no_row_without_one() -> None:
    weights = torch.full((1, 1, 2, 2), torch.nan)
    output = torch.ones(2, 2)
    only_adapted_rows(bgmv_expand)(torch.ones(2, 2), weights, output, torch.tensor([-1, -1]))
    assert output.tolist() == [[1, 1], [1, 1]]

"""Every difference between trainer and engine is listed at once."""

from __future__ import annotations

import pytest

from rl_vllm.errors import WeightsMismatchError
from rl_vllm.types import TensorSpec
from rl_vllm.weights.check import check_specs

EXPECTED = (
    TensorSpec("model.embed_tokens.weight", "bfloat16", (8, 4)),
    TensorSpec("model.layers.0.up.weight", "bfloat16", (6, 4)),
    TensorSpec("model.norm.weight", "bfloat16", (4,)),
)


def problems(sent: tuple[TensorSpec, ...]) -> tuple[str, ...]:
    with pytest.raises(WeightsMismatchError) as caught:
        check_specs(sent, EXPECTED)
    return caught.value.problems


def test_the_same_tensors_in_another_order_and_floating_dtype_pass() -> None:
    check_specs(tuple(TensorSpec(spec.name, "float32", spec.shape) for spec in reversed(EXPECTED)), EXPECTED)


def test_all_differences_come_in_one_error() -> None:
    found = problems(
        (
            TensorSpec("model.layers.0.up.weight", "bfloat16", (6, 5)),
            TensorSpec("model.norm.weight", "int64", (4,)),
            TensorSpec("model.layers.0.rotary_emb.inv_freq", "float32", (2,)),
        )
    )
    assert [line.split(":")[0] for line in found] == [
        "model.embed_tokens.weight",
        "model.layers.0.rotary_emb.inv_freq",
        "model.layers.0.up.weight",
        "model.norm.weight",
    ]
    assert "missing" in found[0]
    assert "unexpected" in found[1]
    assert "[6, 5]" in found[2]
    assert "[6, 4]" in found[2]
    assert "int64" in found[3]


def test_a_head_the_engine_ties_is_explained() -> None:
    (found,) = problems((*EXPECTED, TensorSpec("lm_head.weight", "bfloat16", (8, 4))))
    assert "tie_word_embeddings" in found


def test_a_wrappers_prefix_is_named_first() -> None:
    found = problems(tuple(TensorSpec(f"model.{spec.name}", spec.dtype, spec.shape) for spec in EXPECTED))
    assert found[0].startswith("every name starts with 'model.'")
    assert len(found) == 1 + 3 + 3


def test_a_tensor_sent_twice_is_refused() -> None:
    assert problems((*EXPECTED, EXPECTED[0])) == ("model.embed_tokens.weight: sent twice",)

"""Tiny Hugging Face models, built from configs in a fraction of a second."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

SHAPE = {
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
}


def llama(*, tied: bool, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied)).to(dtype)


def moe() -> PreTrainedModel:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SHAPE, num_experts=3, num_experts_per_tok=1, moe_intermediate_size=4, tie_word_embeddings=False
        )
    )


def checkpoint_of(model: PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
    """What transformers itself would save."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.fixture
def tied_model() -> PreTrainedModel:
    return llama(tied=True)


@pytest.fixture
def untied_model() -> PreTrainedModel:
    return llama(tied=False)

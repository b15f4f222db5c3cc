from dataclasses import replace

import pytest

from rl_vllm.envs import PromptSet
from rl_vllm.policy import VLLMPolicy
from rl_vllm.testing import FakeScript, FakeService
from rl_vllm.testing.fake_service import FAKE_MODEL
from rl_vllm.testing.models import TINY_VOCAB_SIZE, tiny_tokenizer

ENTRIES = tuple({"question": f"{word}?", "answer": word} for word in ("red", "green", "blue", "white", "black"))


def exact(response, entry):
    return float(response == entry["answer"])


@pytest.fixture(scope="session")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture
def prompts():
    return PromptSet(ENTRIES, exact)


@pytest.fixture
def speaking(tokenizer):
    """A policy that says given texts: one for every row, or the rows' own, each closed by EOS."""

    def build(texts, *, input_mode="history", pad_output=False):
        def respond(request):
            text = texts if isinstance(texts, str) else texts[request.row]
            return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]

        info = replace(
            FAKE_MODEL, vocab_size=TINY_VOCAB_SIZE, max_model_len=512,
            eos_token_ids=(tokenizer.eos_token_id,), pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        service = FakeService(info=info, script=FakeScript(respond=respond))
        return VLLMPolicy(service, input_mode=input_mode, tokenizer=tokenizer, pad_output=pad_output)

    return build

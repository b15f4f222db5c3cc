from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_vllm.testing import fake_service
from rl_vllm.testing.fake_service import FAKE_MODEL, FakeScript, FakeService
from rl_vllm.testing.models import TINY_VOCAB_SIZE, build_tiny_model, tiny_tokenizer
from rl_vllm.types import ModelInfo

PAD = 0
EOS = 2


@pytest.fixture(scope="session")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def tiny_info(tokenizer) -> ModelInfo:
    return replace(
        FAKE_MODEL,
        vocab_size=TINY_VOCAB_SIZE,
        max_model_len=256,
        eos_token_ids=(tokenizer.eos_token_id,),
        pad_token_id=tokenizer.pad_token_id,
    )


@pytest.fixture(scope="session")
def hf_model(tmp_path_factory):
    path = build_tiny_model(tmp_path_factory.mktemp("tiny"))
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture
def hf_scored_service(hf_model, tiny_info) -> FakeService:
    """Its logprobs are the HF model's, computed one sequence at a time, without padding."""

    def score(prompt_T, response_T):
        ids = torch.from_numpy(np.concatenate([prompt_T, response_T]).astype(np.int64))[None]
        with torch.no_grad():
            logprobs = hf_model(ids).logits[0].log_softmax(-1)
        positions = torch.arange(len(prompt_T), ids.shape[1])
        return logprobs[positions - 1, ids[0, positions]].numpy()

    return FakeService(info=tiny_info, script=FakeScript(score=score))


def scripted(rows: dict[tuple[int, int], list[int]], **script) -> FakeService:
    """A fake whose response to sample ``s`` of row ``b`` is ``rows[b, s]``."""
    return FakeService(
        script=FakeScript(respond=lambda request: rows[request.row, request.sample], **script),
        info=fake_service.FAKE_MODEL,
    )

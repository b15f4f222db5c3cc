"""What holds for every batch: lengths, provenance, order, and padded equals ragged."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack
from torchrl.modules.llm.policies import Tokens

from rl_vllm.policy import PolicyOptions, VLLMPolicy
from rl_vllm.testing.fake_service import FakeScript, FakeService
from rl_vllm.types import BadPrompt

# Ids of padding, EOS and plain tokens alike, on both sides: masks must not care. 70 is outside the vocabulary.
IDS = st.integers(0, 8)
PROMPTS = st.lists(st.lists(st.one_of(IDS, IDS, IDS, st.just(70)), min_size=1, max_size=6), min_size=1, max_size=5)


@st.composite
def batches(draw):
    prompts = draw(PROMPTS)
    n = draw(st.integers(1, 3))
    responses = {
        (row, sample): draw(st.lists(IDS, min_size=1, max_size=6)) for row in range(len(prompts)) for sample in range(n)
    }
    return prompts, n, responses


def run(prompts, n, responses, *, pad_output):
    service = FakeService(
        script=FakeScript(respond=lambda request: responses[request.row, request.sample], next_version=(2, 5))
    )
    policy = VLLMPolicy(
        service, num_samples=n, pad_output=pad_output, options=PolicyOptions(on_bad_prompt=BadPrompt.MARK)
    )
    return policy(lazy_stack([TensorDict(tokens=Tokens(prompt=torch.tensor(row))) for row in prompts]))


@settings(deadline=None, max_examples=60)
@given(batches())
def test_every_token_is_where_it_came_from(batch):
    prompts, n, responses = batch
    out = run(prompts, n, responses, pad_output=False)
    for row, prompt in enumerate(prompts):
        for sample in range(n):
            got = out[row, sample]
            failed = 70 in prompt
            response = [] if failed else responses[row, sample]
            assert got["completion", "valid"].item() is not failed
            assert got["tokens", "prompt"].tolist() == prompt
            assert got["tokens", "response"].tolist() == response
            assert got["tokens", "full"].tolist() == prompt + response
            assert got["masks", "all_assistant_mask"].tolist() == [False] * len(prompt) + [True] * len(response)
            assert got["masks", "all_attention_mask"].all()
            versions = [0 if position < 2 else 5 for position in range(len(response))]
            assert got["policy_version"].tolist() == [-1] * len(prompt) + versions
            scores = np.array([-(1 + token % 7) / 8 for token in response], np.float32)
            np.testing.assert_array_equal(got["log_probs", "response"].numpy(), scores)
            np.testing.assert_array_equal(got["log_probs", "full"].numpy()[len(prompt) :], scores)
            assert got["log_probs", "full"][: len(prompt)].isnan().all()
            assert got["completion", "prompt_length"] == len(prompt)
            assert got["completion", "response_length"] == len(response)


PER_FULL_TOKEN = [
    ("tokens", "full"), ("log_probs", "full"), ("masks", "all_assistant_mask"), "policy_version",
]  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(batches())
def test_padded_and_ragged_output_say_the_same(batch):
    prompts, n, responses = batch
    padded = run(prompts, n, responses, pad_output=True)
    ragged = run(prompts, n, responses, pad_output=False)
    mask = padded["masks", "all_attention_mask"]
    width = max(map(len, prompts))
    assert padded["tokens", "full"].shape == (len(prompts), n, width + padded["tokens", "response"].shape[-1])
    for row, prompt in enumerate(prompts):
        for sample in range(n):
            real = mask[row, sample]
            for key in PER_FULL_TOKEN:
                expected = ragged[row, sample].get(key)
                torch.testing.assert_close(padded.get(key)[row, sample][real], expected, rtol=0, atol=0, equal_nan=True)
            # The prompt ends and the response begins at the same place in every row.
            assert real[width - len(prompt) : width].all()
            assert real.sum() == len(prompt) + ragged[row, sample]["tokens", "response"].numel()
    hidden = ~mask
    assert (padded["log_probs", "full"][hidden] == 0).all()
    assert (padded["policy_version"][hidden] == -1).all()
    assert not padded["masks", "all_assistant_mask"][hidden].any()

"""Scores of given sequences: against the HF model, in every layout, and in TorchRL's own KL transforms."""

import math

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, LogProbs, Masks, Tokens

from rl_vllm.policy import PolicyOptions, VLLMPolicy
from rl_vllm.testing.fake_service import FakeScript, FakeService

NAN = math.nan
# Padding in the middle of a row too: a chat of padded prompts and padded responses has it.
IDS = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 10, 0, 0], [11, 0, 12, 13, 0]])
REAL = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 1, 1, 0]]).bool()
CHATS = [
    [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}],
    [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "and you?"},
        {"role": "assistant", "content": "fine"},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "yes"},
    ],
]


@pytest.fixture
def hf_scores(hf_model):
    """Logprobs of one sequence by the HF model, NaN for the first token; float32 [T]."""

    def score(ids):
        tensor = torch.as_tensor(np.asarray(ids, np.int64))
        with torch.no_grad():
            logprobs = hf_model(tensor[None]).logits[0].log_softmax(-1)
        known = logprobs[:-1].gather(1, tensor[1:, None])[:, 0]
        return torch.cat([torch.tensor([NAN]), known])

    return score


@pytest.fixture
def service(tiny_info, hf_scores):
    return FakeService(
        info=tiny_info, script=FakeScript(score_prompt=lambda ids, version, replica: hf_scores(ids).numpy())
    )


def padded(ids=IDS, real=REAL):
    """Padded sequences with their mask."""
    shape = ids.shape[:-1]
    return TensorDict(
        tokens=Tokens(full=ids, batch_size=shape), masks=Masks(all_attention_mask=real, batch_size=shape),
        batch_size=shape,
    )  # fmt: skip


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_rows_without_padding(service, hf_scores):
    out = VLLMPolicy(service, generate=False, pad_output=False)(padded())
    rows = out.unbind(0)
    for row, ids in zip(rows, ([5, 6, 7], [8, 9, 10], [11, 12, 13]), strict=True):
        assert row["tokens", "full"].tolist() == ids
        assert row["masks", "all_attention_mask"].tolist() == [True] * 3
        assert_same(row["log_probs", "full"], hf_scores(ids))
        assert row["completion", "known"].tolist() == [False, True, True]
        assert row["tokens"].padded is False


RAGGED = [[5, 6, 7, 8], [9], [10, 11]]
FORMS = {
    "a lazy stack of rows": lambda: lazy_stack([TensorDict(tokens=Tokens(full=torch.tensor(r))) for r in RAGGED]),
    "a jagged tensor": lambda: TensorDict(
        tokens=Tokens(
            full=torch.nested.nested_tensor([torch.tensor(r) for r in RAGGED], layout=torch.jagged), batch_size=[3]
        ),
        batch_size=[3],
    ),
    "rows of other widths with masks": lambda: lazy_stack(
        [
            TensorDict(
                tokens=Tokens(full=torch.tensor([0] * row + ids)),
                masks=Masks(all_attention_mask=torch.tensor([False] * row + [True] * len(ids))),
            )
            for row, ids in enumerate(RAGGED)
        ]
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pad_output", [True, False])
def test_rows_of_different_lengths_are_padded_on_the_left_or_left_as_they_are(service, hf_scores, form, pad_output):
    policy = VLLMPolicy(
        service, generate=False, pad_output=pad_output, options=PolicyOptions(in_place=False, pad_token_id=3)
    )
    out = policy(FORMS[form]())
    for row, ids in enumerate(RAGGED):
        gap = 4 - len(ids) if pad_output else 0
        assert out[row]["tokens", "full"].tolist() == [3] * gap + ids
        assert out[row]["masks", "all_attention_mask"].tolist() == [False] * gap + [True] * len(ids)
        assert_same(out[row]["log_probs", "full"], torch.cat([torch.zeros(gap), hf_scores(ids)]))
        assert out[row]["completion", "known"].tolist() == [False] * (gap + 1) + [True] * (len(ids) - 1)


def test_a_lazy_stack_of_padded_rows_keeps_its_layout(service):
    rows = [
        TensorDict(tokens=Tokens(full=i), masks=Masks(all_attention_mask=m)) for i, m in zip(IDS, REAL, strict=True)
    ]
    out = VLLMPolicy(service, generate=False)(lazy_stack(rows))
    dense = VLLMPolicy(service, generate=False)(padded())
    assert torch.stack(out.get(("tokens", "full"), as_list=True)).tolist() == IDS.tolist()
    assert_same(torch.stack(out.get(("log_probs", "full"), as_list=True)), dense["log_probs", "full"])


def test_the_masks_of_whole_sequences_go_before_a_mask_of_prompts(service):
    td = padded()
    td["attention_mask"] = torch.ones(3, 5)
    VLLMPolicy(service, generate=False)(td)
    assert service.generate_calls[-1].prompts.lengths_B.tolist() == [3, 3, 3]
    alone = padded().exclude("masks")
    alone["attention_mask"] = REAL.int()
    VLLMPolicy(service, generate=False)(alone)
    assert service.generate_calls[-1].prompts.lengths_B.tolist() == [3, 3, 3]
    VLLMPolicy(service, generate=False)(padded().exclude("masks"))
    assert service.generate_calls[-1].prompts.lengths_B.tolist() == [5, 5, 5]


def test_what_was_sampled_scores_as_it_was_sampled(tiny_info, hf_scores):
    # One model behind both: the logprobs of the responses must agree, whichever way they were found.
    service = FakeService(
        info=tiny_info,
        script=FakeScript(
            score=lambda prompt, response: hf_scores(np.concatenate([prompt, response]))[len(prompt) :].numpy(),
            score_prompt=lambda ids, version, replica: hf_scores(ids).numpy(),
        ),
    )
    policy = VLLMPolicy(service, options=PolicyOptions(in_place=False))
    sampled = policy(lazy_stack([TensorDict(tokens=Tokens(prompt=torch.tensor(row))) for row in RAGGED]))
    scored = policy.get_new_version(generate=False)(sampled)
    assert scored["tokens", "full"].tolist() == sampled["tokens", "full"].tolist()
    assistant = sampled["masks", "all_assistant_mask"]
    assert_same(scored["log_probs", "full"][assistant], sampled["log_probs", "full"][assistant])
    assert scored["completion", "known"][assistant].all()


@pytest.mark.parametrize("shape", [(), (2, 1), (1, 2)])
@pytest.mark.parametrize("pad_output", [True, False])
def test_chats_in_batches_of_any_rank(service, tokenizer, pad_output, shape):
    rows = [TensorDict(history=ChatHistory(full=History.from_chats(chat))) for chat in CHATS]
    td = rows[0] if not shape else lazy_stack(rows).unsqueeze(shape.index(1))
    out = VLLMPolicy(service, generate=False, input_mode="history", tokenizer=tokenizer, pad_output=pad_output)(td)
    assert out.batch_size == shape
    rows = [out[position] for position in np.ndindex(*shape)] if shape else [out]
    said = [list(row["history"].full.content) for row in rows]
    assert said == [[message["content"] for message in chat] for chat in CHATS[: len(rows)]]
    for row in rows:
        assert row["completion", "known"].sum() == row["completion", "prompt_length"] - 1
        assert tokenizer.decode(row["tokens", "full"][row["masks", "all_attention_mask"]]) == row["text"].full


def test_a_group_that_is_renamed_leaves_the_sampled_logprobs_alone(service):
    td = padded()
    td["log_probs"] = LogProbs(full=torch.full((3, 5), -9.0), batch_size=[3])
    out = VLLMPolicy(service, generate=False).get_new_version(log_probs_key="ref_log_probs")(td)
    assert (out["log_probs", "full"] == -9.0).all()
    assert out["ref_log_probs", "full"].isfinite().sum() == 15 - 3

"""With generate=False every token of a given sequence gets its logprob, in the place where the token was."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, Tokens

from rl_vllm.errors import BadInputError, BadPromptError, ConfigError
from rl_vllm.policy import PolicyOptions, VLLMPolicy
from rl_vllm.testing import FakeScript, FakeService
from rl_vllm.types import BadPrompt

ROWS = [[104, 105, 7], [119, 104, 97, 116, 32], [103, 9]]
NAN = float("nan")


def hf_logprobs(model, ids):
    """The HF model's logprob of each id but the first, which is NaN; one sequence at a time, without padding."""
    with torch.no_grad():
        logprobs = model(torch.tensor(ids)[None]).logits[0].log_softmax(-1)
    scores = logprobs[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]
    return torch.cat([torch.tensor([NAN]), scores])


@pytest.fixture
def service(hf_model, tiny_info):
    def score_prompt(prompt_T, _version, _replica):
        return hf_logprobs(hf_model, prompt_T.tolist()).numpy()

    return FakeService(info=tiny_info, script=FakeScript(score_prompt=score_prompt))


def padded(side, fill=0):
    width = max(map(len, ROWS))
    ids = torch.full((len(ROWS), width), fill)
    mask = torch.zeros(len(ROWS), width, dtype=torch.bool)
    for index, row in enumerate(ROWS):
        place = slice(width - len(row), None) if side == "left" else slice(0, len(row))
        ids[index, place] = torch.tensor(row)
        mask[index, place] = True
    return ids, mask


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("mask_key", ["attention_mask", ("masks", "all_attention_mask")])
def test_padded_ids_keep_their_places_and_get_the_models_logprobs(service, hf_model, side, mask_key):
    ids, mask = padded(side)
    td = TensorDict({("tokens", "full"): ids, mask_key: mask}, batch_size=3)
    out = VLLMPolicy(service, generate=False)(td)
    assert out is td
    assert torch.equal(out["tokens", "full"], ids)
    assert torch.equal(out["masks", "all_attention_mask"], mask)
    assert out["log_probs", "full"].dtype == torch.float32
    assert (out["log_probs", "full"][~mask] == 0).all()
    for index, row in enumerate(ROWS):
        expected = hf_logprobs(hf_model, row)
        found = out["log_probs", "full"][index][mask[index]]
        torch.testing.assert_close(found, expected, equal_nan=True)
        assert out["completion", "known"][index][mask[index]].tolist() == [False] + [True] * (len(row) - 1)
    assert not out["completion", "known"][~mask].any()
    assert out["completion", "prompt_length"].tolist() == [3, 5, 2]
    assert out["completion", "valid"].all()
    assert out["tokens"].response is None
    assert out["log_probs"].response is None


def test_one_token_is_asked_of_the_engine_and_the_prompts_logprobs(service):
    ids, mask = padded("left")
    VLLMPolicy(service, generate=False)(TensorDict({("tokens", "full"): ids, "attention_mask": mask}, batch_size=3))
    (call,) = service.generate_calls
    assert (call.sampling.max_tokens, call.sampling.prompt_logprobs, call.sampling.n) == (1, 0, 1)
    assert [call.prompts.row(row).tolist() for row in range(3)] == ROWS


@pytest.mark.parametrize("pad_output", [True, False])
def test_ragged_ids_are_padded_on_the_left_or_stay_ragged(service, hf_model, pad_output):
    td = lazy_stack([TensorDict(tokens=Tokens(full=torch.tensor(row))) for row in ROWS])
    out = VLLMPolicy(service, generate=False, pad_output=pad_output)(td)
    for index, row in enumerate(ROWS):
        found = out[index]["log_probs", "full"]
        lead = (5 if pad_output else len(row)) - len(row)
        assert found.shape == (lead + len(row),)
        assert (found[:lead] == 0).all()
        torch.testing.assert_close(found[lead:], hf_logprobs(hf_model, row), equal_nan=True)
        assert out[index]["tokens", "full"][lead:].tolist() == row
        assert out[index]["masks", "all_attention_mask"].tolist() == [False] * lead + [True] * len(row)


@pytest.mark.parametrize("shape", [(), (2, 3), (2, 1, 2)])
def test_any_batch_shape_is_scored(service, hf_model, shape):
    ids = torch.tensor([104, 105, 7]).expand(*shape, 3).clone()
    out = VLLMPolicy(service, generate=False)(TensorDict({("tokens", "full"): ids}, batch_size=shape))
    expected = hf_logprobs(hf_model, [104, 105, 7]).expand(*shape, 3)
    torch.testing.assert_close(out["log_probs", "full"], expected, equal_nan=True)


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_an_empty_batch_asks_nothing_of_the_engine(service, shape):
    td = TensorDict({("tokens", "full"): torch.zeros(*shape, 4, dtype=torch.int64)}, batch_size=shape)
    out = VLLMPolicy(service, generate=False)(td)
    assert out["log_probs", "full"].shape == (*shape, 0)


def test_a_generated_batch_is_scored_where_it_stands(service, hf_model):
    td = TensorDict({("tokens", "prompt"): padded("left")[0], "attention_mask": padded("left")[1]}, batch_size=3)
    policy = VLLMPolicy(service, sampling={"max_tokens": 6})
    out = policy(td)
    full, mask = out["tokens", "full"].clone(), out["masks", "all_attention_mask"].clone()
    again = policy.get_new_version(generate=False)(out)
    assert torch.equal(again["tokens", "full"], full)
    assert torch.equal(again["masks", "all_attention_mask"], mask)
    for index in range(3):
        expected = hf_logprobs(hf_model, full[index][mask[index]].tolist())
        torch.testing.assert_close(again["log_probs", "full"][index][mask[index]], expected, equal_nan=True)


def test_text_is_scored_as_it_is_encoded(service, hf_model, tokenizer):
    texts = ["hi there", "what is it?"]
    td = TensorDict({("text", "full"): texts}, batch_size=2)
    out = VLLMPolicy(service, generate=False, input_mode="text", tokenizer=tokenizer, pad_output=False)(td)
    for index, text in enumerate(texts):
        ids = tokenizer(text)["input_ids"]
        assert out[index]["tokens", "full"].tolist() == ids
        torch.testing.assert_close(out[index]["log_probs", "full"], hf_logprobs(hf_model, ids), equal_nan=True)
        assert out[index]["text"].full == text


CHATS = [
    [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo there"}],
    [{"role": "user", "content": "what is it"}, {"role": "assistant", "content": "ok"}],
]


def chats_td():
    return TensorDict(history=ChatHistory(full=History.from_chats(CHATS), batch_size=2), batch_size=2)


@pytest.mark.parametrize("pad_output", [True, False])
def test_chats_are_scored_with_the_assistants_tokens_marked(service, hf_model, tokenizer, pad_output):
    policy = VLLMPolicy(
        service, generate=False, input_mode="history", tokenizer=tokenizer, pad_output=pad_output
    )  # fmt: skip
    out = policy(chats_td())
    for index, chat in enumerate(CHATS):
        row = out[index]
        real = row["masks", "all_attention_mask"]
        ids = tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]
        assert row["tokens", "full"][real].tolist() == ids
        spoken = row["tokens", "full"][row["masks", "all_assistant_mask"]].tolist()
        assert tokenizer.decode(spoken) == chat[1]["content"] + "<|im_end|>"
        torch.testing.assert_close(row["log_probs", "full"][real], hf_logprobs(hf_model, ids), equal_nan=True)
    assert out["history"].full[0].content == [message["content"] for message in CHATS[0]]


def test_unknown_logprobs_are_nan_with_a_mask_and_never_zero(tiny_info):
    def score_prompt(prompt_T, _version, _replica):
        values = np.full(len(prompt_T), -0.5, np.float32)
        values[2] = -np.inf
        return values

    service = FakeService(info=tiny_info, script=FakeScript(score_prompt=score_prompt))
    td = TensorDict({("tokens", "full"): torch.tensor([[5, 6, 7, 8]])}, batch_size=1)
    out = VLLMPolicy(service, generate=False)(td)
    torch.testing.assert_close(out["log_probs", "full"], torch.tensor([[NAN, -0.5, NAN, -0.5]]), equal_nan=True)
    assert out["completion", "known"].tolist() == [[False, True, False, True]]


def test_a_row_that_cannot_be_scored_is_refused_or_marked(service):
    td = TensorDict({("tokens", "full"): torch.ones(2, 256, dtype=torch.int64)}, batch_size=2)
    mask = torch.ones(2, 256, dtype=torch.bool)
    mask[1, 10:] = False
    td["attention_mask"] = mask
    with pytest.raises(BadPromptError, match="no room for a response token"):
        VLLMPolicy(service, generate=False)(td.clone())
    out = VLLMPolicy(service, generate=False, options=PolicyOptions(on_bad_prompt=BadPrompt.MARK))(td)
    assert out["completion", "valid"].tolist() == [False, True]
    assert out["log_probs", "full"][0].isnan().all()
    assert out["log_probs", "full"][1, 1:10].isfinite().all()


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"num_samples": 2}, "num_samples=2"),
        ({"sampling": {"temperature": 0.7}}, "temperature=0.7"),
        ({"sampling": {"temperature": 0.0}}, "temperature=0.0"),
        ({"sampling": {"repetition_penalty": 1.1}}, "repetition_penalty=1.1"),
        ({"sampling": {"logit_bias": {5: 1.0}}}, "logit_bias"),
        (
            {"sampling": {"top_k": 5}, "options": PolicyOptions(allow_truncated_sampling=True)},
            "top_k=5",
        ),
    ],
)
def test_settings_that_scoring_would_leave_out_are_refused(service, settings, match):
    with pytest.raises(ConfigError, match=match):
        VLLMPolicy(service, generate=False, **settings)


def test_an_engine_that_returns_logits_cannot_score(tiny_info):
    with pytest.raises(ConfigError, match="processed_logits"):
        VLLMPolicy(FakeService(info=replace(tiny_info, logprobs_mode="processed_logits")), generate=False)


def test_a_scorer_made_of_a_policy_with_samples_has_none(service):
    policy = VLLMPolicy(service, num_samples=4, sampling={"max_tokens": 3})
    scorer = policy.get_new_version(generate=False)
    assert (scorer.num_samples, scorer.sampling.n) == (None, 1)
    out = scorer(TensorDict({("tokens", "full"): torch.tensor([[104, 105, 7]])}, batch_size=1))
    assert out["log_probs", "full"].shape == (1, 3)


def test_a_call_takes_no_sampling_settings_and_needs_its_entry(service):
    policy = VLLMPolicy(service, generate=False)
    td = TensorDict({("tokens", "prompt"): torch.ones(1, 3, dtype=torch.int64)}, batch_size=1)
    with pytest.raises(ConfigError, match="max_tokens"):
        policy(td, max_tokens=3)
    with pytest.raises(BadInputError, match=r"tokens.*full"):
        policy(td)


def test_the_collectors_get_new_version_call_of_retrieve_kl_works(service, tokenizer):
    policy = VLLMPolicy(service, input_mode="history", tokenizer=tokenizer)
    scorer = policy.get_new_version(
        generate=False, return_log_probs=True, log_probs_key=("gen_log_probs",), input_mode="history",
        input_key=("history", "full"), pad_output=False,
    )  # fmt: skip
    assert (scorer.generate, scorer.pad_output, scorer.log_probs_key) == (False, False, "gen_log_probs")
    out = scorer(chats_td())
    assert isinstance(out, LazyStackedTensorDict)
    assert out[0]["gen_log_probs", "full"].isfinite().sum() > 3
    with pytest.raises(ConfigError, match="input_key"):
        policy.get_new_version(input_key="question")
    with pytest.raises(ConfigError, match="return_log_probs"):
        policy.get_new_version(return_log_probs=False)

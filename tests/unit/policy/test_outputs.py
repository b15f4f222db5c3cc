"""Hand-worked values of what the policy writes."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, LogProbs, Masks, Text, Tokens

from rl_vllm.errors import GenerationError, MissingLogprobError
from rl_vllm.policy import PolicyOptions, VLLMPolicy
from rl_vllm.testing.fake_service import FAKE_MODEL, FakeScript, FakeService
from rl_vllm.types import BadPrompt, CompletionBatch, FinishReason, PromptBatch, SamplingConfig

from .conftest import EOS, PAD, scripted

NAN = math.nan


def tokens_td(rows, **entries):
    """A lazy stack of unpadded prompts."""
    return lazy_stack([TensorDict(tokens=Tokens(prompt=torch.tensor(row)), **entries) for row in rows])


def assert_equal(actual, expected, dtype):
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=dtype), rtol=0, atol=0, equal_nan=True)


@pytest.fixture
def two_rows():
    # Logprobs are -(1 + id % 7) / 8: 8 -> -0.25, 9 -> -0.375, 2 -> -0.375, 0 -> -0.125.
    return scripted({(0, 0): [8, EOS], (1, 0): [9, PAD, 9]}, next_version=(1, 4))


def test_padded_rows_put_prompts_left_and_responses_right_of_one_line(two_rows):
    out = VLLMPolicy(two_rows)(tokens_td([[5, 6, 7], [4]]))
    assert isinstance(out.get("tokens"), Tokens)
    assert_equal(out["tokens", "prompt"], [[5, 6, 7], [PAD, PAD, 4]], torch.int64)
    assert_equal(out["tokens", "response"], [[8, EOS, PAD], [9, PAD, 9]], torch.int64)
    assert_equal(out["tokens", "full"], [[5, 6, 7, 8, EOS, PAD], [PAD, PAD, 4, 9, PAD, 9]], torch.int64)
    assert out["tokens"].padded is True


def test_a_sampled_pad_id_is_an_assistant_token_and_padding_is_not(two_rows):
    out = VLLMPolicy(two_rows)(tokens_td([[5, 6, 7], [4]]))
    assert isinstance(out.get("masks"), Masks)
    assert_equal(
        out["masks", "all_attention_mask"],
        [[True, True, True, True, True, False], [False, False, True, True, True, True]],
        torch.bool,
    )
    assert_equal(
        out["masks", "all_assistant_mask"],
        [[False, False, False, True, True, False], [False, False, False, True, True, True]],
        torch.bool,
    )


def test_the_terminating_eos_is_trained_when_padding_and_eos_share_an_id():
    service = FakeService(
        info=replace(FAKE_MODEL, pad_token_id=EOS), script=FakeScript(respond=lambda request: [6, EOS][request.row :])
    )
    out = VLLMPolicy(service)(tokens_td([[EOS, 5], [EOS]]))
    assert_equal(out["tokens", "full"], [[EOS, 5, 6, EOS], [EOS, EOS, EOS, EOS]], torch.int64)
    assert_equal(out["masks", "all_attention_mask"], [[True] * 4, [False, True, True, False]], torch.bool)
    assert_equal(
        out["masks", "all_assistant_mask"], [[False, False, True, True], [False, False, True, False]], torch.bool
    )
    assert_equal(out["log_probs", "response"], [[-0.875, -0.375], [-0.375, 0]], torch.float32)


def test_unknown_prompt_logprobs_are_nan_and_never_zero(two_rows):
    out = VLLMPolicy(two_rows)(tokens_td([[5, 6, 7], [4]]))
    assert isinstance(out.get("log_probs"), LogProbs)
    assert_equal(out["log_probs", "response"], [[-0.25, -0.375, 0], [-0.375, -0.125, -0.375]], torch.float32)
    assert_equal(
        out["log_probs", "full"],
        [[NAN, NAN, NAN, -0.25, -0.375, 0], [0, 0, NAN, -0.375, -0.125, -0.375]],
        torch.float32,
    )
    assert out["log_probs"].prompt is None


@pytest.mark.parametrize("pad_output", [True, False])
def test_prompt_logprobs_that_were_asked_for_are_written_with_nan_for_the_first_token(two_rows, pad_output):
    policy = VLLMPolicy(two_rows, sampling={"prompt_logprobs": True}, pad_output=pad_output)
    out = policy(tokens_td([[5, 6, 7], [4]]))
    rows = out.get(("log_probs", "prompt"), as_list=True)
    # 6 -> -(1 + 6) / 8, 7 -> -(1 + 0) / 8.
    assert_equal(rows[0], [NAN, -0.875, -0.125], torch.float32)
    assert_equal(rows[1], [0, 0, NAN] if pad_output else [NAN], torch.float32)
    full = out.get(("log_probs", "full"), as_list=True)
    assert_equal(full[0][:4], [NAN, -0.875, -0.125, -0.25], torch.float32)


def test_each_token_carries_the_version_that_sampled_it(two_rows):
    out = VLLMPolicy(two_rows)(tokens_td([[5, 6, 7], [4]]))
    assert_equal(out["policy_version"], [[-1, -1, -1, 0, 4, -1], [-1, -1, -1, 0, 4, 4]], torch.int64)


def test_facts_of_each_completion_stand_beside_its_tokens():
    service = scripted(
        {(0, 0): [8, EOS], (1, 0): [9, 9, 9], (2, 0): [7, 7]}, stops={2: "end"}, finish={1: FinishReason.LENGTH}
    )
    facts = VLLMPolicy(service)(tokens_td([[5, 6, 7, 8], [4], [3, 3]]))["completion"]
    assert facts["finish_reason"].tolist() == [FinishReason.STOP, FinishReason.LENGTH, FinishReason.STOP]
    assert list(facts["stop_reason"]) == [None, None, "end"]
    assert facts["prompt_length"].tolist() == [4, 1, 2]
    assert facts["response_length"].tolist() == [2, 3, 2]
    assert facts["cached_tokens"].tolist() == [2, 0, 1]
    assert_equal(facts["seconds"], [0.125, 0.25, 0.375], torch.float32)
    assert facts["valid"].tolist() == [True, True, True]
    assert facts["truncated"].tolist() == [False, True, False]
    assert facts[1]["logprobs_mode"] == "processed_logprobs"


def test_the_arrival_of_a_row_without_completion_is_unknown():
    service = FakeService(script=FakeScript(failures={0: "lost"}))
    facts = VLLMPolicy(service, options=PolicyOptions(on_bad_prompt=BadPrompt.MARK))(tokens_td([[5], [6]]))
    assert_equal(facts["completion", "seconds"], [NAN, 0.25], torch.float32)
    service.script = FakeScript(
        columns=replace(FakeService().generate_batch(PromptBatch.from_rows([[5]]), SamplingConfig()), seconds_N=None)
    )
    assert_equal(VLLMPolicy(service)(tokens_td([[5]]))["completion", "seconds"], [NAN], torch.float32)


def test_unpadded_rows_hold_the_same_values_without_padding(two_rows):
    out = VLLMPolicy(two_rows, pad_output=False)(tokens_td([[5, 6, 7], [4]]))
    first, second = out.unbind(0)
    assert first["tokens", "full"].tolist() == [5, 6, 7, 8, EOS]
    assert second["tokens", "full"].tolist() == [4, 9, PAD, 9]
    assert second["masks", "all_assistant_mask"].tolist() == [False, True, True, True]
    assert second["masks", "all_attention_mask"].tolist() == [True] * 4
    assert_equal(first["log_probs", "full"], [NAN, NAN, NAN, -0.25, -0.375], torch.float32)
    assert second["policy_version"].tolist() == [-1, 0, 4, 4]
    assert first["tokens"].padded is False
    assert first["completion", "response_length"] == 2


@pytest.mark.parametrize("pad_output", [True, False])
def test_samples_stand_on_an_axis_of_their_own_with_every_key(pad_output):
    service = scripted({(0, 0): [8], (0, 1): [9, 9], (1, 0): [7], (1, 1): [6, EOS]})
    out = VLLMPolicy(service, num_samples=2, pad_output=pad_output)(tokens_td([[5, 6], [4]]))
    assert out.batch_size == (2, 2)
    responses = [[out[b, s]["tokens", "response"].tolist() for s in range(2)] for b in range(2)]
    ragged = [[[8], [9, 9]], [[7], [6, EOS]]]
    assert responses == ([[[8, PAD], [9, 9]], [[7, PAD], [6, EOS]]] if pad_output else ragged)
    assert_equal(out[0, 1]["log_probs", "full"], [NAN, NAN, -0.375, -0.375], torch.float32)
    assert out[1, 1]["tokens", "prompt"].tolist() == ([PAD, 4] if pad_output else [4])
    assert out[1, 1]["policy_version"].tolist()[-2:] == [0, 0]
    assert out["completion", "response_length"].tolist() == [[1, 2], [1, 2]]


def test_one_requested_sample_still_has_its_axis():
    out = VLLMPolicy(scripted({(0, 0): [8]}), num_samples=1)(tokens_td([[5, 6]]))
    assert out["tokens", "full"].shape == (1, 1, 3)


@pytest.mark.parametrize("pad_output", [True, False])
def test_a_marked_row_is_invalid_and_its_siblings_are_whole(pad_output):
    service = scripted({(0, 0): [8], (2, 0): [9, 9]})
    policy = VLLMPolicy(service, pad_output=pad_output, options=PolicyOptions(on_bad_prompt=BadPrompt.MARK))
    out = policy(tokens_td([[5, 6], [63, 64], [4]]))
    assert out["completion", "valid"].tolist() == [True, False, True]
    assert out["completion", "finish_reason"].tolist()[1] == FinishReason.ERROR
    assert out["completion", "truncated"].tolist()[1] is False
    assert not out[1]["masks", "all_assistant_mask"].any()
    assert out[1]["tokens", "prompt"].tolist() == [63, 64]
    assert out[2]["tokens", "response"].tolist() == [9, 9]


def test_a_sample_the_service_lost_is_an_error_that_names_the_row():
    empty = FakeService(script=FakeScript(columns=CompletionBatch.empty()))
    with pytest.raises(GenerationError, match="prompt 0: the service returned neither sample 0"):
        VLLMPolicy(empty)(tokens_td([[5]]))


def test_completions_in_any_order_reach_their_own_rows_and_a_double_one_is_an_error():
    td = tokens_td([[5], [6]])
    service = scripted({(0, 0): [8], (1, 0): [9, 9]})
    VLLMPolicy(service)(td)
    call = service.generate_calls[0]
    batch = service.generate_batch(call.prompts, call.sampling)
    shuffled = FakeService(script=FakeScript(columns=batch.take(np.array([1, 0]))))
    assert VLLMPolicy(shuffled)(td)["tokens", "response"].tolist() == [[8, PAD], [9, 9]]
    doubled = FakeService(script=FakeScript(columns=batch.take(np.array([0, 1, 1]))))
    with pytest.raises(GenerationError, match="prompt 1: the service returned sample 0 twice"):
        VLLMPolicy(doubled)(td)


def test_a_nan_logprob_is_an_error_that_names_request_position_and_version():
    service = scripted({(0, 0): [8], (1, 0): [9, 9]}, score=lambda prompt, ids: np.where(ids == 9, NAN, -1.0))
    with pytest.raises(MissingLogprobError) as raised:
        VLLMPolicy(service)(tokens_td([[5], [6]]))
    assert (raised.value.request, raised.value.position, raised.value.version) == (1, 0, 0)


def test_text_says_what_the_tokens_say(tiny_info, tokenizer):
    service = FakeService(
        info=tiny_info, script=FakeScript(respond=lambda r: [ord("o"), ord("k"), tokenizer.eos_token_id])
    )
    td = TensorDict(text=Text(prompt=["hi", "say ok"], batch_size=[2]), batch_size=[2])
    out = VLLMPolicy(service, input_mode="text", tokenizer=tokenizer)(td)
    assert list(out["text"].prompt) == ["hi", "say ok"]
    assert list(out["text"].response) == ["ok<|im_end|>"] * 2
    assert list(out["text"].full) == ["hiok<|im_end|>", "say okok<|im_end|>"]
    assert out[0]["tokens", "response"].tolist() == [ord("o"), ord("k"), tokenizer.eos_token_id]
    assert out[0]["masks", "all_assistant_mask"].sum() == 3
    quiet = VLLMPolicy(service, input_mode="text", tokenizer=tokenizer, sampling=SamplingConfig())(td)
    assert list(quiet["text"].response) == ["ok"] * 2


def test_a_tokenizer_adds_text_in_tokens_mode(tiny_info, tokenizer):
    service = FakeService(info=tiny_info, script=FakeScript(respond=lambda request: [ord("x")]))
    out = VLLMPolicy(service, tokenizer=tokenizer)(tokens_td([[ord("a"), ord("b")], [ord("c")]]))
    assert list(out["text"].full) == ["abx", "cx"]
    assert "text" not in VLLMPolicy(service).out_keys


CHATS = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "be brief"}, {"role": "user", "content": "and you?"}],
]


@pytest.mark.parametrize("pad_output", [True, False])
def test_a_chat_is_rendered_once_and_answered_by_one_assistant_message(tiny_info, tokenizer, pad_output):
    service = FakeService(
        info=tiny_info, script=FakeScript(respond=lambda r: [ord("o"), ord("k"), tokenizer.eos_token_id])
    )
    td = TensorDict(history=ChatHistory(prompt=History.from_chats(CHATS), batch_size=[2]), batch_size=[2])
    out = VLLMPolicy(service, input_mode="history", tokenizer=tokenizer, pad_output=pad_output)(td)
    for row, chat in enumerate(CHATS):
        rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        assert service.generate_calls[0].prompts.row(row).tolist() == ids
        assert out[row]["tokens", "prompt"][-len(ids) :].tolist() == ids
        assert out[row]["text"].prompt == rendered
        full = out[row]["history"].full
        assert list(full.role) == [message["role"] for message in chat] + ["assistant"]
        assert list(full.content) == [message["content"] for message in chat] + ["ok"]
        assert list(out[row]["history"].response.content) == ["ok"]
        assert out[row]["history"].response.batch_size == (1,)
        # The next turn of the same chat holds exactly the sampled ids after the prompt.
        again = tokenizer.apply_chat_template(
            [*chat, {"role": "assistant", "content": "ok"}], add_generation_prompt=False, tokenize=False
        )
        assert again == out[row]["text"].full + "\n"


@pytest.mark.parametrize(
    ("ids", "script", "content"),
    [
        ("ok", {}, "ok"),
        ("ok\x00", {"stops": {0: 0}}, "ok"),
        ("ok.", {"stops": {0: "."}}, "ok."),
        ("", {}, ""),
    ],
    ids=["by length", "at a stop id", "at a stop string", "at once"],
)
def test_only_the_token_that_ended_the_turn_is_left_out_of_the_message(tiny_info, tokenizer, ids, script, content):
    closing = [] if script or ids else [tokenizer.eos_token_id]
    service = FakeService(info=tiny_info, script=FakeScript(respond=lambda r: [*ids.encode(), *closing], **script))
    td = TensorDict(history=ChatHistory(prompt=History.from_chats(CHATS[:1]), batch_size=[1]), batch_size=[1])
    out = VLLMPolicy(service, input_mode="history", tokenizer=tokenizer)(td)
    assert list(out[0]["history"].response.content) == [content]
    assert out[0]["tokens", "response"].tolist() == [*ids.encode(), *closing]


def test_alternatives_that_were_asked_for_stand_with_the_completion():
    policy = VLLMPolicy(scripted({(0, 0): [8], (1, 0): [9, 9]}), sampling={"logprobs": 1})
    out = policy(tokens_td([[5], [6]]))
    assert out[0]["completion", "top_logprobs"] == ({8: -0.25},)
    assert out[1]["completion", "top_logprobs"] == ({9: -0.375}, {9: -0.375})


def test_the_policy_is_a_tensordict_module_with_true_keys(two_rows):
    policy = VLLMPolicy(two_rows)
    assert policy.in_keys == [("tokens", "prompt")]
    td = TensorDict(tokens=Tokens(prompt=torch.tensor([[5, 6], [7, 8]]), batch_size=[2]), batch_size=[2])
    assert set(policy(td).keys()) == set(policy.out_keys)
    length = TensorDictModule(torch.Tensor.float, in_keys=[("completion", "response_length")], out_keys=["length"])
    assert TensorDictSequential(policy, length)(td.select(("tokens", "prompt")))["length"].tolist() == [2.0, 3.0]
    assert set(policy.select_out_keys("tokens")(td.select(("tokens", "prompt"))).keys()) == {"tokens"}


def test_samples_of_a_chat_share_the_prompt_and_keep_their_answers(tiny_info, tokenizer):
    service = FakeService(info=tiny_info, script=FakeScript(respond=lambda r: [ord("a") + r.sample]))
    td = TensorDict(history=ChatHistory(prompt=History.from_chats(CHATS), batch_size=[2]), batch_size=[2])
    out = VLLMPolicy(service, input_mode="history", tokenizer=tokenizer, num_samples=2)(td)
    assert out["history"].batch_size == (2, 2)
    assert [list(out[1, s]["history"].full.content) for s in range(2)] == [
        ["be brief", "and you?", "a"],
        ["be brief", "and you?", "b"],
    ]

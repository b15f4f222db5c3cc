"""The forms in which prompts may come, and what is refused."""

import logging

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, Masks, Text, Tokens

from rl_vllm.errors import BadInputError, BadPromptError, ConfigError, GenerationError
from rl_vllm.policy import PolicyOptions, VLLMPolicy
from rl_vllm.testing.fake_service import FakeScript, FakeService
from rl_vllm.types import BadPrompt

LEFT = torch.tensor([[0, 5, 6], [7, 8, 9]])
RIGHT = torch.tensor([[5, 6, 0], [7, 8, 9]])
ROWS = [[5, 6], [7, 8, 9]]


def dense(prompt, batch_size=(2,), **entries):
    return TensorDict(tokens=Tokens(prompt=prompt, batch_size=batch_size), batch_size=batch_size, **entries)


def listed(rows, count=2):
    return NonTensorData(rows, batch_size=[count])


def sent(service):
    prompts = service.generate_calls[-1].prompts
    return [prompts.row(row).tolist() for row in range(len(prompts))]


FORMS = {
    "left-padded with a mask": lambda: dense(LEFT, attention_mask=torch.tensor([[0, 1, 1], [1, 1, 1]])),
    "right-padded with a mask": lambda: dense(RIGHT, attention_mask=RIGHT != 0),
    "left-padded with a float mask": lambda: dense(LEFT, attention_mask=torch.tensor([[0.0, 1, 1], [1, 1, 1]])),
    "masked under TorchRL's key": lambda: dense(LEFT, masks=Masks(all_attention_mask=LEFT != 0, batch_size=[2])),
    "jagged": lambda: dense(torch.nested.nested_tensor([torch.tensor(r) for r in ROWS], layout=torch.jagged)),
    "a list of tensors": lambda: dense(listed([torch.tensor(row) for row in ROWS])),
    "a list of lists": lambda: dense(listed(ROWS)),
    "a stack of lists": lambda: dense(NonTensorStack(*[NonTensorData(row) for row in ROWS])),
    "a lazy stack of rows": lambda: lazy_stack([TensorDict(tokens=Tokens(prompt=torch.tensor(r))) for r in ROWS]),
    "a plain nested tensordict": lambda: lazy_stack([TensorDict(tokens={"prompt": torch.tensor(r)}) for r in ROWS]),
    "a lazy stack of padded rows with masks": lambda: lazy_stack(
        [TensorDict(tokens=Tokens(prompt=row), attention_mask=row != 0) for row in LEFT]
    ),
    "int32": lambda: dense(LEFT.int(), attention_mask=LEFT != 0),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_prompt_reaches_the_service_as_the_same_ids(form):
    service = FakeService()
    out = VLLMPolicy(service)(FORMS[form]())
    assert sent(service) == ROWS
    assert out["tokens", "prompt"].tolist() == [[0, 5, 6], [7, 8, 9]]
    assert out["tokens", "prompt"].dtype == torch.int64


def test_without_a_mask_no_id_is_taken_for_padding():
    service = FakeService()
    VLLMPolicy(service)(dense(torch.tensor([[0, 5], [6, 0]])))
    assert sent(service) == [[0, 5], [6, 0]]


def test_a_mask_of_the_whole_sequence_is_not_taken_for_the_prompts():
    # As after a step: masks describe the full sequence that stands beside the prompt.
    td = dense(LEFT, masks=Masks(all_attention_mask=LEFT != 7, batch_size=[2]))
    td["tokens"].full = LEFT
    service = FakeService()
    VLLMPolicy(service)(td)
    assert sent(service) == LEFT.tolist()


def test_a_left_over_mask_that_hides_real_ids_is_ignored():
    td = dense(LEFT, masks=Masks(all_attention_mask=(LEFT != 7) & (LEFT != 5), batch_size=[2]))
    service = FakeService()
    VLLMPolicy(service)(td)
    assert sent(service) == LEFT.tolist()


@pytest.mark.parametrize("pad_output", [True, False])
@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("shape", [(), (2,), (2, 3), (2, 1, 2)])
@pytest.mark.parametrize("num_samples", [None, 2])
def test_any_batch_shape_is_kept_and_rows_stay_in_order(shape, lazy, pad_output, num_samples):
    service = FakeService(script=FakeScript(respond=lambda request: [int(request.prompt_T[0]), 3 + request.sample]))
    count = torch.Size(shape).numel()
    ids = torch.arange(3, 3 + count).reshape(shape).unsqueeze(-1)
    td = dense(ids, shape)
    if lazy and shape:
        td = td.to_lazystack(0)
    out = VLLMPolicy(service, pad_output=pad_output, num_samples=num_samples)(td)
    expected = shape if num_samples is None else (*shape, num_samples)
    assert tuple(out.batch_size) == expected
    first = out["tokens", "response"][..., 0]
    wanted = ids.squeeze(-1) if num_samples is None else ids.expand(*shape, num_samples)
    assert first.tolist() == wanted.tolist()
    assert out["completion", "valid"].all()


@pytest.mark.parametrize("pad_output", [True, False])
@pytest.mark.parametrize("num_samples", [None, 4])
@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_an_empty_batch_comes_back_empty_with_its_keys(shape, num_samples, pad_output):
    policy = VLLMPolicy(FakeService(), pad_output=pad_output, num_samples=num_samples)
    out = policy(dense(torch.zeros(*shape, 5, dtype=torch.int64), shape))
    assert tuple(out.batch_size) == (shape if num_samples is None else (*shape, num_samples))
    assert out["tokens", "full"].numel() == 0
    assert set(policy.out_keys) <= set(out.keys())


def test_an_empty_lazy_stack_comes_back_empty():
    out = VLLMPolicy(FakeService())(lazy_stack([TensorDict(tokens=Tokens(prompt=torch.tensor([1])))])[:0])
    assert out.batch_size == (0,)


def test_without_samples_the_results_are_written_into_the_given_tensordict():
    td = dense(LEFT, query=NonTensorStack("a", "b"))
    out = VLLMPolicy(FakeService())(td)
    assert out is td
    assert list(td["query"]) == ["a", "b"]
    assert "policy_version" in td


def test_a_dense_batch_is_returned_as_a_lazy_stack_when_the_output_is_ragged():
    td = dense(LEFT, query=NonTensorStack("a", "b"))
    out = VLLMPolicy(FakeService(), pad_output=False)(td)
    assert list(out["query"]) == ["a", "b"]
    assert "policy_version" not in td
    assert out[0]["tokens", "full"].ndim == 1


def test_in_place_can_be_switched_off_and_another_target_named():
    td, target = dense(LEFT), TensorDict(batch_size=[2])
    out = VLLMPolicy(FakeService(), options=PolicyOptions(in_place=False))(td)
    assert out is not td
    assert "policy_version" not in td
    assert VLLMPolicy(FakeService())(td, tensordict_out=target) is target
    assert "tokens" in target


def test_a_group_that_was_there_is_replaced_and_not_mixed():
    td = dense(LEFT, log_probs={"prompt": torch.zeros(2, 3), "other": torch.zeros(2, 3)})
    VLLMPolicy(FakeService())(td)
    assert td["log_probs"].prompt is None
    assert ("log_probs", "other") not in td.keys(include_nested=True)


def test_the_device_of_the_batch_is_kept():
    td = dense(LEFT).to("cpu")
    assert VLLMPolicy(FakeService(), options=PolicyOptions(in_place=False))(td)["tokens", "full"].device.type == "cpu"
    assert not torch.is_inference_mode_enabled()
    assert not VLLMPolicy(FakeService())(td)["log_probs", "full"].requires_grad


REFUSED = {
    "float ids": (dense(LEFT.float()), BadInputError, "dtype torch.float32.*integers"),
    "boolean ids": (dense(LEFT.bool()), BadInputError, "dtype torch.bool"),
    "no prompts": (TensorDict({"a": torch.zeros(2)}, [2]), BadInputError, r"no \('tokens', 'prompt'\).*it has: a"),
    "no axis of tokens": (dense(torch.zeros(2, dtype=torch.int64)), BadInputError, r"\[\*batch, L\].*\(2,\)"),
    "an axis too many": (dense(torch.zeros(2, 3, 4, dtype=torch.int64)), BadInputError, r"\[\*batch, L\]"),
    "a mask of another shape": (
        dense(LEFT, attention_mask=torch.ones(2, 2)), BadInputError, r"prompts' shape \(2, 3\), got \(2, 2\)",
    ),
    "an additive mask": (
        dense(LEFT, attention_mask=torch.where(LEFT == 0, -1e9, 0.0)),
        BadInputError, r"attention_mask must be 1 .* holds -1000000000.0: .* give mask == 0",
    ),
    "a mask of NaN": (dense(LEFT, attention_mask=LEFT / LEFT), BadInputError, "attention_mask must be 1 .* holds nan"),
    "a mask of segments": (dense(LEFT, attention_mask=LEFT.clamp(max=6)), BadInputError, "attention_mask .* holds 5"),
    "an additive mask under TorchRL's key": (
        dense(LEFT, masks=Masks(all_attention_mask=torch.where(LEFT == 0, -1e9, 0.0), batch_size=[2])),
        BadInputError, r"'masks', 'all_attention_mask'\) must be 1",
    ),
    "prompts without a position": (dense(torch.zeros(2, 0, dtype=torch.int64)), BadPromptError, "prompt 0: it has no"),
    "prompts and a mask without a position": (
        dense(torch.zeros(2, 0, dtype=torch.int64), attention_mask=torch.ones(2, 0)), BadPromptError, "no tokens",
    ),
    "a dict": ({"tokens": {"prompt": LEFT}}, BadInputError, "must be a tensordict, got dict: .*TensorDict"),
    "a tensor": (LEFT, BadInputError, "must be a tensordict, got Tensor"),
    "a row of strings": (dense(listed([["a"], [1]])), BadInputError, "row 0 is no sequence of token ids"),
    "too few rows": (dense(listed([[1, 2]])), BadInputError, "each of 2 prompts, got 1 rows"),
    "only padding": (dense(LEFT, attention_mask=LEFT > 9), BadPromptError, "prompt 0: it has no tokens.*padding"),
    "an empty row": (dense(listed([[], [1]])), BadPromptError, "prompt 0: it has no tokens"),
    "a negative id": (dense(torch.tensor([[1, 2], [3, -1]])), BadPromptError, "prompt 1: token id -1 is negative"),
    "an id out of the vocabulary": (dense(torch.tensor([[1, 2], [3, 64]])), BadPromptError, "prompt 1: token id 64"),
    "an id that wraps in int32": (dense(torch.tensor([[1, 2], [3, 2**32 + 5]])), BadPromptError, "prompt 1: token id"),
    "a prompt as long as the context": (dense(torch.ones(2, 64, dtype=torch.int64)), BadPromptError, "64 tokens"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_prompts_are_refused_with_the_entry_the_value_and_the_remedy(case):
    td, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        VLLMPolicy(FakeService())(td)


def test_with_marking_only_the_bad_rows_fail_and_the_count_is_logged(caplog):
    policy = VLLMPolicy(FakeService(), options=PolicyOptions(on_bad_prompt=BadPrompt.MARK))
    with caplog.at_level(logging.WARNING, logger="rl_vllm"):
        out = policy(dense(listed([[], [1, -1], [5], [6, 2**40]], 4), (4,)))
    assert out["completion", "valid"].tolist() == [False, False, True, False]
    assert "3 of 4 prompts got no completion; first, prompt 0" in caplog.text


@pytest.mark.parametrize("pad_output", [True, False])
@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_prompts_without_a_position_are_marked_row_by_row(shape, pad_output):
    policy = VLLMPolicy(FakeService(), pad_output=pad_output, options=PolicyOptions(on_bad_prompt=BadPrompt.MARK))
    out = policy(dense(torch.zeros(*shape, 0, dtype=torch.int64), shape))
    assert out["completion", "valid"].tolist() == torch.zeros(shape, dtype=torch.bool).tolist()
    assert out["tokens", "full"].numel() == 0


def test_a_target_that_is_no_tensordict_is_refused_before_anything_is_sent():
    service = FakeService()
    with pytest.raises(BadInputError, match="tensordict_out must be a tensordict, got dict"):
        VLLMPolicy(service)(dense(LEFT), tensordict_out={})
    assert service.generate_calls == []


def test_a_failure_of_the_service_is_raised_unless_rows_are_marked():
    service = FakeService(script=FakeScript(failures={1: "the engine said no"}))
    with pytest.raises(GenerationError, match="prompt 1: the engine said no"):
        VLLMPolicy(service)(dense(LEFT))


def test_text_may_be_one_string_or_many_and_nothing_else(tiny_info, tokenizer):
    service = FakeService(info=tiny_info)
    policy = VLLMPolicy(service, input_mode="text", tokenizer=tokenizer)
    assert isinstance(policy(TensorDict(text=Text(prompt="hello")))["text"].response, str)
    assert sent(service) == [tokenizer("hello")["input_ids"]]
    policy(TensorDict(text=Text(prompt=NonTensorStack("ab", "c"), batch_size=[2]), batch_size=[2]))
    assert sent(service) == [tokenizer("ab")["input_ids"], tokenizer("c")["input_ids"]]
    nested = NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c", "d"))
    policy(TensorDict(text=Text(prompt=nested, batch_size=[2, 2]), batch_size=[2, 2]))
    assert sent(service) == [[ord(letter)] for letter in "abcd"]
    with pytest.raises(BadInputError, match="row 1 must be a string, got 7"):
        policy(TensorDict(text=Text(prompt=NonTensorStack("a", 7), batch_size=[2]), batch_size=[2]))
    with pytest.raises(BadPromptError, match="prompt 0: it has no tokens"):
        policy(TensorDict(text=Text(prompt="")))


def test_a_rendered_text_does_not_get_a_second_bos(tiny_info, tokenizer):
    class WithBos:
        """A tokenizer that writes BOS, and reads it as one id."""

        bos_token_id = 1

        def __call__(self, texts, *, add_special_tokens, **kwargs):
            ids = [[1] * text.count("<s>") + [ord(letter) for letter in text.replace("<s>", "")] for text in texts]
            return {"input_ids": [[1, *row] if add_special_tokens else row for row in ids]}

        def batch_decode(self, rows, **kwargs):
            return ["" for _ in rows]

    service = FakeService(info=tiny_info)
    policy = VLLMPolicy(service, input_mode="text", tokenizer=WithBos())
    policy(TensorDict(text=Text(prompt=NonTensorStack("<s>a", "a"), batch_size=[2]), batch_size=[2]))
    assert sent(service) == [[1, ord("a")], [1, ord("a")]]


def test_a_chat_may_stand_alone_or_in_any_batch_shape(tiny_info, tokenizer):
    service = FakeService(info=tiny_info)
    policy = VLLMPolicy(service, input_mode="history", tokenizer=tokenizer)
    chat = [{"role": "user", "content": "hi"}]
    alone = policy(TensorDict(history=ChatHistory(prompt=History.from_chats([chat])[0])))
    assert alone.batch_size == ()
    assert alone["history"].full.batch_size == (2,)
    rows = [ChatHistory(prompt=History.from_chats([chat])[0]) for _ in range(4)]
    square = lazy_stack([lazy_stack([TensorDict(history=row) for row in rows[i : i + 2]]) for i in (0, 2)])
    assert policy(square)["history"].full.batch_size == (2, 2, 2)
    with pytest.raises(BadInputError, match=r"no \('history', 'prompt'\)"):
        policy(TensorDict(history=ChatHistory(full=History.from_chats([chat])[0])))


def test_text_and_chats_need_a_tokenizer():
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        VLLMPolicy(FakeService(), input_mode="text")


def test_a_tokenizer_that_cannot_be_loaded_is_refused_with_its_path(tmp_path):
    for path in ("/nope", str(tmp_path), tmp_path):
        with pytest.raises(ConfigError, match=f"no tokenizer could be loaded from '{path}'"):
            VLLMPolicy(FakeService(), tokenizer=path)


def test_an_unknown_input_mode_is_refused():
    with pytest.raises(ConfigError, match="tokens, text, history, got 'chat'"):
        VLLMPolicy(FakeService(), input_mode="chat")

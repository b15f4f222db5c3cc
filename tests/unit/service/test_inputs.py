"""Every form in which a caller may give prompts."""

import numpy as np
import pytest
import torch

from rl_vllm.errors import BadInputError, BadPromptError
from rl_vllm.service.inputs import InputPreprocessor, parse_prompts
from rl_vllm.testing.answers import FAKE_MODEL
from rl_vllm.types import BadPrompt


class BytesTokenizer:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def parse(given=None, ids=None, tokenizer=None):
    parsed = parse_prompts(given, ids, tokenizer)
    return [parsed.batch.row(row).tolist() for row in range(len(parsed.batch))], parsed.texts, parsed.single


@pytest.mark.parametrize(
    "prompt",
    [
        [5, 6, 7],
        (5, 6, 7),
        range(5, 8),
        {"prompt_token_ids": [5, 6, 7]},
        {"prompt_token_ids": np.array([5, 6, 7])},
        {"prompt": [5, 6, 7]},
        np.array([5, 6, 7]),
        torch.tensor([5, 6, 7]),
        list(np.array([5, 6, 7], np.int32)),
    ],
    ids=lambda prompt: f"{type(prompt).__name__}-{prompt}",
)
def test_ids_in_any_container_are_one_prompt(prompt):
    assert parse(prompt) == ([[5, 6, 7]], (None,), True)
    assert parse(ids=prompt) == ([[5, 6, 7]], (None,), True)
    assert parse([prompt]) == ([[5, 6, 7]], (None,), False)


@pytest.mark.parametrize(
    "many",
    [
        [[5, 6], [7, 8]],
        np.array([[5, 6], [7, 8]]),
        torch.tensor([[5, 6], [7, 8]]),
        ([5, 6], (7, 8)),
        [torch.tensor([5, 6]), np.array([7, 8])],
        iter([[5, 6], [7, 8]]),
    ],
    ids=["lists", "numpy", "torch", "tuple", "mixed arrays", "iterator"],
)
def test_many_prompts_of_ids(many):
    assert parse(many) == ([[5, 6], [7, 8]], (None, None), False)


def test_a_string_is_one_prompt_and_keeps_its_text():
    assert parse("ab", tokenizer=BytesTokenizer()) == ([[97, 98]], ("ab",), True)
    assert parse({"prompt": "ab"}, tokenizer=BytesTokenizer()) == ([[97, 98]], ("ab",), True)


def test_forms_may_be_mixed_in_one_list():
    given = ["ab", [5], {"prompt_token_ids": [6], "prompt": "six"}, {"prompt": "c"}, np.array([7])]
    assert parse(given, tokenizer=BytesTokenizer()) == (
        [[97, 98], [5], [6], [99], [7]],
        ("ab", None, "six", "c", None),
        False,
    )


def test_an_empty_list_is_an_empty_batch_and_an_empty_row_is_a_prompt():
    assert parse([]) == ([], (), False)
    assert parse([[]]) == ([[]], (None,), False)
    assert parse(np.zeros(0, np.int64)) == ([[]], (None,), True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([True, False], r"prompt 0: it holds True \(bool\)"),
        ([[5, True]], r"prompt 0: it holds True \(bool\)"),
        ([[5], [6.0]], r"prompt 1: it holds 6.0 \(float\)"),
        ([6.0, 7.0], r"prompt 0: it holds 6.0 \(float\)"),
        (np.array([1.5, 2.5]), r"prompt 0: it holds 1.5 \(float\)"),
        (np.array([True]), r"prompt 0: it holds True \(bool\)"),
        (torch.tensor([True]), r"prompt 0: it holds True \(bool\)"),
        (torch.tensor([[1.0]]), r"prompt 0: it holds 1.0 \(float\)"),
        ([[5, None]], r"prompt 0: it holds None \(NoneType\)"),
        ([[5, [6]]], r"prompt 0: it holds \[6\] \(list\)"),
        ([["5"]], r"prompt 0: it holds '5' \(str\)"),
        ([5, "a"], "prompt 0: it must be text or a list of token ids, got int"),
        ([None], "prompt 0: it must be .* got NoneType"),
        ([b"ab"], "prompt 0: it must be .* got bytes"),
        (np.zeros((1, 2, 2), np.int64), "prompt 0: it must be .* got ndarray"),
        (torch.tensor(5), "prompt 0: it must be .* got Tensor"),
        ({"prompt_embeds": 1}, r"without 'prompt' or 'prompt_token_ids': \['prompt_embeds'\]"),
        ({"prompt": None}, "prompt 0: it must be .* got NoneType"),
        ([[2**40]], "does not fit 32 bits: 1099511627776"),
        ([[-(2**31) - 1]], "does not fit 32 bits"),
        (["a"], "prompt 0: it is text, but this service has no tokenizer"),
    ],
    ids=str,
)
def test_what_is_no_prompt_is_named_with_its_place(given, message):
    with pytest.raises(BadPromptError, match=message):
        parse(given)


@pytest.mark.parametrize(("given", "kind"), [(5, "int"), (None, "none")], ids=str)
def test_what_is_no_list_of_prompts_either_is_refused_as_a_whole(given, kind):
    with pytest.raises(BadInputError, match=kind):
        parse(given)


def test_marked_rows_that_are_no_prompts_leave_their_siblings_alone():
    parsed = parse_prompts([[5, 6], [7.5], None, [8]], None, None, on_bad_prompt=BadPrompt.MARK)
    assert [parsed.batch.row(row).tolist() for row in range(4)] == [[5, 6], [], [], [8]]
    assert sorted(parsed.bad) == [1, 2]
    assert "7.5 (float)" in parsed.bad[1]
    assert not parsed.single


def test_ids_may_be_scalar_tensors():
    assert parse([torch.tensor(5), torch.tensor(6)]) == ([[5, 6]], (None,), True)


def test_a_text_that_cannot_fit_is_not_encoded():
    class NeverTokenizer:
        def encode(self, text: str) -> list[int]:
            raise AssertionError("it would take seconds")

    ten_megabytes = "a" * 10_000_000
    with pytest.raises(
        BadPromptError, match="it has 10000000 characters, more than 512 for each token of max_model_len=64"
    ):
        parse_prompts(ten_megabytes, None, NeverTokenizer(), max_model_len=64)
    # At the bound it may fit, and the tokenizer decides.
    at_the_bound = parse_prompts("a" * 512 * 2, None, BytesTokenizer(), max_model_len=2)
    assert len(at_the_bound.batch.row(0)) == 1024


def test_a_wrong_id_is_shown_in_short():
    with pytest.raises(BadPromptError) as raised:
        parse([[5, "x" * 10_000]])
    assert len(str(raised.value)) < 200


def test_the_preprocessor_gives_what_generate_would_send():
    preprocessor = InputPreprocessor(BytesTokenizer(), FAKE_MODEL)
    assert preprocessor.preprocess("ab") == {"prompt_token_ids": [97, 98], "prompt": "ab"}
    assert preprocessor.preprocess([5, 6]) == {"prompt_token_ids": [5, 6]}
    with pytest.raises(BadInputError, match="give one prompt, got a list of 2"):
        preprocessor.preprocess(["a", "b"])
    with pytest.raises(BadPromptError, match=r"it holds 1\.5"):
        preprocessor.preprocess([1.5])


def test_one_of_the_two_arguments_must_be_given():
    with pytest.raises(BadInputError, match="not none"):
        parse()
    with pytest.raises(BadInputError, match="not both"):
        parse([5], ids=[5])

"""Every form in which a caller may give prompts."""

import numpy as np
import pytest
import torch

from rl_vllm.errors import BadInputError
from rl_vllm.service.inputs import parse_prompts


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
        ([True, False], "prompt 0 must be text or a list of token ids, got bool"),
        ([[5, True]], r"prompt 0 holds True \(bool\)"),
        ([[5], [6.0]], r"prompt 1 holds 6.0 \(float\)"),
        (np.array([1.5, 2.5]), r"prompt 0 holds 1.5 \(float\)"),
        (torch.tensor([True]), r"prompt 0 holds True \(bool\)"),
        ([5, "a"], "prompt 0 must be text or a list of token ids, got int"),
        ([None], "prompt 0 must be .* got NoneType"),
        (5, "must be text, token ids or a list of them, got int"),
        (np.zeros((1, 2, 2), np.int64), "prompt 0 must be .* got ndarray"),
        (torch.tensor(5), "must be .* got Tensor"),
        ({"prompt_embeds": 1}, r"without 'prompt' or 'prompt_token_ids': \['prompt_embeds'\]"),
        ({"prompt": None}, "prompt 0 must be .* got NoneType"),
        ([[2**40]], "does not fit 32 bits: 1099511627776"),
        ([[-(2**31) - 1]], "does not fit 32 bits"),
        (["a"], "prompt 0 is text, but this service has no tokenizer"),
    ],
    ids=str,
)
def test_what_is_no_prompt_is_named_with_its_place(given, message):
    with pytest.raises(BadInputError, match=message):
        parse(given)


def test_one_of_the_two_arguments_must_be_given():
    with pytest.raises(BadInputError, match="not none"):
        parse()
    with pytest.raises(BadInputError, match="not both"):
        parse([5], ids=[5])

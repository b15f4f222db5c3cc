"""Text of responses, with a tokenizer whose ids below 256 are bytes."""

import numpy as np
import pytest

from rl_vllm.service.text import decode_samples
from rl_vllm.testing.models import tiny_tokenizer
from rl_vllm.types import CompletionBatch, FinishReason, SamplingConfig, pack_rows

from .conftest import prompts

TOKENIZER = tiny_tokenizer()
EOS = 511


def completions(*samples: list[int], stop: str | int | None = None, finish=FinishReason.LENGTH) -> CompletionBatch:
    """One sample for each row."""
    tokens, offsets = pack_rows(samples)
    count = len(samples)
    return CompletionBatch(
        numbers_N=np.arange(count),
        samples_N=np.zeros(count, np.int32),
        offsets_N1=offsets,
        tokens_T=tokens,
        logprobs_T=np.full(len(tokens), -1, np.float32),
        versions_T=np.zeros(len(tokens), np.int32),
        finish_N=np.full(count, finish, np.int8),
        stops_N=(stop,) * count,
        cached_N=np.zeros(count, np.int32),
    )


def text(ids: str | list[int], *, prompt: list[int] = (65,), stop=None, finish=FinishReason.LENGTH, **sampling) -> str:
    sample = list(ids.encode()) if isinstance(ids, str) else ids
    batch = completions(sample, stop=stop, finish=finish)
    (decoded,) = decode_samples(TOKENIZER, prompts(list(prompt)), batch, SamplingConfig(**sampling))
    return decoded


def test_text_is_what_follows_the_prompt():
    batch = completions(list(b"bc"), list(b" d"))
    assert decode_samples(TOKENIZER, prompts([65], [66, 67]), batch, SamplingConfig()) == ["bc", " d"]


def test_without_a_tokenizer_every_text_is_empty():
    assert decode_samples(None, prompts([65], [66]), completions([5], [6]), SamplingConfig()) == ["", ""]


def test_an_empty_response_is_empty_text():
    assert text([]) == ""


@pytest.mark.parametrize(("keep", "expected"), [(False, "one"), (True, "one##")])
def test_a_stop_string_ends_the_text(keep, expected):
    batch = completions(list(b"one## two"), stop="##", finish=FinishReason.STOP)
    sampling = SamplingConfig(stop=("##",), include_stop_str_in_output=keep)
    assert decode_samples(TOKENIZER, prompts([65]), batch, sampling) == [expected]


def test_a_stop_string_in_the_prompt_does_not_count():
    batch = completions(list(b"b#c"), stop="#", finish=FinishReason.STOP)
    assert decode_samples(TOKENIZER, prompts([35, 35]), batch, SamplingConfig(stop=("#",))) == ["b"]


def test_a_stop_string_inside_the_first_min_tokens_does_not_count():
    batch = completions(list(b"a#b#"), stop="#", finish=FinishReason.STOP)
    assert decode_samples(TOKENIZER, prompts([65]), batch, SamplingConfig(stop=("#",), min_tokens=2)) == ["a#b"]
    across = completions(list(b"a##"), stop="##", finish=FinishReason.STOP)
    assert decode_samples(TOKENIZER, prompts([65]), across, SamplingConfig(stop=("##",), min_tokens=2)) == ["a"]


@pytest.mark.parametrize("skip", [True, False])
def test_the_eos_that_ended_a_response_is_not_in_its_text(skip):
    assert text([98, EOS], finish=FinishReason.STOP, skip_special_tokens=skip) == "b"


def test_special_tokens_inside_a_response_are_shown_when_asked_for():
    assert text([98, EOS, 99], skip_special_tokens=False) == "b<|im_end|>c"
    assert text([98, EOS, 99]) == "bc"


def test_a_stop_id_that_ended_a_response_is_left_out_unless_it_is_kept():
    batch = completions(list(b"bc"), stop=99, finish=FinishReason.STOP)
    sampling = SamplingConfig(stop_token_ids=(99,))
    assert decode_samples(TOKENIZER, prompts([65]), batch, sampling) == ["b"]
    kept = SamplingConfig(stop_token_ids=(99,), include_stop_str_in_output=True)
    assert decode_samples(TOKENIZER, prompts([65]), batch, kept) == ["bc"]


def test_a_character_that_a_response_began_and_did_not_end_is_left_out():
    half_a_smile = list("🙂".encode())[:2]
    assert text([98, *half_a_smile]) == "b"


def test_a_broken_character_in_the_middle_is_shown_as_broken():
    assert text([98, 0xC3, 99]) == "b\ufffdc"


def test_a_character_begun_by_the_prompt_belongs_to_the_response_that_ends_it():
    first, second = "é".encode()
    assert text([second, 98], prompt=[65, first]) == "éb"


def test_an_empty_batch_has_no_texts():
    assert decode_samples(TOKENIZER, prompts(), CompletionBatch.empty(), SamplingConfig()) == []

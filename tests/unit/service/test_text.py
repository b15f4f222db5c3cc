"""Text of responses, with a tokenizer whose ids below 256 are bytes."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_vllm.service.text import TextStream, decode_samples
from rl_vllm.testing.answers import FAKE_MODEL
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


# While it is made


def streamed(ids, *, prompt=(65,), ended_by=None, finish=FinishReason.LENGTH, sizes=(1,), **sampling):
    """The parts of a sample's text, pushed in pieces of the sizes given, in turn; and its whole text."""
    config = SamplingConfig(**sampling)
    (whole,) = decode_samples(TOKENIZER, prompts(list(prompt)), completions(ids, stop=ended_by, finish=finish), config)
    stream = TextStream(TOKENIZER, list(prompt)[-5:], config, replace(FAKE_MODEL, eos_token_ids=(EOS,), vocab_size=512))
    parts, position = [], 0
    for size in itertools.cycle(sizes):
        if position + size >= len(ids):
            break
        parts.append(stream.push(ids[position : position + size]))
        position += size
        assert stream.text == "".join(parts)
    parts.append(stream.finish(whole))
    assert stream.text == whole
    return parts, whole


def test_text_comes_with_the_ids_that_make_it():
    assert streamed(list(b"one")) == (["o", "n", "e"], "one")


def test_half_a_character_waits_for_its_other_half():
    smile = list("🙂".encode())
    parts, whole = streamed([98, *smile, 99])
    assert whole == "b🙂c"
    assert parts[0] == "b"
    assert "".join(parts[1:4]) == ""
    assert parts[4] == "🙂"


def test_half_a_character_at_the_end_is_never_shown():
    parts, whole = streamed([98, *list("🙂".encode())[:2]])
    assert "".join(parts) == whole == "b"


def test_what_may_become_a_stop_string_is_held_back():
    parts, whole = streamed(list(b"a#b##"), ended_by="##", finish=FinishReason.STOP, stop=("##",))
    assert whole == "a#b"
    # The last character is always one that a "##" could begin with.
    assert parts == ["", "a", "#", "b", ""]


def test_an_id_that_may_have_ended_the_response_is_held_back():
    parts, whole = streamed([98, 99, 100], finish=FinishReason.STOP, ended_by=100, stop_token_ids=(99, 100))
    assert whole == "bc"
    assert parts == ["b", "", "c"]


def test_a_special_token_that_is_shown_comes_whole():
    parts, whole = streamed([98, 300, EOS, 99], skip_special_tokens=False, ignore_eos=True)
    assert "".join(parts) == whole
    assert "<|im_end|>" in parts[2]


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    ids=st.lists(st.integers(0, 511), max_size=40),
    prompt=st.lists(st.integers(0, 511), min_size=1, max_size=8),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    skip=st.booleans(),
)
def test_the_parts_of_any_response_joined_are_its_text(data, ids, prompt, sizes, skip):
    characters = data.draw(st.text(max_size=12))
    where = data.draw(st.integers(0, len(ids)))
    whole_ids = [*ids[:where], *characters.encode(), *ids[where:]]
    parts, whole = streamed(whole_ids, prompt=tuple(prompt), sizes=sizes, skip_special_tokens=skip, ignore_eos=True)
    assert "".join(parts) == whole


def test_every_prompt_may_have_settings_of_its_own():
    batch = completions([98, EOS, 99], [98, EOS, 99], list(b"c#d"), stop=None)
    settings_B = [SamplingConfig(), SamplingConfig(skip_special_tokens=False), SamplingConfig()]
    assert decode_samples(TOKENIZER, prompts([65], [65], [65]), batch, settings_B) == ["bc", "b<|im_end|>c", "c#d"]

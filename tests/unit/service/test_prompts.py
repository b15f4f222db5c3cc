"""What of a batch is sent, and with which settings."""

from dataclasses import replace

import numpy as np
import pytest

from rl_vllm.errors import BadPromptError, ConfigError
from rl_vllm.service.prompts import check_prompts, find_bad_prompts, row_seed, settings_per_row
from rl_vllm.testing.answers import FAKE_MODEL
from rl_vllm.types import BadPrompt, SamplingConfig

from .conftest import prompts

MODEL = replace(FAKE_MODEL, vocab_size=100, max_model_len=16)
BAD = prompts([5, 6], [], [7] * 16, [-1], [5, 100], [7] * 15, [8] * 20)


def test_every_bad_row_has_a_reason_with_its_value():
    reasons = find_bad_prompts(BAD, MODEL)
    assert sorted(reasons) == [1, 2, 3, 4, 6]
    assert "empty" in reasons[1]
    assert "16 tokens" in reasons[2]
    assert "max_model_len=16" in reasons[2]
    assert "token id -1 at position 0" in reasons[3]
    assert "token id 100 at position 1 is outside the vocabulary [0, 100)" in reasons[4]
    assert "20 tokens" in reasons[6]


def test_the_first_and_last_id_of_the_vocabulary_are_good():
    assert find_bad_prompts(prompts([0], [99]), MODEL) == {}


def test_a_row_that_is_wrong_twice_is_named_once_by_its_length():
    assert list(find_bad_prompts(prompts([5], [1000] * 16), MODEL)) == [1]


def test_raise_names_the_first_bad_row():
    with pytest.raises(BadPromptError, match="prompt 1: it is empty") as raised:
        check_prompts(BAD, MODEL, BadPrompt.RAISE)
    assert raised.value.row == 1


def test_mark_sends_the_good_rows_and_fails_the_others_in_row_order():
    rows, failures = check_prompts(BAD, MODEL, BadPrompt.MARK)
    assert rows == [0, 5]
    assert [failure.number for failure in failures] == [1, 2, 3, 4, 6]


def test_a_response_is_clamped_to_what_the_context_leaves():
    batch = prompts([5] * 12, [5] * 2, [5] * 15)
    settings = settings_per_row(batch, [0, 1, 2], SamplingConfig(max_tokens=8, min_tokens=3), MODEL)
    assert [setting.max_tokens for setting in settings] == [4, 8, 1]
    assert [setting.min_tokens for setting in settings] == [3, 3, 1]


def test_no_limit_means_up_to_the_end_of_the_context():
    settings = settings_per_row(prompts([5] * 12, [5]), [0, 1], SamplingConfig(max_tokens=None), MODEL)
    assert [setting.max_tokens for setting in settings] == [4, 15]


def test_rows_with_equal_settings_share_one_object_and_only_rows_asked_for_get_one():
    settings = settings_per_row(prompts([5], [], [6], [5] * 12), [0, 2, 3], SamplingConfig(max_tokens=8), MODEL)
    assert len(settings) == 3
    assert settings[0] is settings[1]
    assert settings[2].max_tokens == 4


def test_everything_else_of_the_settings_is_kept():
    sampling = SamplingConfig(n=3, max_tokens=8, temperature=0.5, top_p=0.9, stop=("a",), logprobs=2)
    (setting,) = settings_per_row(prompts([5]), [0], sampling, MODEL)
    assert setting == sampling


def test_without_a_base_seed_no_row_has_one():
    (setting,) = settings_per_row(prompts([5]), [0], SamplingConfig(), MODEL)
    assert setting.seed is None


def test_a_row_keeps_its_seed_whatever_rows_are_sent_with_it():
    batch = prompts([5], [6], [7])
    alone = settings_per_row(batch, [2], SamplingConfig(seed=9), MODEL)
    together = settings_per_row(batch, [0, 1, 2], SamplingConfig(seed=9), MODEL)
    assert alone[0].seed == together[2].seed == row_seed(9, 2)


def test_rows_and_base_seeds_give_distinct_seeds_even_after_adding_sample_indices():
    # The engine adds 0 .. n - 1: seeds of two rows must not be neighbours.
    seeds = np.sort([row_seed(base, row) for base in range(40) for row in range(50)])
    assert np.diff(seeds).min() > 64


@pytest.mark.parametrize("base", [0, 1, 2**31, 2**32, 2**62 - 1, 2**62, -1])
def test_any_base_seed_gives_seeds_a_generator_takes(base):
    seeds = [row_seed(base, row) for row in range(100)]
    assert len(set(seeds)) == 100
    assert all(0 <= seed < 2**62 for seed in seeds)


def test_huge_base_seeds_differ_from_each_other():
    assert len({row_seed(2**62 - delta, 0) for delta in range(10)}) == 10


def test_the_first_seed_is_splitmix64_of_its_reference_implementation():
    # The generator's first output from state 0 is 0xE220A8397B1DCDAF; its output function applied again to that, >> 2.
    state = (0xE220A8397B1DCDAF + 0x9E3779B97F4A7C15) % 2**64
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    assert row_seed(0, 0) == (state ^ (state >> 31)) >> 2


def test_a_policy_for_bad_rows_given_as_text_is_refused():
    with pytest.raises(ConfigError, match=r"on_bad_prompt must be one of BadPrompt\.RAISE, BadPrompt\.MARK"):
        check_prompts(BAD, MODEL, "raise")

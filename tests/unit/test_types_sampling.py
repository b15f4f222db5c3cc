"""Sampling settings: what is refused, and what the derived facts say."""

import dataclasses
import math

import pytest

from rl_vllm.errors import ConfigError
from rl_vllm.types import SamplingConfig

REFUSED = [
    ({"n": 0}, "n must be at least 1, got 0"),
    ({"n": 2.0}, r"n must be an integer, got 2\.0 \(float\)"),
    ({"n": True}, r"n must be an integer, got True \(bool\)"),
    ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
    ({"max_tokens": "8"}, r"max_tokens must be an integer, got '8' \(str\)"),
    ({"min_tokens": -1}, "min_tokens must be at least 0, got -1"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9 is above max_tokens=8"),
    ({"temperature": -0.1}, r"temperature must be finite and in \[0, 2\], got -0\.1"),
    ({"temperature": 2.5}, r"temperature must be finite and in \[0, 2\], got 2\.5"),
    ({"seed": 1.5}, r"seed must be an integer or None, got 1\.5 \(float\)"),
    ({"stop": "xyz"}, r"stop must be a tuple of str, got 'xyz': write \('xyz',\)"),
    ({"stop": None}, "stop must be a tuple of str, got None"),
    ({"stop": (5,)}, "stop must be a tuple of str"),
    ({"stop_token_ids": [2]}, "stop_token_ids must be a tuple of int"),
    ({"temperature": math.nan}, "temperature must be finite"),
    ({"temperature": math.inf}, "temperature must be finite"),
    ({"temperature": None}, "temperature must be a number, got None"),
    ({"top_p": 0.0}, "top_p must be above 0"),
    ({"top_p": 1.01}, r"top_p must be finite and in \[0, 1\], got 1\.01"),
    ({"top_k": -2}, "top_k must be at least -1, got -2"),
    ({"min_p": 1.5}, r"min_p must be finite and in \[0, 1\], got 1\.5"),
    ({"presence_penalty": 2.1}, r"presence_penalty must be finite and in \[-2, 2\]"),
    ({"frequency_penalty": -2.1}, r"frequency_penalty must be finite and in \[-2, 2\]"),
    ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0"),
    ({"repetition_penalty": -1.0}, "repetition_penalty must be finite and at least 0"),
    ({"logprobs": -1}, "logprobs must be at least 0"),
    ({"prompt_logprobs": True}, r"prompt_logprobs must be an integer, got True"),
    ({"temperature": 0.0, "n": 4}, "n=4 samples would be equal"),
    ({"stop": ("###", "")}, "stop holds an empty string"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=[str(settings) for settings, _ in REFUSED])
def test_a_setting_out_of_range_is_refused_with_its_value(settings, message):
    with pytest.raises(ConfigError, match=message):
        SamplingConfig(**settings)


def test_an_unknown_setting_is_refused():
    with pytest.raises(TypeError, match="max_new_tokens"):
        SamplingConfig(max_new_tokens=4)


@pytest.mark.parametrize(
    "settings",
    [
        {"n": 1, "temperature": 0.0},
        {"max_tokens": None, "min_tokens": 10**6},
        {"min_tokens": 8, "max_tokens": 8},
        {"top_p": 1.0, "top_k": -1, "min_p": 0.0},
        {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 0.01},
    ],
)
def test_a_setting_at_the_edge_of_its_range_is_accepted(settings):
    sampling = SamplingConfig(**settings)
    assert {name: getattr(sampling, name) for name in settings} == settings


@pytest.mark.parametrize(
    ("settings", "truncates"),
    [
        ({}, False),
        ({"top_k": 0}, False),
        ({"top_k": -1}, False),
        ({"top_k": 1}, True),
        ({"top_p": 0.99}, True),
        ({"min_p": 0.01}, True),
        ({"temperature": 0.7}, False),
        ({"temperature": 0.0, "top_p": 0.5}, False),
    ],
)
def test_sampling_truncates_when_tokens_are_cut_off(settings, truncates):
    assert SamplingConfig(**settings).truncates is truncates


def test_only_temperature_zero_is_greedy():
    assert SamplingConfig(temperature=0.0).is_greedy
    assert not SamplingConfig(temperature=0.01).is_greedy


def test_a_new_seed_changes_nothing_else():
    sampling = SamplingConfig(max_tokens=4, stop=("x",), seed=1)
    assert sampling.with_seed(9) == SamplingConfig(max_tokens=4, stop=("x",), seed=9)
    assert sampling.seed == 1


def test_settings_are_frozen_and_hashable():
    sampling = SamplingConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        sampling.n = 2
    assert len({sampling, SamplingConfig(), SamplingConfig(n=2)}) == 2

"""Ratios are reported before they are truncated."""

import math

import pytest
import torch

from rl_vllm.collectors import ratio_stats
from rl_vllm.errors import BadInputError, ConfigError

NAN = float("nan")


def test_the_largest_ratio_is_the_raw_one_and_the_share_above_the_cap_is_counted():
    # Ratios 0.5, 1 and 4; a cap of 2 cuts one of three. The fourth token was not sampled.
    trainer = torch.tensor([[0.5, 1.0, 4.0, 100.0]]).log()
    engine = torch.zeros(1, 4)
    engine[0, 3] = NAN
    stats = ratio_stats(trainer, engine, torch.tensor([[True, True, True, False]]), cap=2.0)
    assert stats.num_tokens == 3
    assert stats.largest == pytest.approx(4.0)
    assert stats.smallest == pytest.approx(0.5)
    assert stats.share_above_cap == pytest.approx(1 / 3)
    assert stats.mean == pytest.approx(5.5 / 3)
    # (0.5 - 1 + ln 2) + 0 + (4 - 1 - ln 4), a third of it.
    assert stats.kl == pytest.approx((2.5 + math.log(2) - math.log(4)) / 3)


def test_equal_policies_have_ratios_of_one():
    logprobs = torch.tensor([-0.5, -2.0])
    stats = ratio_stats(logprobs, logprobs, torch.ones(2, dtype=torch.bool), cap=1.0)
    assert (stats.mean, stats.largest, stats.smallest, stats.share_above_cap, stats.kl) == (1.0, 1.0, 1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("trainer", "engine", "mask", "match"),
    [
        (torch.zeros(2), torch.zeros(3), torch.ones(3, dtype=torch.bool), "trainer_logprobs has shape"),
        (torch.zeros(2), torch.tensor([0.0, NAN]), torch.ones(2, dtype=torch.bool), "1 of the marked engine_logprobs"),
        (torch.zeros(2), torch.zeros(2), torch.ones(2), "mask must be bool"),
        (torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.bool), "nothing to compare"),
    ],
)
def test_what_cannot_be_compared_is_refused(trainer, engine, mask, match):
    with pytest.raises(BadInputError, match=match):
        ratio_stats(trainer, engine, mask, cap=2.0)


def test_a_cap_is_above_zero():
    with pytest.raises(ConfigError, match="cap"):
        ratio_stats(torch.zeros(1), torch.zeros(1), torch.ones(1, dtype=torch.bool), cap=0.0)

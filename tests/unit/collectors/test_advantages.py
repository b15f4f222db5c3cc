"""Advantages within groups, by hand, by TorchRL's own, and by what must hold for any groups."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.objectives.llm import MCAdvantage

from rl_vllm.collectors import group_advantages
from rl_vllm.errors import BadInputError, ConfigError

NAN = float("nan")


def test_a_rejected_row_does_not_move_the_mean() -> None:
    found = group_advantages(
        torch.tensor([1.0, 0.0, 5.0]),
        torch.tensor([7, 7, 7]),
        accepted=torch.tensor([True, True, False]),
        scale="none",
    )
    assert found.advantage.tolist() == [0.5, -0.5, 0.0]
    assert found.mask.tolist() == [True, True, False]
    assert (found.num_groups, found.num_degenerate) == (1, 0)


def test_rows_of_a_group_may_lie_anywhere() -> None:
    found = group_advantages(torch.tensor([[0.0, 10.0], [1.0, 30.0]]), torch.tensor([[4, -2], [4, -2]]), scale="none")
    assert found.advantage.tolist() == [[-0.5, -10.0], [0.5, 10.0]]


def test_two_rows_get_advantages_of_both_signs() -> None:
    # By hand: the mean is 0.5, the sample deviation 0.7071.
    found = group_advantages(torch.tensor([0.0, 1.0]), torch.tensor([0, 0]))
    torch.testing.assert_close(found.advantage, torch.tensor([-0.7071068, 0.7071068]))


def test_leave_one_out_compares_with_the_others() -> None:
    # By hand: 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2.
    found = group_advantages(
        torch.tensor([1.0, 2.0, 6.0]), torch.zeros(3).long(), baseline="leave_one_out", scale="none"
    )
    torch.testing.assert_close(found.advantage, torch.tensor([-3.0, -1.5, 4.5]))


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["std", "none"])
def test_groups_that_cannot_be_told_apart_are_kept_with_zero_or_dropped(baseline: str, scale: str) -> None:
    rewards = torch.tensor([0.1, 0.1, 0.1, 2.0, 1.0, 3.0, 5.0])
    groups = torch.tensor([0, 0, 0, 1, 2, 2, 3])
    accepted = torch.tensor([True, True, True, True, True, True, False])
    kept = group_advantages(rewards, groups, accepted=accepted, baseline=baseline, scale=scale)
    assert kept.advantage[:4].tolist() == [0.0] * 4
    assert kept.mask.tolist() == accepted.tolist()
    assert (kept.num_groups, kept.num_degenerate) == (3, 2)
    dropped = group_advantages(rewards, groups, accepted=accepted, baseline=baseline, scale=scale, degenerate="drop")
    assert dropped.mask.tolist() == [False] * 4 + [True] * 2 + [False]
    assert torch.equal(dropped.advantage, kept.advantage)


def test_whole_groups_get_what_torchrl_gives_them() -> None:
    rewards = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    buffer = ReplayBuffer(
        storage=LazyStackStorage(100), transform=MCAdvantage(grpo_size=4, prompt_key="group", verbose=False)
    )
    for group, row in enumerate(rewards.tolist()):
        for reward in row:
            step = {"reward": torch.tensor([[reward]]), "done": torch.ones(1, 1, dtype=torch.bool)}
            buffer.extend(TensorDict({"group": torch.tensor([group]), "next": step}, batch_size=[1]))
    expected = torch.stack([buffer[index]["advantage"].reshape(()) for index in range(12)])
    found = group_advantages(rewards.reshape(-1), torch.arange(12) // 4)
    torch.testing.assert_close(found.advantage, expected, rtol=1e-5, atol=1e-6)


@given(
    rows=st.lists(
        st.tuples(st.integers(-2, 2), st.floats(-100, 100, width=32), st.booleans()), min_size=0, max_size=30
    ),
    degenerate=st.sampled_from(["keep", "drop"]),
)
def test_any_groups(rows: list[tuple[int, float, bool]], degenerate: str) -> None:
    ids, rewards, accepted = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [])
    found = group_advantages(
        # Rows that are not accepted may hold anything.
        torch.tensor([reward if counts else NAN for reward, counts in zip(rewards, accepted, strict=True)]),
        torch.tensor(ids, dtype=torch.int64),
        accepted=torch.tensor(accepted, dtype=torch.bool),
        scale="none",
        degenerate=degenerate,
    )
    assert found.advantage.isfinite().all()
    for number, (group, reward, counts) in enumerate(rows):
        members = [other for its, other, also in rows if its == group and also]
        if not counts:
            assert not found.mask[number]
            assert found.advantage[number] == 0
        else:
            assert bool(found.mask[number]) == (degenerate == "keep" or len(set(members)) > 1)
            expected = reward - statistics.fmean(members) if len(set(members)) > 1 else 0.0
            assert found.advantage[number].item() == pytest.approx(expected, rel=1e-5, abs=1e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rewards": torch.tensor([1, 2])}, r"rewards must be floating point, got torch\.int64"),
        ({"rewards": torch.tensor([1.0, NAN])}, r"1 accepted rewards are not finite, first nan at \[1\]"),
        ({"groups": torch.tensor([0.0, 1.0])}, r"groups must be integer ids, got torch\.float32"),
        ({"groups": torch.tensor([0])}, r"groups has shape \[1\] and rewards \[2\]"),
        ({"accepted": torch.tensor([1, 0])}, r"accepted must be bool, got torch\.int64"),
        ({"accepted": torch.tensor([[True, True]])}, r"accepted has shape \[1, 2\] and rewards \[2\]"),
    ],
)
def test_what_cannot_be_used_is_named(change: dict[str, torch.Tensor], words: str) -> None:
    values = {"rewards": torch.tensor([1.0, 2.0]), "groups": torch.tensor([0, 0]), **change}
    with pytest.raises(BadInputError, match=words):
        group_advantages(values.pop("rewards"), values.pop("groups"), **values)


@pytest.mark.parametrize("choice", ["baseline", "scale", "degenerate"])
def test_an_unknown_choice_is_refused(choice: str) -> None:
    with pytest.raises(ConfigError, match=f"{choice} must be one of"):
        group_advantages(torch.tensor([1.0]), torch.tensor([0]), **{choice: "other"})

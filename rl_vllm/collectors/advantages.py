"""Advantages of the samples of a group against each other, over the rows that were accepted.

``MCAdvantage`` of TorchRL does this inside a replay buffer, for groups that are complete. Here a group is what has one
id, wherever its rows lie; a row that failed or was rejected takes no part, and does not move the others' mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rl_vllm.config import require_choice
from rl_vllm.errors import BadInputError

BASELINES = ("mean", "leave_one_out")
SCALES = ("std", "none")
DEGENERATE = ("keep", "drop")

# What TorchRL's MCAdvantage divides by at least.
_LEAST_STD = 1e-6


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """One advantage per row.

    Attributes:
        advantage: float32 ``[*B]``; 0 for rows that are not to be trained on.
        mask: bool ``[*B]``: accepted rows, without those of dropped groups.
        num_groups: Groups that have an accepted row.
        num_degenerate: Those of them whose rows cannot be told apart: one row, or equal rewards.
    """

    advantage: torch.Tensor
    mask: torch.Tensor
    num_groups: int
    num_degenerate: int


@torch.no_grad()
def group_advantages(
    rewards: torch.Tensor,
    groups: torch.Tensor,
    *,
    accepted: torch.Tensor | None = None,
    baseline: str = "mean",
    scale: str = "std",
    degenerate: str = "keep",
) -> GroupAdvantages:
    """Compare each accepted row's reward with those of its group.

    With ``baseline="mean"`` and ``scale="std"``, GRPO's (https://arxiv.org/abs/2402.03300, section 4.1): reward minus
    mean, by the sample standard deviation, which is at least 1e-6. ``scale="none"`` leaves the division out, as Dr.
    GRPO (https://arxiv.org/abs/2503.20783) does. ``"leave_one_out"`` subtracts the mean of the group's other rows,
    RLOO's baseline (https://arxiv.org/abs/2402.14740).

    Args:
        rewards: Float ``[*B]``, one per row; only accepted rows' are looked at.
        groups: Integer ``[*B]``: rows with one id are a group, in any order.
        accepted: Bool ``[*B]``: rows that count; None means all.
        baseline: ``mean`` or ``leave_one_out``.
        scale: ``std`` or ``none``.
        degenerate: ``keep`` gives rows of groups that cannot be told apart the advantage 0 and trains on them (a KL
            term may need them), ``drop`` masks them.

    Raises:
        BadInputError: Shapes differ, a type is wrong, or an accepted reward is NaN or infinite.
        ConfigError: A choice is unknown.
    """
    require_choice("baseline", baseline, BASELINES)
    require_choice("scale", scale, SCALES)
    require_choice("degenerate", degenerate, DEGENERATE)
    mask = _checked(rewards, groups, accepted)
    _, index = torch.unique(groups.reshape(-1), return_inverse=True)
    kept = mask.reshape(-1)
    # In float64: rewards of very different sizes meet in one sum.
    values = torch.where(
        kept, rewards.reshape(-1), torch.zeros((), dtype=rewards.dtype, device=rewards.device)
    ).double()

    def sums(of: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(int(index.max()) + 1 if index.numel() else 0, dtype=torch.float64, device=rewards.device)
        return total.index_add_(0, index, of)

    count = sums(kept.double())
    mean = sums(values) / count.clamp(min=1)
    centred = torch.where(kept, values - mean[index], torch.zeros_like(values))
    std = (sums(centred.square()) / (count - 1).clamp(min=1)).sqrt()
    advantage = centred
    if baseline == "leave_one_out":
        # r - (sum - r) / (n - 1) = (r - mean) n / (n - 1)
        advantage = centred * (count / (count - 1).clamp(min=1))[index]
    if scale == "std":
        advantage = advantage / std.clamp(min=_LEAST_STD)[index]
    high = torch.full_like(mean, -torch.inf).scatter_reduce(0, index[kept], values[kept], "amax")
    low = torch.full_like(mean, torch.inf).scatter_reduce(0, index[kept], values[kept], "amin")
    is_degenerate = (count > 0) & (high == low)
    # Equal rewards leave rounding errors, which a small deviation would make large.
    advantage = torch.where(is_degenerate[index], torch.zeros_like(advantage), advantage)
    if degenerate == "drop":
        kept = kept & ~is_degenerate[index]
    return GroupAdvantages(
        advantage=torch.where(kept, advantage, torch.zeros_like(advantage)).float().view(rewards.shape),
        mask=kept.view(rewards.shape),
        num_groups=int((count > 0).sum()),
        num_degenerate=int(is_degenerate.sum()),
    )


def _checked(rewards: torch.Tensor, groups: torch.Tensor, accepted: torch.Tensor | None) -> torch.Tensor:
    """The mask of accepted rows; raises :class:`BadInputError` for what cannot be used."""
    if not rewards.is_floating_point():
        raise BadInputError(f"rewards must be floating point, got {rewards.dtype}: convert them with .float()")
    if groups.is_floating_point() or groups.is_complex() or groups.dtype == torch.bool:
        raise BadInputError(f"groups must be integer ids, got {groups.dtype}: number the prompts")
    mask = torch.ones_like(rewards, dtype=torch.bool) if accepted is None else accepted
    if mask.dtype != torch.bool:
        raise BadInputError(f"accepted must be bool, got {mask.dtype}: compare with what is accepted")
    for name, other in (("groups", groups), ("accepted", mask)):
        if other.shape != rewards.shape:
            raise BadInputError(
                f"{name} has shape {list(other.shape)} and rewards {list(rewards.shape)}: give one value per row"
            )
    bad = (mask & ~rewards.isfinite()).nonzero()
    if len(bad):
        place = tuple(bad[0].tolist())
        raise BadInputError(
            f"{len(bad)} accepted rewards are not finite, first {rewards[place].item()} at {list(place)}: do not "
            "accept rows whose reward failed"
        )
    return mask

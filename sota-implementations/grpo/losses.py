"""TorchRL's GRPO loss, with our own measure of how far trainer and engine disagree."""

from __future__ import annotations

from typing import Any

import torch
from torchrl.objectives.llm import GRPOLoss


class MeasuredGRPOLoss(GRPOLoss):
    """:class:`GRPOLoss` that keeps the log-ratios of its last call.

    Before the first optimiser step on a batch, trainer and engine hold the same weights, and the log-ratio of a token
    is the disagreement of the two implementations. TorchRL's ``kl_approx`` averages it over prompts and padding too.

    Attributes:
        log_ratio: float [B, T], trainer's minus engine's logprob, from the last call; right-aligned; 0 on prompt
            tokens and padding.
    """

    log_ratio: torch.Tensor

    def _compute_policy_objective(
        self, log_weight: torch.Tensor, advantage: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.log_ratio = log_weight.detach().squeeze(-1)
        result: tuple[Any, Any] = super()._compute_policy_objective(log_weight, advantage)
        return result

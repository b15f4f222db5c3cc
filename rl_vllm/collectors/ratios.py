"""How far the trainer's policy is from the one that sampled: importance ratios before anything is done to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rl_vllm.config import require_above_zero
from rl_vllm.errors import BadInputError


@dataclass(frozen=True, slots=True)
class RatioStats:
    """Importance ratios ``exp(trainer - engine)`` of sampled tokens, as they are.

    Attributes:
        num_tokens: How many tokens were compared.
        mean: Near 1 when the two are near each other.
        largest, smallest: Over all tokens.
        share_above_cap: Share of tokens whose ratio a truncation at the cap would lower.
        kl: Mean of ``ratio - 1 - log(ratio)``, nats: an estimate of the KL of the engine's policy from the trainer's
            that is never negative (http://joschu.net/blog/kl-approx.html, k3).
    """

    num_tokens: int
    mean: float
    largest: float
    smallest: float
    share_above_cap: float
    kl: float


@torch.no_grad()
def ratio_stats(
    trainer_logprobs: torch.Tensor, engine_logprobs: torch.Tensor, mask: torch.Tensor, *, cap: float
) -> RatioStats:
    """Compare logprobs of the tokens that were sampled.

    Truncated ratios alone hide how bad it is: a cap of 2 makes 2 of a ratio of 4 and of one of 400.

    Args:
        trainer_logprobs: Float ``[*B, T]``, nats.
        engine_logprobs: The same shape, in the mode ``processed_logprobs``.
        mask: Bool of that shape, True on sampled tokens; nothing else is looked at.
        cap: Where a loss truncates ratios.

    Raises:
        BadInputError: Shapes differ, the mask is no bool or marks nothing, or a marked logprob is not finite.
        ConfigError: The cap is not above 0.
    """
    require_above_zero("cap", cap)
    if mask.dtype != torch.bool:
        raise BadInputError(f"mask must be bool, got {mask.dtype}: compare with what is marked")
    for name, logprobs in (("trainer_logprobs", trainer_logprobs), ("engine_logprobs", engine_logprobs)):
        if logprobs.shape != mask.shape:
            raise BadInputError(f"{name} has shape {list(logprobs.shape)} and mask {list(mask.shape)}: give the same")
        unknown = int((~logprobs[mask].isfinite()).sum())
        if unknown:
            raise BadInputError(f"{unknown} of the marked {name} are not finite: mark only tokens that were sampled")
    if not mask.any():
        raise BadInputError("mask marks no token: there is nothing to compare")
    difference = (trainer_logprobs[mask] - engine_logprobs[mask]).double()
    ratio = difference.exp()
    return RatioStats(
        num_tokens=int(mask.sum()),
        mean=float(ratio.mean()),
        largest=float(ratio.max()),
        smallest=float(ratio.min()),
        share_above_cap=float((ratio > cap).double().mean()),
        kl=float((ratio - 1 - difference).mean()),
    )

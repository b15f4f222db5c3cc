"""How old the weights are that sampled a token, and what is done about it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rl_vllm.envs.dialogue import Segment
from rl_vllm.policy.columns import NO_VERSION


def oldest_version(segments: list[Segment]) -> int | None:
    """The oldest weights that sampled a token; None when none was sampled."""
    oldest = [int(segment.versions_T[segment.sampled_T].min()) for segment in segments if segment.sampled_T.any()]
    return min(oldest, default=None)


def without_stale_tokens(segment: Segment, *, version: int, max_staleness: int) -> tuple[Segment, int]:
    """The segment with its stale tokens as context: read, not trained on.

    Versions only grow along a segment, so that what becomes context is everything before some position.

    Args:
        segment: What passed through the model.
        version: What is served now.
        max_staleness: How many versions a token's weights may be behind.

    Returns:
        The segment, and how many sampled tokens became context.
    """
    stale_T = segment.sampled_T & (segment.versions_T < version - max_staleness)
    count = int(stale_T.sum())
    if not count:
        return segment, 0
    sampled_T = segment.sampled_T & ~stale_T
    fresh = np.flatnonzero(sampled_T)
    context = replace(
        segment,
        sampled_T=sampled_T,
        logprobs_T=np.where(stale_T, np.float32(np.nan), segment.logprobs_T),
        versions_T=np.where(stale_T, NO_VERSION, segment.versions_T),
        num_prompt=int(fresh[0]) if len(fresh) else len(segment),
    )
    return context, count

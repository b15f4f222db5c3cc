"""What a collector counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class CollectorStats:
    """Counts since the collector was built; none is reset.

    Attributes:
        groups_begun: Prompts that were drawn.
        groups_delivered: Groups in batches or in the buffer.
        groups_rejected: Groups that were finished and not accepted: equal rewards, or ``postproc`` returned None.
        groups_failed: Groups dropped because a rollout failed more often than ``max_retries``.
        groups_stale: Groups dropped for their age.
        rollouts_retried: Fresh attempts.
        tokens_delivered: Sampled tokens that can be trained on.
        tokens_sampled: Sampled tokens of all rollouts that ended, wanted or not.
        tokens_truncated: Sampled tokens that became context for their age.
        failures: How often each kind of error failed an attempt, by the error's name.
    """

    groups_begun: int = 0
    groups_delivered: int = 0
    groups_rejected: int = 0
    groups_failed: int = 0
    groups_stale: int = 0
    rollouts_retried: int = 0
    tokens_delivered: int = 0
    tokens_sampled: int = 0
    tokens_truncated: int = 0
    failures: Counter[str] = field(default_factory=Counter)

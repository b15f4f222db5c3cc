"""Settings of the asynchronous collector."""

from __future__ import annotations

from dataclasses import dataclass

from rl_vllm.config import require_above_zero, require_at_least, require_choice
from rl_vllm.errors import ConfigError

ON_STALE = ("drop", "truncate", "keep")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorConfig:
    """How :class:`rl_vllm.AsyncRolloutCollector` fills its batches.

    Attributes:
        group_size: Rollouts per prompt.
        groups_per_batch: Groups that one step of the iteration delivers.
        max_in_flight: Groups that are begun and not yet delivered, at most; what a slow trainer finds waiting is never
            more. None means twice ``groups_per_batch``.
        max_staleness: How many versions the weights that sampled a token may be behind the ones that are served when
            the token is delivered. None means any number.
        on_stale: What happens to older tokens: ``drop`` drops their group; ``truncate`` makes them context, so that
            they are read and not trained on (and drops the group when a rollout has nothing else); ``keep`` only says
            in ``rollout.staleness`` how old the oldest token is.
        partial_rollouts: Keep responses that a refit came into the middle of; otherwise such a rollout fails and is
            done again.
        max_retries: Fresh attempts at a rollout that failed, before its group is dropped.
        require_different_rewards: Reject groups whose rewards are all equal (dynamic sampling, DAPO,
            https://arxiv.org/abs/2503.14476, section 3.2).
        max_oversampling: At most this many times ``groups_per_batch`` groups are finished for one batch.
        total_groups: Deliver this many and stop; None means all that the prompts give.
        no_progress_s: How long a step may take without any group being accepted, in seconds.
        seed: Base of all sampling seeds, one for each rollout and turn; None leaves sampling to the engines' streams,
            or to the policy's seed if it has one.
    """

    group_size: int = 8
    groups_per_batch: int = 8
    max_in_flight: int | None = None
    max_staleness: int | None = None
    on_stale: str = "drop"
    partial_rollouts: bool = True
    max_retries: int = 2
    require_different_rewards: bool = False
    max_oversampling: float = 4.0
    total_groups: int | None = None
    no_progress_s: float = 600.0
    seed: int | None = None

    def __post_init__(self) -> None:
        require_at_least("group_size", self.group_size, 1)
        require_at_least("groups_per_batch", self.groups_per_batch, 1)
        if self.max_in_flight is not None:
            require_at_least("max_in_flight", self.max_in_flight, self.groups_per_batch)
        if self.max_staleness is not None:
            require_at_least("max_staleness", self.max_staleness, 0)
        require_choice("on_stale", self.on_stale, ON_STALE)
        require_at_least("max_retries", self.max_retries, 0)
        if not self.max_oversampling >= 1.0:
            raise ConfigError(f"max_oversampling must be at least 1, got {self.max_oversampling}")
        if self.total_groups is not None:
            require_at_least("total_groups", self.total_groups, 1)
        require_above_zero("no_progress_s", self.no_progress_s)
        if self.seed is not None:
            require_at_least("seed", self.seed, 0)
        if self.require_different_rewards and self.group_size == 1:
            raise ConfigError("require_different_rewards compares the rewards of a group: group_size=1 has none")

    @property
    def in_flight(self) -> int:
        """``max_in_flight``, or its default."""
        return 2 * self.groups_per_batch if self.max_in_flight is None else self.max_in_flight

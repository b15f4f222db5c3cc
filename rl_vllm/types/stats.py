"""What is known of each replica at one moment; unknown is None."""

from __future__ import annotations

from dataclasses import dataclass

from rl_vllm.types.state import ReplicaState


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSample:
    """What one replica's engine said of itself at one moment: a point of the time line.

    Attributes:
        time_s: When it answered, in seconds since the epoch of ``time.time``.
        replica: Index of the replica.
        running: Requests being decoded.
        waiting: Requests not yet scheduled.
        kv_usage: Fraction of KV blocks in use, in [0, 1].
        generated_tokens: Response tokens made since the engine's start; a restarted engine begins at 0.
        tokens_per_s: Response tokens made per second since the sample before; None for an engine's first.
    """

    time_s: float
    replica: int
    running: int
    waiting: int
    kv_usage: float
    generated_tokens: int
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStats:
    """One replica of a service.

    What the engine says is as old as its last answer, and None when it has not answered since it was started or left.

    Attributes:
        replica: Index of the replica.
        state: Where it is in its life.
        reason: Why it is there; may be empty.
        version: The weight version it committed last.
        restarts: How often it was started again.
        outstanding_requests: Requests sent to it and not yet answered.
        outstanding_tokens: Tokens those may still cost.
        running: Requests its engine decodes.
        waiting: Requests its engine has not scheduled yet.
        kv_usage: Fraction of KV blocks in use, in [0, 1].
        generated_tokens: Response tokens its engine made since start.
        tokens_per_s: Response tokens per second between its last two answers.
        prefix_hit_rate: Fraction of the prompt tokens looked up in the prefix cache since start that were found there;
            None also when none was looked up.
        age_s: Seconds since its last answer.
    """

    replica: int
    state: ReplicaState
    reason: str
    version: int
    restarts: int
    outstanding_requests: int
    outstanding_tokens: int
    running: int | None
    waiting: int | None
    kv_usage: float | None
    generated_tokens: int | None
    tokens_per_s: float | None
    prefix_hit_rate: float | None
    age_s: float | None

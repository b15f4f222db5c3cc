"""Values that describe a running service."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class ReplicaState(enum.Enum):
    """Where a replica is in its life; only ``SERVING`` receives requests."""

    STARTING = "starting"
    SERVING = "serving"
    STALE = "stale"
    DEAD = "dead"
    RETIRED = "retired"


class BadPrompt(enum.Enum):
    """What a prompt that cannot be sent does to its batch."""

    RAISE = "raise"
    MARK = "mark"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about the served model that a caller needs.

    Attributes:
        model: Path or hub id.
        tokenizer: Path or hub id of its tokenizer, or None when the engine runs without one.
        vocab_size: Token ids are in ``[0, vocab_size)``.
        max_model_len: Longest prompt plus response, in tokens.
        eos_token_ids: Ids that end a response.
        pad_token_id: The tokenizer's padding id, or None when it has none.
        dtype: The weights' dtype, torch's name without the prefix.
        logprobs_mode: What returned logprobs mean, for example ``processed_logprobs``.
    """

    model: str
    tokenizer: str | None
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    dtype: str
    logprobs_mode: str


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """What an engine said of itself at one moment.

    Attributes:
        num_running: Requests being decoded.
        num_waiting: Requests not yet scheduled.
        kv_cache_usage: Fraction of KV blocks in use, in [0, 1].
        generated_tokens: Response tokens made since start.
    """

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    generated_tokens: int

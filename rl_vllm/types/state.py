"""Values that describe a running service."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

#: How a request names the model without any adapter, also where requests that name none get a trained one.
BASE_MODEL: Final = "@base"


class ReplicaState(enum.Enum):
    """Where a replica is in its life.

    ``HEALTHY -> SUSPECT -> DEAD -> RESTARTING -> STALE -> HEALTHY``; ``RETIRED`` is final. Only a completed refit (or a
    replica that needs none) leads from ``STALE`` to ``HEALTHY``: a probe alone never revives what left the serving set.
    """

    STARTING = "starting"
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DEAD = "dead"
    RESTARTING = "restarting"
    STALE = "stale"
    DRAINING = "draining"
    RETIRED = "retired"

    @property
    def serves(self) -> bool:
        """Whether it receives requests."""
        return self in (ReplicaState.HEALTHY, ReplicaState.SUSPECT)

    @property
    def is_up(self) -> bool:
        """Whether its engine runs, so that calls reach it."""
        return self in (ReplicaState.HEALTHY, ReplicaState.SUSPECT, ReplicaState.STALE, ReplicaState.DRAINING)


class RequestStatus(enum.Enum):
    """Where a request is; the last three are final."""

    WAITING = "waiting"
    RUNNING = "running"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        return self in (RequestStatus.COMPLETED, RequestStatus.CANCELLED, RequestStatus.FAILED)


class BadPrompt(enum.Enum):
    """What a prompt that cannot be sent does to its batch."""

    RAISE = "raise"
    MARK = "mark"


class Overload(enum.Enum):
    """What happens to requests beyond the bound on outstanding ones."""

    WAIT = "wait"
    RAISE = "raise"


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
        tasks: What the model can do, in vLLM's words: ``generate``, ``embed``, ``classify``, ...
        block_size: Tokens per block of the KV cache: prefixes are shared in whole blocks.
    """

    model: str
    tokenizer: str | None
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    dtype: str
    logprobs_mode: str
    tasks: tuple[str, ...] = ("generate",)
    block_size: int = 16


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """What an engine said of itself at one moment.

    Attributes:
        num_running: Requests being decoded.
        num_waiting: Requests not yet scheduled.
        kv_cache_usage: Fraction of KV blocks in use, in [0, 1].
        generated_tokens: Response tokens made since start.
        prefix_cache_queries: Prompt tokens looked up in the prefix cache since start.
        prefix_cache_hits: Prompt tokens found there since start.
    """

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    generated_tokens: int
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAAdapter:
    """A LoRA adapter that every replica has loaded.

    Attributes:
        name: What requests call it.
        number: The id that vLLM tells adapters apart by, at least 1.
        path: Folder in PEFT's format, readable on every replica's host.
        checksum: The :func:`weights_digest` of its tensors as whoever wrote them had them, or None when that is not
            known; an engine takes no others.
    """

    name: str
    number: int
    path: str
    checksum: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRALimits:
    """What adapters an engine takes.

    Attributes:
        max_rank: Largest rank.
        max_loaded: Adapters that it holds at once, used or not.
        max_running: Adapters that one step can compute with; the requests of others wait.
        target_modules: Last parts of the names of the modules that may be adapted, or whole names; None means all.
    """

    max_rank: int
    max_loaded: int
    max_running: int
    target_modules: tuple[str, ...] | None = None

    def may_adapt(self, module: str) -> bool:
        """Whether a module of this name may be adapted."""
        targets = self.target_modules
        return targets is None or module in targets or module.rsplit(".", 1)[-1] in targets


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterState:
    """The adapters of a service at one moment.

    Attributes:
        limits: What adapters its engines take, or None when they run without LoRA.
        loaded: Names of those that stay until they are removed, a trained one as its version: ``policy@v7``.
        leaving: Old versions of trained ones, which go when no request of theirs is in flight.
        trained: The version that answers for each trained adapter.
        default: The trained adapter of requests that name none, or None: the base model answers them.
    """

    limits: LoRALimits | None
    loaded: tuple[str, ...]
    leaving: tuple[str, ...]
    trained: Mapping[str, int]
    default: str | None

"""What a fake engine is told to do, and what it says of adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from rl_vllm.errors import ConfigError, UnsupportedByEngineError
from rl_vllm.testing.answers import FakeRequest, FakeScript
from rl_vllm.testing.gate import Gate
from rl_vllm.types import LoRAAdapter, LoRALimits

FAKE_LIMITS = LoRALimits(max_rank=16, max_loaded=8, max_running=8)


def _no_gate(_request: FakeRequest) -> None:
    return None


def _no_delay(_request: FakeRequest) -> float:
    return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeEngineScript:
    """What a fake engine does beyond the default; every field changes one thing.

    Attributes:
        answers: Responses, failures and errors of stage and commit; where it says row, an engine takes the request's
            number. A service numbers its first requests 0, 1, ... in the order of their rows.
        gate: Where a request waits before it is answered (asked with its first sample), or None.
        delay_s: Seconds a request takes.
        piece_gate: Where every piece of a streamed response but the first waits.
        stage_gate: Where ``stage_weights`` waits.
        commit_gate: Where ``commit_weights`` waits, already paused.
        adapter_gate: Where ``add_lora`` waits.
        adapter_error: Raised by ``add_lora``.
        lora_limits: What adapters it takes; None runs it without LoRA. Ranks and modules are not looked at.
        dies_after: The engine dies when it has yielded this many chunks in its life; every request is one chunk.
        lost: Numbers of requests that a stream ends without answering.
        repeats: Every chunk is yielded twice.
    """

    answers: FakeScript = field(default_factory=FakeScript)
    gate: Callable[[FakeRequest], Gate | None] = _no_gate
    delay_s: Callable[[FakeRequest], float] = _no_delay
    piece_gate: Gate | None = None
    stage_gate: Gate | None = None
    commit_gate: Gate | None = None
    adapter_gate: Gate | None = None
    adapter_error: Exception | None = None
    lora_limits: LoRALimits | None = FAKE_LIMITS
    dies_after: int | None = None
    lost: frozenset[int] = frozenset()
    repeats: bool = False

    def __post_init__(self) -> None:
        if self.answers.columns is not None:
            raise ConfigError("an engine numbers its answers: FakeScript.columns is for FakeService alone")


def require_room(adapter: LoRAAdapter, loaded: Mapping[str, LoRAAdapter], limits: LoRALimits | None) -> None:
    """As a real engine: no LoRA, a name or number that is taken, or no free slot is refused.

    Raises:
        UnsupportedByEngineError: There are no limits, so there is no LoRA.
        ConfigError: It cannot be added beside what is loaded.
    """
    if limits is None:
        raise UnsupportedByEngineError("this engine runs without LoRA")
    if adapter.name in loaded:
        raise ConfigError(f"adapter {adapter.name!r} is loaded as another one: remove it first")
    if adapter.number in {other.number for other in loaded.values()}:
        raise ConfigError(f"number {adapter.number} is taken: give another")
    if len(loaded) >= limits.max_loaded:
        raise ConfigError(f"the engine holds {len(loaded)} adapters, as many as it may: remove one")


def require_idle(name: str, running: Iterable[FakeRequest]) -> None:
    """Raise :class:`ConfigError` while requests name an adapter."""
    users = sum(request.lora == name for request in running)
    if users:
        raise ConfigError(f"adapter {name!r} is used by {users} unfinished requests: wait for them or abort them")

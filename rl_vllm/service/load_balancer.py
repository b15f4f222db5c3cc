"""The router on its own: one prompt at a time, over anything that answers prompts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from threading import Lock
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rl_vllm.config import RoutingConfig
from rl_vllm.errors import ConfigError
from rl_vllm.service.router import Router, Snapshot
from rl_vllm.types import PromptBatch

DEFAULT_STRATEGY = ("prefix-aware", "requests")
# vLLM's block on GPUs.
BLOCK_SIZE = 16
# A text is routed without its tokenizer; a token of English has about four bytes.
_BYTES_PER_TOKEN = 4

Prompt = str | Sequence[int] | Mapping[str, object]


@runtime_checkable
class BalancedService(Protocol):
    """What a balancer needs of a service whose driver counts what is outstanding."""

    @property
    def actors(self) -> Sequence[object]:
        """The replicas; a snapshot's indices are positions here."""
        ...

    def snapshot(self) -> Snapshot:
        """The replicas that may be chosen now, and what they hold."""
        ...


class LoadBalancer:
    """Chooses which actor answers the next prompt, without asking any of them.

    Over a list it counts what it is told: :meth:`acquire` chooses an actor and counts one more request there,
    :meth:`release` one less, and :meth:`request` does both around a block. Over a service the service counts, and they
    change nothing. May be used from several threads.

    Args:
        actors: A list of anything, or a service.
        strategy: Names from ``ROUTING_STRATEGIES``, tried in order: one without an opinion leaves it to the next, and
            the last one decides. None means ``("prefix-aware", "requests")``.
        prefix_length: Longest prefix that is looked at, in tokens; four bytes of text count as one.
        overload_threshold: Above this many times the mean load an actor keeps neither its prefixes nor its sessions.
        block_size: Tokens per block; prefixes are compared in whole blocks, and a prompt shorter than one as a whole.

    Raises:
        ConfigError: There is no actor, or a setting is not valid.
    """

    def __init__(
        self,
        actors: Sequence[object] | BalancedService,
        strategy: str | Sequence[str] | None = None,
        prefix_length: int = 1024,
        overload_threshold: float = 1.5,
        *,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        names = DEFAULT_STRATEGY if strategy is None else (strategy,) if isinstance(strategy, str) else tuple(strategy)
        self._config = RoutingConfig(strategy=names, prefix_length=prefix_length, overload_threshold=overload_threshold)
        self._service: BalancedService | None = None
        self._actors: Sequence[object] = ()
        if isinstance(actors, BalancedService):
            self._service = actors
        elif isinstance(actors, Sequence) and not isinstance(actors, str):
            self._actors = list(actors)
        else:
            raise ConfigError(f"actors must be a list of actors or a service, got {type(actors).__name__}")
        if not self.actors:
            raise ConfigError("actors is empty: there is nobody to choose")
        self._block_size = min(block_size, prefix_length)
        # A request counts as one whatever its length, so tokens saved cannot be weighed against load.
        saved_weight = 1.0 if self._service is not None else 0.0
        self._router = Router(self._config, block_size=self._block_size, saved_weight=saved_weight)
        self._in_flight = [0] * len(self.actors)
        self._lock = Lock()

    @property
    def actors(self) -> Sequence[object]:
        return self._actors if self._service is None else self._service.actors

    def select_actor(self, prompt: Prompt | None = None, request_context: Mapping[str, object] | None = None) -> int:
        """Position in ``actors`` of the one that should answer the next prompt.

        Args:
            prompt: Text, token ids, a mapping with ``prompt_token_ids`` or ``prompt`` (vLLM's ``TokensPrompt`` and
                ``TextPrompt``), or None: then only load and session count.
            request_context: ``session_id`` keeps the requests of a session on one actor; other entries are ignored.

        Raises:
            ConfigError: The prompt is none of these.
        """
        with self._lock:
            return self._select(prompt, request_context)

    def acquire(self, prompt: Prompt | None = None, request_context: Mapping[str, object] | None = None) -> int:
        """Choose an actor and count one more request there, in one step; returns its position in ``actors``."""
        with self._lock:
            index = self._select(prompt, request_context)
            if self._service is None:
                self._in_flight[index] += 1
            return index

    def release(self, index: int) -> None:
        """Count one request less on an actor, whatever became of it.

        Raises:
            ConfigError: Nothing is in flight there.
        """
        if self._service is not None:
            return
        with self._lock:
            if not 0 <= index < len(self._in_flight) or self._in_flight[index] == 0:
                raise ConfigError(f"no request is in flight on actor {index!r}: release each acquired one once")
            self._in_flight[index] -= 1

    @contextmanager
    def request(
        self, prompt: Prompt | None = None, request_context: Mapping[str, object] | None = None
    ) -> Iterator[object]:
        """Acquire an actor for a block of code, and release it in the end; yields the actor."""
        index = self.acquire(prompt, request_context)
        try:
            yield self.actors[index]
        finally:
            self.release(index)

    def forget(self, index: int) -> None:
        """Drop the prefixes and sessions of an actor, for example because it was started again."""
        with self._lock:
            self._router.forget(index)

    def forget_prefixes(self) -> None:
        """Drop the prefixes of all actors, because their caches were reset."""
        with self._lock:
            self._router.forget_prefixes()

    def get_stats(self) -> dict[str, object]:
        """Settings, each actor's load, and what was decided so far, under TorchRL's names where it has one.

        ``cache_usage`` is None where it is unknown: over a list it always is. Of a service's actor that may not be
        chosen now, ``pending_requests`` and ``cache_usage`` are None too.
        """
        with self._lock:
            snapshot = self._snapshot()
            routed = self._router.stats()
        position_of = {index: position for position, index in enumerate(snapshot.indices_R.tolist())}
        actor_stats = []
        for index in range(len(self.actors)):
            position = position_of.get(index)
            usage = None if position is None else float(snapshot.kv_usage_R[position])
            actor_stats.append(
                {
                    "actor_index": index,
                    "pending_requests": None if position is None else int(snapshot.requests_R[position]),
                    "cache_usage": None if usage is None or math.isnan(usage) else usage,
                }
            )
        return {
            "strategies": list(self._config.strategy),
            "primary_strategy": self._config.strategy[0],
            "num_actors": len(self.actors),
            "prefix_length": self._config.prefix_length,
            "overload_threshold": self._config.overload_threshold,
            "round_robin_index": self._router.turn % len(self.actors),
            "actor_stats": actor_stats,
            "decisions": {name: value for name, value in asdict(routed).items() if name != "per_replica"},
            "selected_per_actor": dict(routed.per_replica),
        }

    def _select(self, prompt: Prompt | None, request_context: Mapping[str, object] | None) -> int:
        snapshot = self._snapshot()
        session = None if request_context is None else request_context.get("session_id")
        tokens = _tokens(prompt, self._block_size)
        cost = 1 if self._service is None else _cost(len(tokens), snapshot)
        batch = PromptBatch(
            tokens_T=tokens,
            offsets_B1=np.array([0, len(tokens)], np.int64),
            session_ids=None if session is None else (str(session),),
        )
        position = self._router.assign(batch, (0,), np.array([cost], np.int64), snapshot)[0]
        return int(snapshot.indices_R[position])

    def _snapshot(self) -> Snapshot:
        if self._service is not None:
            return self._service.snapshot()
        loads_R = np.array(self._in_flight, np.int64)
        return Snapshot(
            indices_R=np.arange(len(loads_R)),
            requests_R=loads_R,
            tokens_R=loads_R,
            kv_usage_R=np.full(len(loads_R), np.nan),
        )


def _tokens(prompt: Prompt | None, block_size: int) -> NDArray[np.int32]:
    """What stands for a prompt's ids, int32; what is shorter than a block is filled up to one."""
    if isinstance(prompt, Mapping):
        prompt = _prompt_in(prompt)
    if prompt is None:
        return np.zeros(0, np.int32)
    if isinstance(prompt, str):
        data = prompt.encode("utf-8", "surrogatepass")
        tokens = np.frombuffer(data + bytes(-len(data) % _BYTES_PER_TOKEN), np.int32)
    else:
        tokens = _ids(prompt)
    missing = block_size - len(tokens)
    # -1 is no token id: a short prompt is no prefix of a longer one.
    return np.append(tokens, np.full(missing, -1, np.int32)) if 0 < missing < block_size else tokens


def _ids(prompt: Sequence[int]) -> NDArray[np.int32]:
    try:
        given = np.asarray(prompt)
    except ValueError:
        # Lists of different lengths.
        given = np.zeros((0, 0))
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise ConfigError(
            f"prompt must be a text, a flat list of token ids, a mapping with either, or None, got {prompt!r:.80}"
        )
    return given.astype(np.int32)


def _prompt_in(prompt: Mapping[str, object]) -> str | Sequence[int]:
    ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
    if isinstance(ids, Sequence) and not isinstance(ids, str):
        return ids
    if isinstance(text, str):
        return text
    raise ConfigError(f"a prompt that is a mapping needs prompt_token_ids or prompt, got the keys {sorted(prompt)}")


def _cost(num_tokens: int, snapshot: Snapshot) -> int:
    """Tokens that a prompt may cost: its own, and what a request that is outstanding now costs on average."""
    num_requests = int(snapshot.requests_R.sum())
    return max(1, num_tokens + (int(snapshot.tokens_R.sum()) // num_requests if num_requests else 0))

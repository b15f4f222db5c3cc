"""Sleep: memory given back and taken again, and what a refit may do in between.

Requests are kept, running ones too: they wait, and rebuild their KV when the engine is awake. vLLM goes on with them as
soon as all memory is back, whatever is in it. After level 2 that would be before the weights are: the KV cache then
stays asleep until a refit is committed, also when it was to be woken before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM

from rl_vllm.errors import ConfigError, RefitError, UnsupportedByEngineError

logger = logging.getLogger(__name__)

WEIGHTS, KV_CACHE = TAGS = ("weights", "kv_cache")
_DROP_WEIGHTS = 2
Answered = Callable[[Coroutine[Any, Any, Any]], Coroutine[Any, Any, Any]]


class Sleep:
    """Whether one engine sleeps.

    Args:
        llm: The engine.
        answered: Waits for a call into the engine's processes.
        on_cpu: Whether vLLM runs on CPUs here, where it sleeps without freeing anything.
    """

    def __init__(self, llm: AsyncLLM, answered: Answered, *, on_cpu: bool) -> None:
        self._llm = llm
        self._answered = answered
        self._on_cpu = on_cpu
        self._has_warned = False
        self._level = 0
        self._asleep: set[str] = set()
        self._weights_missing = False
        self._kv_cache_is_wanted = False

    @property
    def is_sleeping(self) -> bool:
        return bool(self._asleep)

    async def sleep(self, level: int) -> None:
        """Fall asleep; at the same level already: no-op.

        Raises:
            UnsupportedByEngineError: The engine was started without what sleeping needs.
            ConfigError: The level is not one, or the engine sleeps at the other one.
        """
        if isinstance(level, bool) or level not in (1, _DROP_WEIGHTS):
            raise ConfigError(f"level must be 1 (weights go to the host) or 2 (weights are dropped), got {level!r}")
        if self._asleep:
            if level == self._level and self._asleep == set(TAGS):
                return
            raise ConfigError(f"the engine sleeps at level {self._level} already: wake it up first")
        if not self._on_cpu and not self._llm.model_config.enable_sleep_mode:
            raise UnsupportedByEngineError(
                'this engine cannot sleep: start it with EngineConfig(engine_kwargs={"enable_sleep_mode": True})'
            )
        if self._on_cpu and not self._has_warned:
            self._has_warned = True
            logger.warning("sleep pauses a CPU engine and gives no memory back: vLLM's CPU build has no sleep mode")
        await self._answered(self._llm.sleep(level, mode="keep"))
        self._level = level
        self._asleep = set(TAGS)
        self._weights_missing |= level == _DROP_WEIGHTS
        self._kv_cache_is_wanted = False

    async def wake_up(self, tags: tuple[str, ...] | None) -> None:
        """Take memory again; what is awake stays so.

        Raises:
            ConfigError: A tag is not one.
        """
        wanted = set(TAGS if tags is None else tags)
        if not wanted <= set(TAGS):
            raise ConfigError(f"tags must be among {', '.join(TAGS)}, or None for all, got {tags!r}")
        wanted &= self._asleep
        if KV_CACHE in wanted and self._weights_missing:
            wanted.discard(KV_CACHE)
            self._kv_cache_is_wanted = True
            logger.info("the KV cache wakes with the next refit: level 2 dropped the weights")
        # Weights first: with all memory back, vLLM goes on at once.
        for tag in (tag for tag in TAGS if tag in wanted):
            await self._answered(self._llm.wake_up([tag]))
            self._asleep.discard(tag)

    def require_memory_for_weights(self, version: int) -> None:
        """Raise :class:`RefitError` when there is no memory to load weights into."""
        if WEIGHTS in self._asleep:
            raise RefitError(version, "commit", (), "the engine's weights sleep: wake_up(('weights',)) first")

    async def weights_came(self) -> None:
        """A refit was committed: what waited for it may go on."""
        self._weights_missing = False
        if self._kv_cache_is_wanted:
            self._kv_cache_is_wanted = False
            await self.wake_up((KV_CACHE,))

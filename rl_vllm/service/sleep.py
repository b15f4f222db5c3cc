"""Sleep and what it forbids: who may generate, and who may load weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rl_vllm.errors import ConfigError, DeadlineError, ServiceAsleepError, UnsupportedByEngineError
from rl_vllm.protocols import Engine
from rl_vllm.service.fan_out import FanOut
from rl_vllm.service.replicas import Replica, ReplicaSet
from rl_vllm.types import ReplicaState

LEVELS = (1, 2)
TAGS = ("weights", "kv_cache")


class SleepControl:
    """Whether the engines of a service sleep; used on the service's loop only.

    Sleeping waits for what is outstanding and refuses what is new. After level 2 the weights are gone: waking them
    gives memory without values, and nothing is generated until a refit has been committed.

    One replica may sleep alone, at level 1: it is taken out of routing until it wakes.

    Args:
        replicas: All replicas.
        on_replicas: Calls to all of them.
    """

    def __init__(self, replicas: ReplicaSet, on_replicas: FanOut) -> None:
        self._replicas = replicas
        self._on_replicas = on_replicas
        self._alone: dict[int, Engine] = {}
        self._level: int | None = None
        self._asleep: frozenset[str] = frozenset()
        self._falling = False
        self._weights_missing = False
        self._users = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._turn = asyncio.Lock()

    @property
    def level(self) -> int | None:
        """1 or 2 while anything sleeps, else None."""
        return self._level

    @property
    def weights_missing(self) -> bool:
        """Whether a level-2 sleep has dropped the weights and no refit has brought new ones."""
        return self._weights_missing

    @contextmanager
    def awake(self, call: str, only: int | None = None) -> Iterator[None]:
        """Keep the engines awake while requests run.

        Args:
            call: Named in errors.
            only: Index of the one replica that is to answer, or None for any.

        Raises:
            ServiceAsleepError: They sleep, are about to, or have no weights.
        """
        remedy = self._remedy()
        if remedy is None and only in self._asleep_alone():
            remedy = f"replica {only} sleeps: call wake_up(actor_index={only}), or let another one answer"
        if remedy is not None:
            raise ServiceAsleepError(call, remedy)
        self._users += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._idle.set()

    def require_weights_awake(self, call: str) -> None:
        """Raise :class:`ServiceAsleepError` when there is no memory to load weights into."""
        if "weights" in self._asleep:
            raise ServiceAsleepError(call, "the weights sleep: call wake_up(tags=['weights']) first")
        alone = self._asleep_alone()
        if alone:
            raise ServiceAsleepError(call, f"replica {alone[0]} sleeps: call wake_up(actor_index={alone[0]}) first")

    def weights_came(self) -> None:
        """A refit has been committed."""
        self._weights_missing = False

    async def sleep(self, level: int, *, within_s: float) -> None:
        """Wait until nothing is outstanding, then put every replica to sleep; asleep at this level already: no-op.

        Raises:
            ConfigError: The level is neither 1 nor 2, the engines sleep at the other one, or a replica sleeps alone.
            DeadlineError: Requests were still outstanding after ``within_s``; the service stays awake.
            UnsupportedByEngineError: The engines cannot sleep; the service stays awake.
            ReplicaCallError: It failed on some; the service counts as asleep, ``wake_up()`` ends it. So it does when
                this is cancelled while engines fall asleep.
        """
        if isinstance(level, bool) or level not in LEVELS:
            raise ConfigError(
                f"level must be 1 (weights go to the host's memory) or 2 (weights are dropped), got {level!r}"
            )
        async with self._turn:
            if self._level is not None:
                if level == self._level and self._asleep == frozenset(TAGS):
                    return
                raise ConfigError(f"the service sleeps at level {self._level} already: call wake_up() first")
            alone = self._asleep_alone()
            if alone:
                raise ConfigError(f"replica {alone[0]} sleeps already: call wake_up(actor_index={alone[0]}) first")
            self._falling = True
            try:
                await self._until_idle(within_s)
                await self._fall_asleep(level)
            finally:
                self._falling = False

    async def _until_idle(self, within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                await self._idle.wait()
        except TimeoutError:
            raise DeadlineError(
                f"{self._users} calls with outstanding requests to end before sleep", within_s
            ) from None

    async def _fall_asleep(self, level: int) -> None:
        self._on_replicas.targets()  # Raises when there is none that could fall asleep.
        were_missing = self._weights_missing
        # Before the call: however it ends, some may sleep, and none is asked to generate before all have been woken.
        self._level, self._asleep = level, frozenset(TAGS)
        self._weights_missing = were_missing or level == LEVELS[-1]
        try:
            await self._on_replicas("sleep()", lambda engine: engine.sleep(level), long=True)
        except (ConfigError, UnsupportedByEngineError):
            # Every engine refused: none sleeps.
            self._level, self._asleep, self._weights_missing = None, frozenset(), were_missing
            raise

    async def wake_up(self, tags: Sequence[str] | None) -> None:
        """Wake weights, KV cache, or both (None); awake already: no-op.

        Raises:
            ConfigError: A tag is neither "weights" nor "kv_cache".
            ReplicaCallError: It failed on some; what was to be woken counts as asleep.
        """
        wanted = _checked_tags(tags)
        async with self._turn:
            if not self._asleep & wanted:
                return
            each = None if wanted == frozenset(TAGS) else tuple(tag for tag in TAGS if tag in wanted)
            await self._on_replicas("wake_up()", lambda engine: engine.wake_up(each), long=True)
            self._asleep -= wanted
            if not self._asleep:
                self._level = None

    async def sleep_one(self, index: int, level: int, *, within_s: float) -> None:
        """Take one replica out of routing, wait until it has finished what it has, and put it to sleep; asleep: no-op.

        Raises:
            ReplicaIndexError: There is none with this index.
            ConfigError: The level is not 1, the whole service sleeps, the replica does not serve, or fewer than
                ``min_serving`` would be left.
            DeadlineError: It had not finished after ``within_s``; it serves on.
            ReplicaCallError: Its engine failed to; it serves on.
        """
        replica = self._replicas.by_index(index)
        async with self._turn:
            if index in self._asleep_alone():
                return
            self._require_may_sleep(replica, level)
            self._replicas.set_state(replica, ReplicaState.DRAINING, f"asleep: wake_up(actor_index={index}) ends it")
            try:
                await self._until_drained(replica, within_s)
                await self._on_replicas("sleep()", lambda engine: engine.sleep(level), only=index, long=True)
            except BaseException:
                self._back(replica, "it could not go to sleep")
                raise
            self._alone[index] = replica.engine

    async def wake_one(self, index: int, tags: Sequence[str] | None) -> None:
        """Wake one replica that sleeps alone and let it serve; awake already: no-op.

        Raises:
            ReplicaIndexError: There is none with this index.
            ConfigError: Only some tags are given, or the whole service sleeps.
            ReplicaCallError: Its engine failed to; it counts as asleep.
        """
        replica = self._replicas.by_index(index)
        if _checked_tags(tags) != frozenset(TAGS):
            raise ConfigError(f"one replica wakes whole: leave tags={tags!r} out")
        async with self._turn:
            if self._level is not None:
                raise ConfigError("the whole service sleeps: call wake_up() without actor_index")
            if index not in self._asleep_alone():
                return
            await self._on_replicas("wake_up()", lambda engine: engine.wake_up(None), only=index, long=True)
            del self._alone[index]
            self._back(replica, "it woke up")

    def _require_may_sleep(self, replica: Replica, level: int) -> None:
        if level != LEVELS[0]:
            raise ConfigError(
                f"one replica sleeps at level 1, got {level!r}: level 2 needs a refit, which takes all replicas"
            )
        if self._level is not None:
            raise ConfigError(f"the service sleeps at level {self._level} already: call wake_up() first")
        if not replica.state.serves:
            raise ConfigError(f"replica {replica.index} is {replica.state.value}: only one that serves can sleep")
        left, floor = len(self._replicas.serving_now()) - 1, self._replicas.min_serving
        if left < floor:
            raise ConfigError(
                f"without replica {replica.index}, {left} replicas would serve, fewer than min_serving={floor}: "
                "put the whole service to sleep"
            )

    async def _until_drained(self, replica: Replica, within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                await replica.idle.wait()
        except TimeoutError:
            waited_for = f"{replica.outstanding_requests} requests of replica {replica.index} to end before sleep"
            raise DeadlineError(waited_for, within_s) from None

    def _back(self, replica: Replica, reason: str) -> None:
        if replica.state is ReplicaState.DRAINING:
            self._replicas.set_state(replica, ReplicaState.HEALTHY, reason)

    def _asleep_alone(self) -> list[int]:
        """Indices of those that sleep alone; one that has died since came back awake."""
        for replica in self._replicas.all:
            if self._alone.get(replica.index) is not None and (
                replica.state is not ReplicaState.DRAINING or replica.engine is not self._alone[replica.index]
            ):
                del self._alone[replica.index]
        known = {replica.index for replica in self._replicas.all}
        return sorted(index for index in self._alone if index in known)

    async def restore(self, replica: Replica) -> None:
        """Put a replica that has just started to sleep when the others sleep."""
        async with self._turn:
            if self._level is None:
                return
            # Level 2 would drop the weights that a refit since then has brought, and it has been given already.
            await replica.engine.sleep(self._level if self._weights_missing else LEVELS[0])
            awake = tuple(tag for tag in TAGS if tag not in self._asleep)
            if awake:
                await replica.engine.wake_up(awake)

    def _remedy(self) -> str | None:
        if self._falling:
            return "it is going to sleep: wait for it, then call wake_up()"
        if self._asleep and self._weights_missing:
            return "call wake_up(tags=['weights']), push weights, then wake_up(tags=['kv_cache'])"
        if self._asleep:
            return f"call wake_up() ({' and '.join(sorted(self._asleep))} sleep at level {self._level})"
        if self._weights_missing:
            return "level 2 dropped the weights: push weights first"
        return None


def _checked_tags(tags: Sequence[str] | None) -> frozenset[str]:
    if tags is None:
        return frozenset(TAGS)
    wrong = [tags] if isinstance(tags, str) else [tag for tag in tags if tag not in TAGS]
    if wrong or not tags:
        raise ConfigError(f"tags must be a list of {' or '.join(TAGS)}, or None for both, got {tags!r}")
    return frozenset(tags)

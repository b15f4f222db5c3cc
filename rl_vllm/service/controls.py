"""What vLLM's engine interface offers to ask and do besides generating, on all replicas or on one."""

from __future__ import annotations

import random
from collections.abc import Sequence

from rl_vllm.errors import EngineDiedError, NoReplicaServesError, ReplicaCallError
from rl_vllm.service.calls import GRACE_S, Calls, blocking, long_limit, on_loop, own_limit
from rl_vllm.service.loop import with_deadline
from rl_vllm.service.replicas import Replica
from rl_vllm.types import EngineMetrics, ReplicaState


class ControlCalls(Calls):
    """Health, counts, caches, profiles and calls to workers.

    ``actor_index`` is a replica's index; None means all of them. A call to all that fails on some raises
    :class:`~rl_vllm.errors.ReplicaCallError`, which names them.
    """

    # Health

    @on_loop()
    async def acheck_health(self, actor_index: int | None = None) -> None:
        """Ask every process of the engines, and return when each has answered.

        Raises:
            ReplicaCallError: An engine cannot serve, or a replica has none.
        """
        core = self._running("check_health()")
        if actor_index is None:
            down = [replica for replica in core.replicas.all if not replica.state.is_up]
            if down:
                reasons = tuple((r.index, f"it is {r.state.value} ({r.reason})") for r in down)
                raise ReplicaCallError("check_health()", reasons)
        await core.on_replicas("check_health()", lambda engine: engine.check_health(), only=actor_index)

    check_health = blocking(acheck_health)

    @property
    def num_replicas(self) -> int:
        """Replicas there are, whatever their state."""
        return self.config.num_replicas if self._core is None else len(self._core.replicas.all)

    @property
    def is_running(self) -> bool:
        """Whether it can answer: launched, not shut down, and enough replicas serve or are on their way."""
        return self._state == "running" and self.dead_error is None

    @property
    def is_stopped(self) -> bool:
        """Whether it was shut down, or can no longer answer."""
        return self._state == "shut down" or self.errored

    @property
    def errored(self) -> bool:
        """Whether it was not shut down, but can no longer answer."""
        return self._state == "running" and self.dead_error is not None

    @property
    def dead_error(self) -> NoReplicaServesError | None:
        """What every call would raise, or None."""
        if self._core is None or not self._core.replicas.below_floor:
            return None
        return self._core.replicas.too_few()

    def replica(self, actor_index: int) -> ReplicaView:
        """What is known of one replica without asking it.

        Raises:
            ReplicaIndexError: No replica has this index.
        """
        return ReplicaView(self._running("replica()").replicas.by_index(actor_index))

    # Counts

    @on_loop()
    async def ametrics(self) -> list[EngineMetrics | None]:
        """Each engine's own counts, in the order of the replicas; None for one that does not run."""
        core = self._running("metrics()")
        targets = core.replicas.living()
        results = await core.on_replicas.gather(targets, lambda engine: engine.metrics())
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, EngineDiedError):
                raise result
        known = {r.index: m for r, m in zip(targets, results, strict=True) if not isinstance(m, BaseException)}
        return [known.get(replica.index) for replica in core.replicas.all]

    metrics = blocking(ametrics)

    @on_loop()
    async def aget_num_unfinished_requests(self, actor_index: int | None = None) -> int | list[int | None] | None:
        """Requests that the engines hold, by their own count: of one, or a list of all; None where none runs.

        Raises:
            ReplicaIndexError: No replica has this index.
            ServiceNotRunningError: Before launch or after shutdown.
        """
        counts = [None if m is None else m.num_running + m.num_waiting for m in await self._metrics_of(actor_index)]
        return counts if actor_index is None else counts[0]

    get_num_unfinished_requests = blocking(aget_num_unfinished_requests)

    @on_loop()
    async def aget_cache_usage(self, actor_index: int | None = None) -> float | list[float | None] | None:
        """Fraction of KV blocks in use, in [0, 1], by the engines' own count; as for unfinished requests."""
        usage = [None if m is None else m.kv_cache_usage for m in await self._metrics_of(actor_index)]
        return usage if actor_index is None else usage[0]

    get_cache_usage = blocking(aget_cache_usage)

    async def _metrics_of(self, actor_index: int | None) -> list[EngineMetrics | None]:
        if actor_index is None:
            return await self.ametrics()
        core = self._running("metrics()")
        replica = core.replicas.by_index(actor_index)
        if not replica.state.is_up:
            return [None]
        ((_, found),) = await core.on_replicas("metrics()", lambda engine: engine.metrics(), only=actor_index)
        return [found]

    def get_random_actor_index(self) -> int:
        """Index of a replica that serves, each as likely as the others.

        Raises:
            NoReplicaServesError: There is none.
        """
        return random.choice(self._running("get_random_actor_index()").replicas.serving()).index

    # Caches, profiles, workers

    @on_loop()
    async def areset_prefix_cache(self, actor_index: int | None = None) -> bool:
        """Forget cached KV; False when running requests hold some of it."""
        core = self._running("reset_prefix_cache()")
        done = await core.on_replicas(
            "reset_prefix_cache()", lambda engine: engine.reset_prefix_cache(), only=actor_index
        )
        for replica, _ in done:
            core.router.forget(replica.index)
        return all(reset for _, reset in done)

    reset_prefix_cache = blocking(areset_prefix_cache)

    @on_loop()
    async def areset_mm_cache(self, actor_index: int | None = None) -> None:
        """Forget cached multi-modal inputs."""
        core = self._running("reset_mm_cache()")
        await core.on_replicas("reset_mm_cache()", lambda engine: engine.reset_mm_cache(), only=actor_index)

    reset_mm_cache = blocking(areset_mm_cache)

    @on_loop()
    async def astart_profile(self, actor_index: int | None = None) -> None:
        """Begin a profile in every worker.

        Raises:
            UnsupportedByEngineError: The engines were started without a profiler.
        """
        core = self._running("start_profile()")
        await core.on_replicas("start_profile()", lambda e: e.start_profile(), only=actor_index, long=True)

    start_profile = blocking(astart_profile)

    @on_loop(long_limit)
    async def astop_profile(self, actor_index: int | None = None) -> None:
        """End the profile; the engines write their traces."""
        core = self._running("stop_profile()")
        await core.on_replicas("stop_profile()", lambda e: e.stop_profile(), only=actor_index, long=True)

    stop_profile = blocking(astop_profile)

    @on_loop(own_limit)
    async def acollective_rpc(
        self,
        method: str,
        timeout: float | None = None,  # noqa: ASYNC109 (vLLM's name for it)
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
        *,
        actor_index: int | None = None,
    ) -> list[list[object]]:
        """Call a method on every worker.

        Args:
            method: Its name on the worker, or on vLLM's worker extension.
            timeout: Limit in seconds; None means the configured one for calls.
            args: Positional arguments.
            kwargs: Keyword arguments.
            actor_index: One replica's index, or None for all.

        Returns:
            For each replica a list with each worker's answer.
        """
        core = self._running("collective_rpc()")
        limit_s = self.config.rpc_timeout_s if timeout is None else timeout
        call = f"collective_rpc({method!r})"
        done = await with_deadline(
            lambda: core.on_replicas(
                call,
                lambda e: e.collective_rpc(method, timeout_s=limit_s, args=tuple(args), kwargs=kwargs),
                only=actor_index,
                # A worker that is busy with it answers no health check.
                long=True,
                within_s=limit_s,
            ),
            limit_s + GRACE_S,
            call,
        )
        return [answers for _, answers in done]

    collective_rpc = blocking(acollective_rpc)


class ReplicaView:
    """One replica as the driver knows it; every value is as of the moment it is read."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    @property
    def index(self) -> int:
        return self._replica.index

    @property
    def state(self) -> ReplicaState:
        return self._replica.state

    @property
    def reason(self) -> str:
        """Why it is in its state; may be empty."""
        return self._replica.reason

    @property
    def weight_version(self) -> int:
        """The version it committed last."""
        return self._replica.version

    @property
    def is_running(self) -> bool:
        """Whether it is given requests."""
        return self._replica.state.serves

    @property
    def is_stopped(self) -> bool:
        """Whether its engine does not run."""
        return not self._replica.state.is_up

    @property
    def errored(self) -> bool:
        """Whether its engine died, or is being started again because it had."""
        return self._replica.state in (ReplicaState.DEAD, ReplicaState.RESTARTING, ReplicaState.RETIRED)

    @property
    def dead_error(self) -> EngineDiedError | None:
        """What became of its engine, or None while that is well."""
        return EngineDiedError(self.index, self.reason) if self.errored else None

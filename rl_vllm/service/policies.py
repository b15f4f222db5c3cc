"""Adapters that are trained while they serve: which version of each answers, and when an old one may go.

Every version is an adapter of its own on the engines, ``policy@v7``, so that vLLM keeps its KV apart and requests in
flight end under the version they began with. What requests call ``policy`` is a name of the service's alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rl_vllm.errors import AdapterRefitError, ConfigError, RLVLLMError
from rl_vllm.service.adapters import Adapter, AdapterRegistry
from rl_vllm.service.fan_out import FanOut
from rl_vllm.service.observe.counters import ServiceCounters
from rl_vllm.types import BASE_MODEL, AdapterState, AdapterUpdate, CompletionBatch, LoRALimits, PromptBatch

logger = logging.getLogger(__name__)

_RETRY_S = 0.05


@dataclass(slots=True, eq=False)
class PolicyVersion:
    """One version of a trained adapter.

    Attributes:
        name: What trainer and requests call the adapter.
        version: Its own.
        next_version: The version that took its place, or None.
        num_users: Calls under way whose requests use it.
        is_retired: No request may begin with it; it goes when nobody uses it.
    """

    name: str
    version: int
    next_version: int | None = None
    num_users: int = 0
    is_retired: bool = False

    @property
    def full_name(self) -> str:
        """The engines' name for it."""
        return AdapterUpdate.full_name_of(self.name, self.version)

    def label(self, weights_T: NDArray[np.int32]) -> NDArray[np.int32]:
        """The version of each token that was made with this adapter over base weights of these versions.

        It is the newer of the two while this adapter was the newest. A token of base weights that came after the next
        adapter was made by no version of the policy; it is labelled by the older part, this adapter.
        """
        is_of_base = weights_T > self.version
        if self.next_version is not None:
            is_of_base &= weights_T < self.next_version
        labels: NDArray[np.int32] = np.where(is_of_base, weights_T, np.int32(self.version))
        return labels


@dataclass(frozen=True, slots=True)
class AdapterLease:
    """Adapters that stay loaded while a call uses them.

    Attributes:
        prompts: The call's prompts, with the engines' names of their adapters.
        rows: The rows of each version in use, int64 ascending.
    """

    prompts: PromptBatch
    rows: tuple[tuple[PolicyVersion, NDArray[np.int64]], ...]

    def label(self, chunk: CompletionBatch) -> CompletionBatch:
        """Answers to rows of the call, with the versions of the adapters that made them."""
        if not self.rows or not len(chunk.tokens_T):
            return chunk
        versions_T = chunk.versions_T.copy()
        for policy, rows in self.rows:
            mine_T = np.repeat(np.isin(chunk.numbers_N, rows), chunk.lengths_N)
            versions_T[mine_T] = policy.label(versions_T[mine_T])
        return replace(chunk, versions_T=versions_T)


class PolicyAdapters:
    """The trained adapters of a service; used on the service's loop only.

    Args:
        registry: Where adapters are loaded.
        on_replicas: Calls to all replicas.
        counters: Where refits are counted.

    Attributes:
        version: The newest version that was committed; 0 before the first.
        default: Name of the adapter of requests that name none, or None.
    """

    def __init__(self, registry: AdapterRegistry, on_replicas: FanOut, counters: ServiceCounters) -> None:
        self.version = 0
        self.default: str | None = None
        self._registry = registry
        self._on_replicas = on_replicas
        self._counters = counters
        self._current: dict[str, PolicyVersion] = {}
        # By full name: every version that the engines have, staged, current or retired.
        self._versions: dict[str, PolicyVersion] = {}
        self._limits: tuple[LoRALimits | None] | None = None
        self._left = asyncio.Event()
        self._sweeping: asyncio.Task[None] | None = None
        self._is_closed = False

    async def limits(self) -> LoRALimits | None:
        """What adapters the engines take, None without LoRA; asked for once."""
        if self._limits is None:
            first = self._on_replicas.targets()[0].index
            ((_, limits),) = await self._on_replicas("lora_limits()", lambda e: e.lora_limits(), only=first)
            self._limits = (limits,)
        return self._limits[0]

    def trained(self) -> dict[str, int]:
        """The version that answers for each trained adapter."""
        return {name: policy.version for name, policy in self._current.items()}

    async def state(self) -> AdapterState:
        """What a trainer must know before it sends a version."""
        retired = {full for full, policy in self._versions.items() if policy.is_retired}
        occupants = self._registry.occupants
        return AdapterState(
            limits=await self.limits(),
            loaded=tuple(name for name in occupants if name not in retired),
            leaving=tuple(name for name in occupants if name in retired),
            trained=self.trained(),
            default=self.default,
        )

    async def stage(self, update: AdapterUpdate, *, within_s: float) -> float:
        """Load a version on every replica, or on none; nobody uses it yet.

        Returns:
            How long the slowest replica took, in seconds.

        Raises:
            AdapterRefitError: Phase "stage". It failed on some, which are named; or no slot became free.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within_s
        await self._make_room(update, within_s)
        left_s = max(deadline - loop.time(), 0.001)
        targets, results = await self._registry.load(
            update.full_name, update.path, checksum=update.checksum, within_s=left_s
        )
        failed = [(r.index, e) for r, e in zip(targets, results, strict=True) if isinstance(e, BaseException)]
        if failed:
            self._counters.refits_failed += 1
            index, first = failed[0]
            reason = f"replica {index}: {first}" if str(first) else f"replica {index}: {type(first).__name__}"
            raise AdapterRefitError(update.version, "stage", tuple(i for i, _ in failed), reason) from first
        self._versions[update.full_name] = PolicyVersion(update.name, update.version)
        return max(result for result in results if not isinstance(result, BaseException))

    def commit(self, update: AdapterUpdate, *, default: bool) -> int:
        """Answer by a staged version from now on, everywhere at once, and let the old one go when nobody uses it.

        Returns:
            The number of replicas that have it.
        """
        # First, because it fails when none is left.
        num_replicas = len(self._on_replicas.targets())
        policy = self._versions[update.full_name]
        old = self._current.get(update.name)
        self._current[update.name] = policy
        self._registry.reserved.add(update.name)
        if default:
            self.default = update.name
        self.version = max(self.version, update.version)
        if old is not None:
            old.next_version = update.version
            self._retire(old)
        self._counters.refits += 1
        return num_replicas

    async def discard(self, update: AdapterUpdate) -> None:
        """Remove a staged version that will not be committed; returns when the engines have been told."""
        policy = self._versions.get(update.full_name)
        if policy is not None and self._current.get(update.name) is not policy:
            self._counters.refits_failed += 1
            self._retire(policy)
            if self._sweeping is not None:
                await asyncio.wait([self._sweeping])

    async def remove(self, adapter: Adapter | int) -> bool:
        """Remove any adapter; False when there is none of this name or number.

        Of a trained one no request may begin any more, and those that named none get the base model; its version goes
        when nobody uses it.

        Raises:
            ConfigError: It is one version of a trained adapter, which is removed by the adapter's own name.
            ReplicaCallError: It failed on some.
        """
        if isinstance(adapter, str) and adapter in self._current:
            if self.default == adapter:
                self.default = None
            self._retire(self._current.pop(adapter))
            self._registry.reserved.discard(adapter)
            return True
        known = self._registry.find(adapter)
        version = None if known is None else self._versions.get(known.name)
        if version is not None:
            raise ConfigError(f"{adapter!r} is a version of the trained adapter {version.name!r}: remove that one")
        return await self._registry.remove(adapter)

    @asynccontextmanager
    async def lease(self, prompts: PromptBatch, asked: Sequence[Adapter | None]) -> AsyncIterator[AdapterLease]:
        """Name each prompt's adapter as the engines do, and keep trained versions loaded until the end.

        Raises:
            ConfigError: A name is unknown; and what adding an adapter raises.
        """
        if self.default is None and asked.count(None) == len(asked):
            yield AdapterLease(replace(prompts, loras=None), ())
            return
        used: dict[str, PolicyVersion] = {}
        named = [self._resolve(each, used) for each in asked]
        for policy in used.values():
            policy.num_users += 1
        try:
            names = await self._registry.names(named)
            rows = [
                (policy, np.array([row for row, name in enumerate(named) if name == full], np.int64))
                for full, policy in used.items()
            ]
            yield AdapterLease(replace(prompts, loras=names), tuple(rows))
        finally:
            for policy in used.values():
                policy.num_users -= 1
            self._sweep_soon()

    async def close(self) -> None:
        """Stop removing. Idempotent; the engines keep what they have."""
        self._is_closed = True
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)

    def _resolve(self, asked: Adapter | None, used: dict[str, PolicyVersion]) -> Adapter | None:
        name = self.default if asked is None else asked
        if name == BASE_MODEL or name is None:
            return None
        if not isinstance(name, str):
            return name
        policy = self._current.get(name) or self._versions.get(name)
        if policy is None or policy.is_retired:
            return name
        used[policy.full_name] = policy
        return policy.full_name

    def _retire(self, policy: PolicyVersion) -> None:
        policy.is_retired = True
        self._sweep_soon()

    def _free(self) -> list[PolicyVersion]:
        return [policy for policy in self._versions.values() if policy.is_retired and not policy.num_users]

    def _sweep_soon(self) -> None:
        if self._free() and self._sweeping is None and not self._is_closed:
            self._sweeping = asyncio.create_task(self._sweep(), name="adapters-leave")
            self._sweeping.add_done_callback(self._swept)

    def _swept(self, _task: asyncio.Task[None]) -> None:
        self._sweeping = None

    async def _sweep(self) -> None:
        """Remove what nobody uses; what an engine does not let go is tried again with the next refit."""
        tried: set[str] = set()
        while waiting := [policy for policy in self._free() if policy.full_name not in tried]:
            name = waiting[0].full_name
            tried.add(name)
            try:
                await self._registry.remove(name)
            except RLVLLMError as error:
                logger.warning("adapter %s could not be removed yet: %s", name, error)
                continue
            del self._versions[name]
            self._left.set()
            self._left = asyncio.Event()

    async def _make_room(self, update: AdapterUpdate, within_s: float) -> None:
        """Wait until a slot is free that versions on their way out hold."""
        limits = await self.limits()
        try:
            async with asyncio.timeout(within_s):
                while limits is not None and len(self._registry.occupants) >= limits.max_loaded:
                    if not any(policy.is_retired for policy in self._versions.values()):
                        return  # the engines say what holds their slots
                    left = self._left
                    self._sweep_soon()
                    # Again soon: an engine may take a moment longer than its callers to see that a request has ended.
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_RETRY_S):
                            await left.wait()
        except TimeoutError:
            held = {policy.full_name: policy.num_users for policy in self._versions.values() if policy.is_retired}
            reason = (
                f"no adapter slot became free within {within_s:g} s; old versions and the calls that use them: {held}: "
                "raise engine_kwargs['max_cpu_loras'] or stage_timeout_s"
            )
            raise AdapterRefitError(update.version, "stage", (), reason) from None

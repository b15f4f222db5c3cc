"""What the engines hold in memory besides requests: adapters, and sleep that gives memory back."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial

from rl_vllm.service.adapters import Adapter
from rl_vllm.service.calls import GRACE_S, Calls, blocking, long_limit, on_loop, own_limit
from rl_vllm.service.loop import with_deadline
from rl_vllm.types import AdapterState, AdapterUpdate, LoRAAdapter


class MemoryCalls(Calls):
    """Adapters and sleep."""

    @on_loop(long_limit)
    async def aadd_lora(self, adapter: Adapter, path: str | os.PathLike[str] | None = None) -> LoRAAdapter:
        """Load a LoRA adapter on every replica, or on none; the same one is loaded already: no-op.

        Args:
            adapter: vLLM's ``LoRARequest``, or a name with ``path``.
            path: Folder in PEFT's format, readable on every replica's host.

        Raises:
            ConfigError: The name or the number is taken by another adapter, or it cannot be loaded.
            UnsupportedByEngineError: The engines run without LoRA: pass ``enable_lora=True``.
            ReplicaCallError: It failed on some; it has been unloaded from the others.
        """
        return await self._running("add_lora()").adapters.add(adapter, path)

    add_lora = blocking(aadd_lora)

    @on_loop()
    async def aremove_lora(self, adapter: Adapter | int) -> bool:
        """Unload an adapter, by name or number, from every replica; False when there is none.

        A trained one goes when no request of its is in flight; those that named none get the base model from now on.
        """
        return await self._running("remove_lora()").policies.remove(adapter)

    remove_lora = blocking(aremove_lora)

    @on_loop()
    async def alist_loras(self, actor_index: int | None = None) -> tuple[LoRAAdapter, ...]:
        """The adapters that every replica has, by number; or those that one engine says it has."""
        core = self._running("list_loras()")
        if actor_index is None:
            return core.adapters.list()
        ((_, loaded),) = await core.on_replicas("list_loras()", lambda e: e.list_loras(), only=actor_index)
        return loaded

    list_loras = blocking(alist_loras)

    @on_loop()
    async def apin_lora(self, adapter: Adapter | int) -> LoRAAdapter:
        """Keep an adapter loaded, whatever others are used; raises :class:`ConfigError` when there is none."""
        return await self._running("pin_lora()").adapters.pin(adapter)

    pin_lora = blocking(apin_lora)

    @on_loop()
    async def atrained_adapters(self) -> Mapping[str, int]:
        """The version that answers for each trained adapter; no engine is asked."""
        return self._running("trained_adapters()").policies.trained()

    trained_adapters = blocking(atrained_adapters)

    @on_loop()
    async def aadapter_state(self) -> AdapterState:
        """See :meth:`rl_vllm.protocols.AdapterService.adapter_state`."""
        return await self._running("adapter_state()").policies.state()

    adapter_state = blocking(aadapter_state)

    @on_loop(own_limit)
    async def astage_adapter(self, update: AdapterUpdate, *, timeout_s: float) -> float:
        """See :meth:`rl_vllm.protocols.AdapterService.stage_adapter`."""
        core = self._running("stage_adapter()")
        core.sleep.require_weights_awake("stage_adapter()")
        stage = partial(core.policies.stage, update, within_s=timeout_s)
        # What was half loaded is removed after the limit.
        return await with_deadline(stage, timeout_s + self.config.rpc_timeout_s + GRACE_S, "stage_adapter()")

    stage_adapter = blocking(astage_adapter)

    @on_loop()
    async def acommit_adapter(self, update: AdapterUpdate, *, default: bool) -> int:
        """See :meth:`rl_vllm.protocols.AdapterService.commit_adapter`."""
        return self._running("commit_adapter()").policies.commit(update, default=default)

    commit_adapter = blocking(acommit_adapter)

    @on_loop()
    async def adiscard_adapter(self, update: AdapterUpdate) -> None:
        """See :meth:`rl_vllm.protocols.AdapterService.discard_adapter`."""
        await self._running("discard_adapter()").policies.discard(update)

    discard_adapter = blocking(adiscard_adapter)

    @on_loop(own_limit)
    async def asleep(
        self, level: int = 1, *, timeout_seconds: float | None = None, actor_index: int | None = None
    ) -> None:
        """Give memory back: KV caches are dropped; weights go to the host (level 1) or are dropped too (level 2).

        From now on requests are refused; those outstanding are waited for. Asleep already: no-op. After level 2 a refit
        must bring weights before anything is generated: ``wake_up(tags=["weights"])``, refit,
        ``wake_up(tags=["kv_cache"])``.

        Args:
            level: 1 or 2.
            timeout_seconds: Limit for outstanding requests to end; None means the configured one for requests.
            actor_index: One replica alone, at level 1: it is taken out of routing until it wakes. None for all.

        Raises:
            ConfigError: The level is not one, or the engines sleep otherwise already.
            DeadlineError: Requests were still outstanding; the engines stay awake.
            UnsupportedByEngineError: The engines were started without what sleep needs.
            ReplicaCallError: It failed on some; the service counts as asleep, ``wake_up()`` ends that.
        """
        core = self._running("sleep()")
        within_s = self.config.request_timeout_s if timeout_seconds is None else timeout_seconds
        if actor_index is None:
            work = core.sleep.sleep(level, within_s=within_s)
        else:
            work = core.sleep.sleep_one(actor_index, level, within_s=within_s)
        await with_deadline(lambda: work, within_s + long_limit(self.config), "sleep()")

    sleep = blocking(asleep)

    @on_loop(long_limit)
    async def awake_up(self, tags: Sequence[str] | None = None, *, actor_index: int | None = None) -> None:
        """Take memory again; what is awake stays so.

        Args:
            tags: ``["weights"]``, ``["kv_cache"]``, or None for both.
            actor_index: The one replica that sleeps alone, or None for all.

        Raises:
            ConfigError: A tag is not one.
            ReplicaCallError: It failed on some; call it again.
        """
        core = self._running("wake_up()")
        if actor_index is None:
            await core.sleep.wake_up(tags)
        else:
            await core.sleep.wake_one(actor_index, tags)

    wake_up = blocking(awake_up)

    @on_loop()
    async def ais_sleeping(self, actor_index: int | None = None) -> bool:
        """Whether any engine, or one, sleeps, wholly or in part: by the engines' own word."""
        core = self._running("is_sleeping()")
        found = await core.on_replicas("is_sleeping()", lambda engine: engine.is_sleeping(), only=actor_index)
        return any(sleeps for _, sleeps in found)

    is_sleeping = blocking(ais_sleeping)

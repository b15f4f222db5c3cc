"""LoRA adapters of a service: the same ones, under the same numbers, on every replica."""

from __future__ import annotations

import asyncio
import difflib
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeAlias, runtime_checkable

from rl_vllm.errors import ConfigError
from rl_vllm.protocols import Engine
from rl_vllm.service.fan_out import FanOut
from rl_vllm.service.replicas import Replica
from rl_vllm.types import BASE_MODEL, LoRAAdapter


@runtime_checkable
class LoRARequestLike(Protocol):
    """What is read of vLLM's ``LoRARequest``."""

    lora_name: str
    lora_int_id: int
    lora_path: str


# An adapter as a caller may name it: by the name it was added under, or as what is to be added.
Adapter = str | LoRAAdapter | LoRARequestLike

# Replicas, and what each took to load an adapter, in seconds, or the error it ended in.
_Loads: TypeAlias = tuple[list[Replica], list[float | BaseException]]


class AdapterRegistry:
    """The adapters that were added; used on the service's loop only.

    Args:
        on_replicas: Calls to all replicas.

    Attributes:
        reserved: Names that no adapter may be added under.
    """

    def __init__(self, on_replicas: FanOut) -> None:
        self.reserved = {BASE_MODEL}
        self._on_replicas = on_replicas
        self._adapters: dict[str, LoRAAdapter] = {}
        # Not removed from every replica yet: no request may name them, and their slots may still be taken.
        self._leaving: dict[str, LoRAAdapter] = {}
        self._pinned: set[str] = set()
        self._numbers = itertools.count(1)
        self._num_changes = 0
        # By a replica's index: its engine, and the number of changes when it was given everything.
        self._restored: dict[int, tuple[Engine, int]] = {}
        # One change at a time, so that a replica that joins in between misses none.
        self._turn = asyncio.Lock()

    def list(self) -> tuple[LoRAAdapter, ...]:
        """Every adapter, by number."""
        return tuple(sorted(self._adapters.values(), key=lambda adapter: adapter.number))

    @property
    def occupants(self) -> tuple[str, ...]:
        """Names of all that may hold a slot of an engine: the adapters, and those that are not gone everywhere."""
        return (*self._adapters, *self._leaving)

    def find(self, adapter: Adapter | int) -> LoRAAdapter | None:
        """The adapter of this name or number, loaded or not gone yet; None when there is none."""
        return _find(adapter, self._adapters | self._leaving)

    async def add(self, adapter: Adapter, path: str | os.PathLike[str] | None = None) -> LoRAAdapter:
        """Load an adapter on every replica or on none; the same one is loaded already: no-op.

        Args:
            adapter: A name with ``path``, or a ``LoRARequest`` or :class:`~rl_vllm.types.LoRAAdapter`.
            path: Folder in PEFT's format, readable on every replica's host.

        Raises:
            ConfigError: The name or the number is taken by another adapter, or it cannot be loaded.
            UnsupportedByEngineError: The engines run without LoRA.
            ReplicaCallError: It failed on some; it has been unloaded from the others.
        """
        async with self._turn:
            wanted = self._as_adapter(adapter, path)
            if self._adapters.get(wanted.name) == wanted:
                return wanted
            targets, results = await self._load(wanted, None)
            self._on_replicas.raise_failures("add_lora()", targets, results)
            return wanted

    async def load(self, name: str, path: str, *, checksum: str | None, within_s: float) -> _Loads:
        """As :meth:`add`, under a name that is new, with what became of every replica in place of an error.

        Returns:
            The replicas, and what each took, in seconds, or the error it ended in; unless all took it, none has it.
        """
        async with self._turn:
            wanted = replace(self._as_adapter(name, path), checksum=checksum)
            return await self._load(wanted, within_s)

    async def _load(self, wanted: LoRAAdapter, within_s: float | None) -> _Loads:
        async def timed(engine: Engine) -> float:
            started = time.perf_counter()
            await engine.add_lora(wanted)
            return time.perf_counter() - started

        targets = self._on_replicas.targets()
        results = await self._on_replicas.gather(targets, timed, long=True, within_s=within_s)
        if any(isinstance(result, BaseException) for result in results):
            # Also where it failed: what did not answer in time may have it by now.
            await self._on_replicas.gather(
                [replica for replica in targets if replica.state.is_up], lambda engine: engine.remove_lora(wanted.name)
            )
        else:
            self._leaving.pop(wanted.name, None)
            self._adapters[wanted.name] = wanted
            self._num_changes += 1
        return targets, results

    async def remove(self, adapter: Adapter | int) -> bool:
        """Unload an adapter from every replica; False when there is none of this name or number.

        Raises:
            ReplicaCallError: It failed on some; no request may name it any more. Call it again to remove it there.
        """
        async with self._turn:
            known = self.find(adapter)
            if known is None:
                return False
            self._adapters.pop(known.name, None)
            self._pinned.discard(known.name)
            self._leaving[known.name] = known
            self._num_changes += 1
            await self._on_replicas("remove_lora()", lambda engine: engine.remove_lora(known.name))
            del self._leaving[known.name]
            return True

    async def pin(self, adapter: Adapter | int) -> LoRAAdapter:
        """Keep an adapter loaded on every replica, whatever others are used.

        Raises:
            ConfigError: There is none of this name or number.
            ReplicaCallError: It failed on some.
        """
        async with self._turn:
            known = self._require(adapter)
            await self._on_replicas("pin_lora()", lambda engine: engine.pin_lora(known.name))
            self._pinned.add(known.name)
            return known

    async def names(self, asked: Sequence[Adapter | None]) -> tuple[str | None, ...] | None:
        """The name of each prompt's adapter, or None when none asks for one; what is not loaded yet is added.

        Raises:
            ConfigError: A name is unknown; and what :meth:`add` raises.
        """
        if asked.count(None) == len(asked):
            return None
        distinct: dict[int, str] = {}
        for each in asked:
            if each is not None and id(each) not in distinct:
                known = self._require(each) if isinstance(each, str) else await self.add(each)
                distinct[id(each)] = known.name
        return tuple(None if each is None else distinct[id(each)] for each in asked)

    async def restore(self, replica: Replica) -> None:
        """Give a replica that does not serve yet what the others have, and nothing else."""
        async with self._turn:
            engine = replica.engine
            if self._restored.get(replica.index, (None, 0))[0] is engine:
                for stray in await engine.list_loras():
                    if stray.name not in self._adapters:
                        await engine.remove_lora(stray.name)
            for adapter in self.list():
                await engine.add_lora(adapter)
                if adapter.name in self._pinned:
                    await engine.pin_lora(adapter.name)
            self._restored[replica.index] = engine, self._num_changes

    def is_restored(self, replica: Replica) -> bool:
        """Whether nothing has changed, and nothing is changing, since :meth:`restore` of this replica's engine."""
        engine, num_changes = self._restored.get(replica.index, (None, 0))
        return engine is replica.engine and num_changes == self._num_changes and not self._turn.locked()

    def _as_adapter(self, adapter: Adapter, path: str | os.PathLike[str] | None) -> LoRAAdapter:
        name, folder, number = _facts(adapter, path)
        if name in self.reserved:
            raise ConfigError(
                f"{name!r} names the base model or a trained adapter, which refit_adapter() updates: choose another"
            )
        loaded = self._adapters | self._leaving
        known = loaded.get(name)
        if known is not None:
            if known.path == folder and number in (None, known.number):
                return known
            raise ConfigError(f"adapter {name!r} is number {known.number} from {known.path}: remove_lora() it first")
        taken = {other.number: other.name for other in loaded.values()}
        if number in taken:
            raise ConfigError(f"number {number} is adapter {taken[number]!r} already: give {name!r} another one")
        if number is None:
            number = next(free for free in self._numbers if free not in taken)
        return LoRAAdapter(name=name, number=number, path=folder)

    def _require(self, adapter: Adapter | int) -> LoRAAdapter:
        known = _find(adapter, self._adapters)
        if known is None:
            names = sorted(self._adapters)
            near = difflib.get_close_matches(str(adapter), names, n=2)
            hint = f": did you mean {' or '.join(near)}?" if near else f": there are {names}; add_lora() it first"
            raise ConfigError(f"no adapter is called {adapter!r}{hint}")
        return known


def _find(adapter: Adapter | int, among: Mapping[str, LoRAAdapter]) -> LoRAAdapter | None:
    if isinstance(adapter, int):
        return next((known for known in among.values() if known.number == adapter), None)
    if isinstance(adapter, str):
        return among.get(adapter)
    return among.get(adapter.name if isinstance(adapter, LoRAAdapter) else adapter.lora_name)


def _facts(adapter: Adapter, path: str | os.PathLike[str] | None) -> tuple[str, str, int | None]:
    """Name, folder and number, None where the number is ours to choose."""
    name: str
    folder: str
    number: int | None
    if isinstance(adapter, str):
        if path is None:
            raise ConfigError(f"adapter {adapter!r} needs a path: add_lora(name, path)")
        name, folder, number = adapter, os.fspath(path), None
    elif path is not None:
        raise ConfigError(f"the path is in {type(adapter).__name__} already: leave path={path!r} out")
    elif isinstance(adapter, LoRAAdapter):
        name, folder, number = adapter.name, adapter.path, adapter.number
    elif isinstance(adapter, LoRARequestLike):
        name, folder, number = adapter.lora_name, adapter.lora_path, adapter.lora_int_id
    else:
        raise ConfigError(f"an adapter is a name, a LoRARequest or a LoRAAdapter, got {adapter!r}")
    if not name or not folder:
        raise ConfigError(f"an adapter needs a name and a path, got name={name!r} path={folder!r}")
    return name, folder, number

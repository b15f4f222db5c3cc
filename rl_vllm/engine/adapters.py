"""LoRA adapters of one engine: checked before vLLM sees them, and never reloaded behind anyone's back.

What vLLM 0.32 does with a folder that does not fit is not safe to rely on. It compares only the last part of each key
with the model's modules, so an adapter under a wrong prefix loads and changes nothing; it copies matrices that are too
small into a corner of its own; and it reads the folder again when an adapter that requests still name has left its
cache, where a folder that is gone ends the engine. Hence the checks in :mod:`rl_vllm.engine.adapter_folder`, and no
more adapters than the cache holds.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vllm.config import LoRAConfig
from vllm.exceptions import VLLMError
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from rl_vllm.engine.adapter_folder import check_folder
from rl_vllm.engine.death import answered
from rl_vllm.engine.weight_specs import expected_from_config
from rl_vllm.errors import ConfigError, EngineDiedError, UnsupportedByEngineError
from rl_vllm.types import LoRAAdapter, LoRALimits, TensorSpec


@dataclass(frozen=True, slots=True)
class _Loaded:
    adapter: LoRAAdapter
    request: LoRARequest
    pinned: bool = False


class Adapters:
    """Which adapters an engine has, by name.

    Args:
        llm: The engine; its ``enable_lora`` decides whether any can be added.
        replica: Index of the replica, for errors.
    """

    def __init__(self, llm: AsyncLLM, replica: int) -> None:
        self._llm = llm
        self._replica = replica
        self._loaded: dict[str, _Loaded] = {}
        self._loads = itertools.count(1)
        self._changing = asyncio.Lock()
        self._expected: tuple[TensorSpec, ...] | None = None

    def limits(self) -> LoRALimits | None:
        """What adapters the engine takes, or None when it runs without LoRA."""
        limits: LoRAConfig | None = self._llm.vllm_config.lora_config
        if limits is None:
            return None
        assert limits.max_cpu_loras is not None, "vLLM fills it in"
        return LoRALimits(
            max_rank=limits.max_lora_rank,
            max_loaded=limits.max_cpu_loras,
            max_running=limits.max_loras,
            target_modules=_with_parts(limits.target_modules, self._packed(limits)),
        )

    async def add(self, adapter: LoRAAdapter) -> None:
        """Load an adapter; one that is loaded already under the same name, number and path is left alone.

        Raises:
            UnsupportedByEngineError: The engine runs without LoRA.
            ConfigError: The folder does not hold an adapter for this model, the name or number is taken by another, or
                the engine holds as many as it may. The engine is as before.
            EngineDiedError: The engine is gone.
        """
        limits = self._limits()
        async with self._changing:
            if self._is_loaded(adapter):
                return
            self._require_room(adapter, limits)
            folder = await asyncio.to_thread(self._check, adapter, limits)
            # vLLM tells cached KV of adapters apart by name and path: a name that is used once keeps the KV of another
            # adapter, or of older files in the same folder, from being found.
            request = LoRARequest(f"{adapter.name}@{next(self._loads)}", adapter.number, str(folder))
            await self._load(adapter, request)
            self._loaded[adapter.name] = _Loaded(adapter, request)

    async def remove(self, name: str) -> bool:
        """Unload an adapter; False when there is none of this name.

        Raises:
            ConfigError: Unfinished requests use it.
            EngineDiedError: The engine is gone.
        """
        async with self._changing:
            loaded = self._loaded.get(name)
            if loaded is None:
                return False
            self._require_idle(loaded)
            # First: from here on nobody can name it.
            del self._loaded[name]
            await answered(self._llm, self._replica, self._llm.remove_lora(loaded.adapter.number))
            return True

    async def list(self) -> tuple[LoRAAdapter, ...]:
        """The adapters that were added and that the engine says it has, by number; empty without LoRA."""
        if self._llm.vllm_config.lora_config is None:
            return ()
        numbers = await answered(self._llm, self._replica, self._llm.list_loras())
        present = [loaded.adapter for loaded in self._loaded.values() if loaded.adapter.number in numbers]
        return tuple(sorted(present, key=lambda adapter: adapter.number))

    async def pin(self, name: str) -> None:
        """Keep an adapter in one of the ``max_loras`` slots that a step's adapters are read from.

        Raises:
            UnsupportedByEngineError: The engine runs without LoRA.
            ConfigError: There is none of this name, or no slot would be left for the others.
            EngineDiedError: The engine is gone.
        """
        limits = self._limits()
        async with self._changing:
            loaded = self._find(name)
            others = sum(not each.pinned for each in self._loaded.values()) - (not loaded.pinned)
            pinned = sum(each.pinned for each in self._loaded.values()) + (not loaded.pinned)
            if others and pinned >= limits.max_loras:
                raise ConfigError(
                    f"pinning adapter {name!r} leaves no slot for the {others} others: raise "
                    f"engine_kwargs={{'max_loras': {limits.max_loras}}}"
                )
            await answered(self._llm, self._replica, self._llm.pin_lora(loaded.adapter.number))
            self._loaded[name] = replace(loaded, pinned=True)

    def request_for(self, name: str | None) -> LoRARequest | None:
        """What vLLM wants with a request that names an adapter; None for the base model.

        Raises:
            ConfigError: There is none of this name; says which there are.
        """
        return None if name is None else self._find(name).request

    def _find(self, name: str) -> _Loaded:
        if name not in self._loaded:
            there_are = ", ".join(sorted(self._loaded)) or "none"
            raise ConfigError(f"no adapter is called {name!r}; loaded: {there_are}. Load it with add_lora first")
        return self._loaded[name]

    def _limits(self) -> LoRAConfig:
        limits: LoRAConfig | None = self._llm.vllm_config.lora_config
        if limits is None:
            raise UnsupportedByEngineError(
                'this engine runs without LoRA: start it with EngineConfig(engine_kwargs={"enable_lora": True})'
            )
        return limits

    def _is_loaded(self, adapter: LoRAAdapter) -> bool:
        same_name = self._loaded.get(adapter.name)
        if same_name is not None and same_name.adapter != adapter:
            raise ConfigError(
                f"adapter {adapter.name!r} is loaded as number {same_name.adapter.number} from "
                f"{same_name.adapter.path}, not {adapter.number} from {adapter.path}: remove it first"
            )
        return same_name is not None

    def _require_room(self, adapter: LoRAAdapter, limits: LoRAConfig) -> None:
        if not adapter.name or adapter.number < 1:
            raise ConfigError(f"an adapter has a name and a number of at least 1, got {adapter}")
        for other in self._loaded.values():
            if other.adapter.number == adapter.number:
                raise ConfigError(f"number {adapter.number} is adapter {other.adapter.name!r}'s: give another")
        assert limits.max_cpu_loras is not None, "vLLM fills it in"
        if len(self._loaded) >= limits.max_cpu_loras:
            raise ConfigError(
                f"the engine holds {len(self._loaded)} adapters, as many as it may: remove one, or raise "
                f"engine_kwargs={{'max_cpu_loras': {limits.max_cpu_loras}}}"
            )
        if sum(other.pinned for other in self._loaded.values()) >= limits.max_loras:
            raise ConfigError(
                f"every slot is pinned, so {adapter.name!r} could never run: raise "
                f"engine_kwargs={{'max_loras': {limits.max_loras}}}"
            )

    def _require_idle(self, loaded: _Loaded) -> None:
        states = self._llm.output_processor.request_states.values()
        users = sum(state.lora_name == loaded.request.lora_name for state in states)
        if users:
            raise ConfigError(
                f"adapter {loaded.adapter.name!r} is used by {users} unfinished requests: wait for them or abort them"
            )

    def _check(self, adapter: LoRAAdapter, limits: LoRAConfig) -> Path:
        """The adapter's folder, when it holds what this model can take."""
        folder = Path(adapter.path).expanduser().absolute()
        if self._expected is None:
            config = self._llm.model_config
            self._expected = expected_from_config(
                config.hf_config,
                dtype=str(config.dtype).removeprefix("torch."),
                trust_remote_code=config.trust_remote_code,
            )
        check_folder(
            adapter,
            folder,
            limits,
            self._expected,
            packed=self._packed(limits),
            # The CPU build has no operators for them, and finds out in the middle of a step.
            adapts_experts=not current_platform.is_cpu(),
        )
        return folder

    def _packed(self, limits: LoRAConfig) -> Mapping[str, Sequence[str]]:
        """The model's names of joined layers; asked only where they matter, since that loads vLLM's model code."""
        if limits.target_modules is None:
            return {}
        config = self._llm.model_config
        model, _ = config.registry.resolve_model_cls(config.architectures, config)
        packed: Mapping[str, Sequence[str]] = model.packed_modules_mapping
        return packed

    async def _load(self, adapter: LoRAAdapter, request: LoRARequest) -> None:
        # In place: a request that was on its way while this number's last adapter was removed may have brought it back.
        fresh = LoRARequest(request.lora_name, request.lora_int_id, request.lora_path, load_inplace=True)
        try:
            loaded = await answered(self._llm, self._replica, self._llm.add_lora(fresh))
        except EngineDiedError:
            raise
        except (VLLMError, ValueError, RuntimeError, OSError) as error:
            raise ConfigError(f"vLLM cannot load adapter {adapter.name!r} from {adapter.path}: {error}") from error
        if not loaded:
            raise ConfigError(f"vLLM did not load adapter {adapter.name!r} from {adapter.path} on every worker")


def _with_parts(targets: Sequence[str] | None, packed: Mapping[str, Sequence[str]]) -> tuple[str, ...] | None:
    """The modules that may be adapted, by the checkpoint's names too where the engine's stand for several."""
    if targets is None:
        return None
    parts = [part for target in targets for part in packed.get(target, ())]
    wholes = [whole for whole, of in packed.items() if not set(of).isdisjoint(targets)]
    return tuple(dict.fromkeys([*targets, *parts, *wholes]))

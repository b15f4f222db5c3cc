"""Our engine settings as vLLM's, and back."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from vllm.config import ProfilerConfig, WeightTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from rl_vllm.config import EngineConfig
from rl_vllm.engine.plugin import BACKEND
from rl_vllm.engine.refit import EXTENSION
from rl_vllm.errors import ConfigError

__all__ = ["AsyncEngineArgs", "build_engine_args", "check_engine_kwarg", "config_from_engine_args"]

# vLLM's name of a setting where ours differs.
_RENAMED = {
    "skip_tokenizer": "skip_tokenizer_init",
}
_SAME_NAME = (
    "model",
    "tokenizer",
    "dtype",
    "max_model_len",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "enable_prefix_caching",
    "enforce_eager",
    "seed",
    "logprobs_mode",
    "gpu_memory_utilization",
)


def build_engine_args(config: EngineConfig, *, replica: int, on_cpu: bool) -> AsyncEngineArgs:
    """Settings of one replica's engine.

    Args:
        config: What the user asked for; every value set there reaches the engine.
        replica: Index of the replica; its seed is ``config.seed + replica``, so that replicas explore differently.
        on_cpu: Whether KV memory is given in bytes, as CPU engines need it.

    Raises:
        ConfigError: ``engine_kwargs`` names a setting vLLM does not have or one that this class sets itself, or its
            ``hf_overrides`` contradict ``enable_fp32_output``.
    """
    values: dict[str, Any] = {name: getattr(config, name) for name in _SAME_NAME if getattr(config, name) is not None}
    values |= {theirs: getattr(config, ours) for ours, theirs in _RENAMED.items()}
    values["seed"] = config.seed + replica
    values["weight_transfer_config"] = WeightTransferConfig(backend=BACKEND)
    values["worker_extension_cls"] = EXTENSION
    values.setdefault("enforce_eager", on_cpu)
    # vLLM's periodic log lines and their cost are for those who ask: engine_kwargs={"disable_log_stats": False}.
    values["disable_log_stats"] = True
    if on_cpu:
        values["kv_cache_memory_bytes"] = int(config.cpu_kv_cache_gib * 2**30)
    for name, value in config.engine_kwargs.items():
        check_engine_kwarg(name)
        values[name] = value
    if isinstance(values.get("profiler_config"), dict):
        values["profiler_config"] = ProfilerConfig(**values["profiler_config"])
    if config.enable_fp32_output:
        values["hf_overrides"] = _with_fp32_head(values.get("hf_overrides", {}))
    return AsyncEngineArgs(**values)


def _with_fp32_head(overrides: object) -> dict[str, object]:
    if not isinstance(overrides, dict) or overrides.get("head_dtype", "float32") != "float32":
        raise ConfigError(f"enable_fp32_output contradicts hf_overrides={overrides!r}: set head_dtype there alone")
    return {**overrides, "head_dtype": "float32"}


def check_engine_kwarg(name: str) -> None:
    """Raise :class:`ConfigError` unless vLLM has this setting and it may be passed through."""
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    if name in ("weight_transfer_config", "worker_extension_cls"):
        raise ConfigError(f"engine_kwargs cannot set {name!r}: refits depend on it")
    if name in _SAME_NAME or name in _RENAMED.values():
        raise ConfigError(f"engine_kwargs cannot set {name!r}: it is a field of EngineConfig")
    if name not in known:
        near = difflib.get_close_matches(name, known | {field.name for field in dataclasses.fields(EngineConfig)}, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ConfigError(f"vLLM has no engine setting {name!r}{hint}")


def config_from_engine_args(args: AsyncEngineArgs) -> EngineConfig:
    """Our settings from vLLM's; a field at vLLM's own default takes ours.

    Raises:
        ConfigError: A setting cannot be taken over.
    """
    ours: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    reverse = {theirs: name for name, theirs in _RENAMED.items()}
    for field in dataclasses.fields(AsyncEngineArgs):
        value = getattr(args, field.name)
        if value is None or value == _default_of(field):
            continue
        if field.name in _SAME_NAME:
            ours[field.name] = value
        elif field.name in reverse:
            ours[reverse[field.name]] = value
        else:
            check_engine_kwarg(field.name)
            extra[field.name] = value
    ours["dtype"] = str(ours.get("dtype", "auto")).removeprefix("torch.")
    return EngineConfig(**ours, engine_kwargs=extra)


def _default_of(field: dataclasses.Field[Any]) -> object:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return dataclasses.MISSING

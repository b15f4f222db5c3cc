"""What a user passes to build a service, as one checked config."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rl_vllm.config import EngineConfig, ServiceConfig
from rl_vllm.errors import ConfigError

if TYPE_CHECKING:
    from rl_vllm.engine.args import AsyncEngineArgs

_ENGINE_FIELDS = frozenset(field.name for field in dataclasses.fields(EngineConfig)) - {"engine_kwargs"}
_SERVICE_FIELDS = frozenset(field.name for field in dataclasses.fields(ServiceConfig)) - {"engine", "num_replicas"}


def service_config(
    engine_args: EngineConfig | AsyncEngineArgs | ServiceConfig,
    num_replicas: int = 1,
    *,
    enable_prefix_caching: bool | None = None,
) -> ServiceConfig:
    """One config from ours, vLLM's, or a whole service's.

    Args:
        engine_args: What every replica runs; a :class:`ServiceConfig` also says how many there are.
        num_replicas: How many; 1 leaves it to a ``ServiceConfig``.
        enable_prefix_caching: Share KV of equal prefixes; None leaves it to ``engine_args``.

    Raises:
        ConfigError: Two values contradict each other, or one cannot be taken over.
    """
    if isinstance(engine_args, ServiceConfig):
        if num_replicas not in (1, engine_args.num_replicas):
            raise ConfigError(
                f"num_replicas={num_replicas} contradicts ServiceConfig.num_replicas={engine_args.num_replicas}: "
                "leave it out"
            )
        engine = _with_caching(engine_args.engine, asked=enable_prefix_caching, said=False)
        return engine_args if engine is engine_args.engine else replace(engine_args, engine=engine)
    if isinstance(engine_args, EngineConfig):
        engine = _with_caching(engine_args, asked=enable_prefix_caching, said=False)
        return ServiceConfig(engine=engine, num_replicas=num_replicas)
    if isinstance(engine_args, str):
        raise ConfigError(f"give an EngineConfig, not a name: from_pretrained({engine_args!r}) takes one")
    from rl_vllm.engine.args import config_from_engine_args

    engine = config_from_engine_args(engine_args)
    engine = _with_caching(engine, asked=enable_prefix_caching, said=engine_args.enable_prefix_caching is not None)
    return ServiceConfig(engine=engine, num_replicas=num_replicas)


def _with_caching(engine: EngineConfig, *, asked: bool | None, said: bool) -> EngineConfig:
    """The engine's settings with prefix caching as asked, unless they say the opposite.

    Args:
        engine: Its settings.
        asked: The keyword.
        said: Whether the user set the value that is there: True is also our default, False never is.
    """
    if asked is None or asked == engine.enable_prefix_caching:
        return engine
    if said or not engine.enable_prefix_caching:
        raise ConfigError(
            f"enable_prefix_caching={asked} contradicts the engine's settings, which say {not asked}: give one"
        )
    return replace(engine, enable_prefix_caching=asked)


def pretrained_config(
    model_name: str,
    num_devices: int | None,
    num_replicas: int,
    *,
    compile: bool | None,  # noqa: A002 (TorchRL's name for it)
    keywords: Mapping[str, Any],
) -> ServiceConfig:
    """One config from a model's name and keywords.

    Args:
        model_name: Path or hub id.
        num_devices: Devices per replica: the tensor-parallel size.
        num_replicas: How many engines.
        compile: Whether vLLM compiles the model; None means on GPUs.
        keywords: Fields of :class:`EngineConfig`, of :class:`ServiceConfig`, or of vLLM's ``AsyncEngineArgs``.

    Raises:
        ConfigError: A name is unknown, or two values contradict each other.
    """
    ours = {name: value for name, value in keywords.items() if name in _ENGINE_FIELDS}
    service = {name: value for name, value in keywords.items() if name in _SERVICE_FIELDS}
    rest = {name: value for name, value in keywords.items() if name not in ours and name not in service}
    given = rest.pop("engine_kwargs", {})
    for name in rest:
        _check_known(name)
    tensor_parallel = ours.pop("tensor_parallel_size", None)
    if num_devices is not None and tensor_parallel not in (None, num_devices):
        raise ConfigError(f"num_devices={num_devices} contradicts tensor_parallel_size={tensor_parallel}: give one")
    size = num_devices if num_devices is not None else tensor_parallel
    if compile is not None:
        if ours.get("enforce_eager") is not None:
            raise ConfigError("compile and enforce_eager say the same thing: give one")
        ours["enforce_eager"] = not compile
    for name in ("pipeline_parallel_size", "data_parallel_size"):
        # TorchRL's default for them, which means one.
        if name in ours and ours[name] is None:
            del ours[name]
    engine = EngineConfig(
        model=model_name,
        tensor_parallel_size=1 if size is None else size,
        engine_kwargs={**given, **rest},
        **ours,
    )
    return ServiceConfig(engine=engine, num_replicas=num_replicas, **service)


def _check_known(name: str) -> None:
    """Raise :class:`ConfigError` unless vLLM has a setting of this name; names what is near."""
    near = difflib.get_close_matches(name, _ENGINE_FIELDS | _SERVICE_FIELDS, n=2, cutoff=0.75)
    if near:
        from rl_vllm.engine.args import AsyncEngineArgs

        if name not in {field.name for field in dataclasses.fields(AsyncEngineArgs)}:
            raise ConfigError(f"there is no setting {name!r}; did you mean {' or '.join(near)}?")
        return
    from rl_vllm.engine.args import check_engine_kwarg

    check_engine_kwarg(name)

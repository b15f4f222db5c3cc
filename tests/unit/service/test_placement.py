"""How replicas are laid out, by hand for every shape."""

import pytest

from rl_vllm.config import EngineConfig
from rl_vllm.errors import ConfigError, NotEnoughResourcesError
from rl_vllm.service.placement import Node, check_parallel, check_resources, place, stage_nodes


def config(tp: int = 1, pp: int = 1, dp: int = 1, **settings: object) -> EngineConfig:
    return EngineConfig(
        model="m", tensor_parallel_size=tp, pipeline_parallel_size=pp, data_parallel_size=dp, **settings
    )


def gpu_nodes(*num_gpus: int, cpus: float = 8.0) -> list[Node]:
    return [Node(f"node-{index}", {"CPU": cpus, "GPU": float(count)}) for index, count in enumerate(num_gpus)]


def cpu_nodes(*num_cpus: int) -> list[Node]:
    return [Node(f"node-{index}", {"CPU": float(count)}) for index, count in enumerate(num_cpus)]


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "gpus", "backend"),
    [(1, 1, 1, 1, None), (2, 1, 1, 2, "mp"), (2, 2, 1, 4, "mp"), (1, 1, 2, 2, "mp"), (2, 2, 2, 8, "mp")],
)
def test_a_replica_that_fits_a_node_is_one_bundle_whose_engine_has_all_gpus(tp, pp, dp, gpus, backend):
    placement = place(config(tp, pp, dp), gpu_nodes(8, 8), on_cpu=False)
    assert placement.bundles == ({"CPU": 1.0, "GPU": float(gpus)},)
    assert placement.strategy == "STRICT_PACK"
    assert (placement.num_cpus, placement.num_gpus) == (1.0, gpus)
    # In a placement group vLLM would choose Ray, which wants a bundle per worker.
    assert placement.backend == backend
    assert not placement.spans_nodes


@pytest.mark.parametrize(("tp", "pp", "dp", "cores", "cpus"), [(1, 1, 1, 1, 1), (2, 1, 1, 3, 6), (2, 2, 2, 1, 8)])
def test_on_cpus_a_replica_takes_the_cores_of_all_its_workers(tp, pp, dp, cores, cpus):
    placement = place(config(tp, pp, dp, cpu_cores=cores), cpu_nodes(16), on_cpu=True)
    assert placement.bundles == ({"CPU": float(cpus)},)
    assert (placement.num_cpus, placement.num_gpus) == (cpus, 0)
    assert placement.backend == (None if tp * pp * dp == 1 else "mp")


def test_stages_that_do_not_fit_one_node_get_a_bundle_per_worker_and_the_engine_no_gpu_of_theirs():
    placement = place(config(tp=2, pp=3), gpu_nodes(4, 2), on_cpu=False)
    assert placement.bundles == ({"CPU": 1.0, "GPU": 1.0}, *({"GPU": 1.0},) * 5)
    assert (placement.strategy, placement.backend, placement.stage_size) == ("PACK", "ray", 2)
    assert (placement.num_cpus, placement.num_gpus) == (1.0, 0.0)
    assert placement.spans_nodes


def test_ray_workers_that_were_asked_for_stay_on_one_node_when_they_fit():
    asked = config(tp=2, engine_kwargs={"distributed_executor_backend": "ray"})
    placement = place(asked, gpu_nodes(4), on_cpu=False)
    assert placement.bundles == ({"CPU": 1.0, "GPU": 1.0}, {"GPU": 1.0})
    assert (placement.strategy, placement.backend, placement.num_gpus) == ("STRICT_PACK", "ray", 0.0)


def test_what_the_user_chose_reaches_the_engine_and_nothing_else_changes():
    chosen = config(tp=2, engine_kwargs={"distributed_executor_backend": "mp", "max_num_seqs": 4})
    assert place(chosen, gpu_nodes(2), on_cpu=False).applied_to(chosen) == chosen
    left_open = config(tp=2, engine_kwargs={"max_num_seqs": 4})
    told = place(left_open, gpu_nodes(2), on_cpu=False).applied_to(left_open)
    assert told.engine_kwargs == {"max_num_seqs": 4, "distributed_executor_backend": "mp"}
    assert left_open.engine_kwargs == {"max_num_seqs": 4}
    alone = config()
    assert place(alone, gpu_nodes(1), on_cpu=False).applied_to(alone) is alone


@pytest.mark.parametrize(
    ("free", "nodes"),
    [
        # Three GPUs are one stage of two and a GPU left over: no stage is torn.
        ((4, 3), "001"),
        ((3, 4), "110"),
        ((2, 2, 2), "012"),
        ((6, 2), "000"),
        ((3, 3), None),
        ((5, 1), None),
        ((4, 1, 1), None),
    ],
)
def test_every_stage_lies_on_one_node_and_as_few_nodes_as_possible_are_used(free, nodes):
    placement = place(config(tp=2, pp=3), gpu_nodes(4, 4), on_cpu=False)
    expected = None if nodes is None else tuple(f"node-{digit}" for digit in nodes for _ in range(2))
    assert stage_nodes(placement, gpu_nodes(*free)) == expected


def test_the_first_stage_lies_where_the_engine_has_a_cpu():
    placement = place(config(tp=1, pp=2), [*gpu_nodes(1), *gpu_nodes(1)], on_cpu=False)
    without_cpu, with_cpu = Node("a", {"GPU": 1.0}), Node("b", {"GPU": 1.0, "CPU": 1.0})
    assert stage_nodes(placement, [without_cpu, with_cpu]) == ("b", "a")
    assert stage_nodes(placement, [without_cpu, Node("c", {"GPU": 4.0, "CPU": 0.5})]) is None


@pytest.mark.parametrize(
    ("settings", "on_cpu", "message"),
    [
        ({"engine_kwargs": {"distributed_executor_backend": "external_launcher"}}, False, "use 'mp' or 'ray'"),
        ({"tp": 2, "engine_kwargs": {"distributed_executor_backend": "uni"}}, False, "needs 2"),
        ({"engine_kwargs": {"distributed_executor_backend": "ray"}}, True, "needs GPUs"),
        ({"dp": 2, "engine_kwargs": {"distributed_executor_backend": "ray"}}, False, "raise num_replicas"),
        ({"dp": 2, "engine_kwargs": {"data_parallel_backend": "ray"}}, False, "raise num_replicas"),
        ({"engine_kwargs": {"nnodes": 2}}, False, "nnodes=2"),
        ({"dp": 2, "tp": 2, "engine_kwargs": {"enable_expert_parallel": True}}, False, "use tensor_parallel_size"),
    ],
)
def test_combinations_that_no_cluster_can_run_are_refused_with_the_reason(settings, on_cpu, message):
    with pytest.raises(ConfigError, match=message):
        check_parallel(config(**settings), on_cpu=on_cpu)


@pytest.mark.parametrize("settings", [{"tp": 2, "engine_kwargs": {"enable_expert_parallel": True}}, {"dp": 4}])
def test_combinations_that_run_are_not_refused(settings):
    check_parallel(config(**settings), on_cpu=False)


@pytest.mark.parametrize(
    ("settings", "nodes", "error", "message"),
    [
        ({"tp": 8}, (4, 4), ConfigError, "raise pipeline_parallel_size"),
        ({"tp": 4, "dp": 2}, (4, 4), ConfigError, "raise num_replicas"),
        (
            {"tp": 4, "pp": 2, "engine_kwargs": {"distributed_executor_backend": "mp"}},
            (4, 4),
            ConfigError,
            "runs on one node",
        ),
        ({"tp": 2, "pp": 3}, (3, 3), NotEnoughResourcesError, "2 whole stages"),
    ],
)
def test_shapes_that_these_nodes_cannot_hold_are_refused_with_the_reason(settings, nodes, error, message):
    with pytest.raises(error, match=message):
        place(config(**settings), gpu_nodes(*nodes), on_cpu=False)


def test_cpu_workers_do_not_spread_over_nodes():
    with pytest.raises(NotEnoughResourcesError, match=r"'CPU': 4\.0.*'CPU': 3\.0.*on its largest node"):
        place(config(tp=4), cpu_nodes(3, 2), on_cpu=True)


def test_replicas_that_fit_in_sum_but_not_node_by_node_are_refused():
    nodes = gpu_nodes(3, 3)
    assert check_resources(config(tp=2), 2, nodes, on_cpu=False).num_gpus == 2
    with pytest.raises(NotEnoughResourcesError, match=r"'GPU': 6\.0.*on nodes that hold 2 replicas"):
        check_resources(config(tp=2), 3, nodes, on_cpu=False)
    with pytest.raises(NotEnoughResourcesError, match=r"'GPU': 8\.0.*'GPU': 6\.0.*in total"):
        check_resources(config(tp=2), 4, nodes, on_cpu=False)


def test_a_cluster_without_nodes_holds_nothing():
    with pytest.raises(NotEnoughResourcesError, match="in total"):
        check_resources(config(), 1, [], on_cpu=False)

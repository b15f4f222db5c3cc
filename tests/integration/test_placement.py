"""Replicas on a Ray cluster of several nodes with made-up GPUs: 4 on one node, 3 on the other, none on the head."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
# The script gives up by itself much earlier.
SCRIPT_TIMEOUT_S = 500.0

pytestmark = [pytest.mark.engine, pytest.mark.timeout(SCRIPT_TIMEOUT_S + 60)]


# The arithmetic behind it is in the unit tests.
on_a_cluster = pytest.mark.slow


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each scenario of the script saw, and the names of the two nodes with GPUs."""
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text("{}")
    run = subprocess.run(
        [sys.executable, "-m", "tests.integration.placement_script", str(model)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=SCRIPT_TIMEOUT_S,
    )
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"scenario"')]
    assert run.returncode == 0, run.stdout + run.stderr
    large, small = lines[0]["nodes"]
    return {line["scenario"]: line.get("seen") for line in lines} | {"large": large, "small": small}


@on_a_cluster
def test_each_replica_has_all_its_gpus_on_one_node_and_none_of_anothers(scenarios: dict[str, Any]) -> None:
    replicas = scenarios["two_per_node"]
    gpus = [(node, gpu) for node, held in (each["engine"] for each in replicas) for gpu in held]
    assert len(gpus) == len(set(map(tuple, gpus))) == 6
    assert sorted(each["engine"][0] for each in replicas) == sorted([scenarios["large"]] * 2 + [scenarios["small"]])
    # What the engine's processes will see is what Ray gave it.
    assert [each["visible"] for each in replicas] == [",".join(map(str, each["engine"][1])) for each in replicas]
    assert len({each["group"] for each in replicas}) == 3
    assert {each["backend"] for each in replicas} == {"mp"}


@on_a_cluster
def test_stages_that_span_nodes_are_whole_on_each_and_the_engine_is_with_the_first(scenarios: dict[str, Any]) -> None:
    (replica,) = scenarios["spread_stages"]
    nodes = [node for node, _ in replica["workers"]]
    assert nodes[:3] == nodes[:1] * 3
    assert nodes[3:] == nodes[3:4] * 3
    assert {nodes[0], nodes[3]} == {scenarios["large"], scenarios["small"]}
    assert len({(node, gpu) for node, gpus in replica["workers"] for gpu in gpus}) == 6
    node, gpus = replica["engine"]
    assert node == nodes[0]
    # It takes none of its workers' GPUs, and the node's are not hidden from it.
    assert gpus == []
    assert replica["visible"] != ""


@on_a_cluster
@pytest.mark.parametrize(
    ("shape", "error", "text"),
    [
        ("too wide", "ConfigError", "raise pipeline_parallel_size"),
        ("copies", "ConfigError", "raise num_replicas"),
        ("too many", "NotEnoughResourcesError", "'GPU': 9.0}, each on one node, but the Ray cluster has"),
    ],
)
def test_shapes_that_cannot_run_are_refused_before_anything_is_reserved(
    scenarios: dict[str, Any], shape: str, error: str, text: str
) -> None:
    refusal = scenarios["refused_shapes"][shape]
    assert refusal["error"] == error
    assert text in refusal["text"]
    assert refusal["groups"] == 0


@on_a_cluster
def test_a_replica_waits_for_what_others_hold_and_gives_up_in_the_end(scenarios: dict[str, Any]) -> None:
    refused = scenarios["busy_cluster"]["refused"]
    assert refused["error"] == "NotEnoughResourcesError"
    assert "'GPU': 3.0} free" in refused["text"]
    assert scenarios["busy_cluster"]["later"]["engine"] == [scenarios["large"], [0, 1, 2, 3]]


@on_a_cluster
def test_a_stopped_killed_or_frozen_replica_starts_again_in_a_new_place(scenarios: dict[str, Any]) -> None:
    seen = scenarios["replaced_replicas"]
    lives = [seen["launched"][0], seen["asked"], seen["killed"], seen["frozen"]]
    assert len({life["pid"] for life in lives}) == len({life["group"] for life in lives}) == 4
    assert {life["replica"] for life in lives} == {0}
    assert seen["other"] == seen["launched"][1]
    assert seen["third"]["replica"] == 2


@on_a_cluster
def test_an_engine_is_told_the_address_of_its_cluster(scenarios: dict[str, Any]) -> None:
    addresses = {each["address"] for each in scenarios["two_per_node"] + scenarios["spread_stages"]}
    assert len(addresses) == 1
    assert None not in addresses


@on_a_cluster
def test_an_engine_that_ends_or_hangs_while_it_starts_is_named_and_stopped(scenarios: dict[str, Any]) -> None:
    faults = scenarios["faults"]
    assert faults["dies"]["error"] == "EngineStartError"
    assert "replica 0 did not start: its process ended" in faults["dies"]["text"]
    assert "replica 0 did not start" in faults["stopped"]
    assert faults["hangs"]["error"] == "DeadlineError"


@on_a_cluster
def test_everything_that_was_reserved_is_given_back(scenarios: dict[str, Any]) -> None:
    assert scenarios["gpus_and_cpus_come_back"] == ["REMOVED"]


SHORT_THREAD = """
import signal, threading, time, ray
from rl_vllm.service.ray_cluster import cluster
handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
thread = threading.Thread(target=cluster.join)
thread.start()
thread.join()
# The kernel acts when the thread has left the process's list of threads.
while any(each.native_id == thread.native_id for each in threading.enumerate()):
    time.sleep(0.01)
remote = ray.remote(lambda: "answered")
for _ in range(3):
    print(ray.get(remote.remote(), timeout=60))
print(handlers == [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)])
cluster.leave()
print(ray.is_initialized())
"""


def test_ray_outlives_the_thread_that_asked_for_it_and_leaves_signals_alone() -> None:
    run = subprocess.run(
        [sys.executable, "-c", SHORT_THREAD], cwd=REPOSITORY, capture_output=True, text=True, timeout=240
    )
    assert run.stdout.split() == ["answered"] * 3 + ["True", "False"], run.stdout + run.stderr
    assert "SIGTERM handler" not in run.stderr

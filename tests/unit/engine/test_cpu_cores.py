"""Cores of CPU replicas, on however many this machine has."""

import os
import subprocess
import sys
from collections import Counter

import pytest

from rl_vllm.engine.cpu_cores import CoreLease

CORES = sorted(os.sched_getaffinity(0))
needs_two_cores = pytest.mark.skipif(len(CORES) < 2, reason="one core cannot be divided")


def lease(folder, num_workers=1, cores_per_worker=1) -> CoreLease:
    return CoreLease(num_workers=num_workers, cores_per_worker=cores_per_worker, folder=folder)


def cores_of(*leases: CoreLease) -> list[int]:
    return [core for each in leases for group in each.groups for core in group]


@needs_two_cores
def test_leases_are_disjoint_while_there_are_cores(tmp_path):
    leases = [lease(tmp_path) for _ in CORES]
    assert sorted(cores_of(*leases)) == CORES


def test_a_released_core_is_leased_again_and_releasing_twice_is_harmless(tmp_path):
    leases = [lease(tmp_path) for _ in CORES]
    leases[-1].release()
    leases[-1].release()
    assert cores_of(lease(tmp_path)) == cores_of(leases[-1])


def test_when_none_is_left_every_core_is_shared_twice_before_any_three_times(tmp_path, caplog):
    leases = [lease(tmp_path) for _ in CORES]
    assert caplog.messages == []
    leases += [lease(tmp_path) for _ in CORES]
    assert Counter(cores_of(*leases)) == dict.fromkeys(CORES, 2)
    assert caplog.messages == ["only 0 of the 1 cores asked for are free: others are shared"] * len(CORES)


def test_a_lease_larger_than_the_machine_takes_every_core_equally_often(tmp_path):
    big = lease(tmp_path, num_workers=2, cores_per_worker=len(CORES))
    assert Counter(cores_of(big)) == dict.fromkeys(CORES, 2)


@needs_two_cores
def test_workers_are_separated_in_vllms_notation(tmp_path):
    low, high = CORES[:2]
    assert lease(tmp_path / "a", num_workers=2).binding == f"{low}|{high}"
    assert lease(tmp_path / "b", cores_per_worker=2).binding == f"{low},{high}"


def test_a_lease_ends_with_its_process_however_that_ends(tmp_path):
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from rl_vllm.engine.cpu_cores import CoreLease\n"
        "lease = CoreLease(num_workers=1, cores_per_worker=int(sys.argv[2]), folder=Path(sys.argv[1]))\n"
        "print(lease.binding, flush=True)\n"
        "sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), str(len(CORES))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout.readline().strip() == ",".join(map(str, CORES))
        sharing = lease(tmp_path)
        holder.kill()
        holder.wait(10)
    sharing.release()
    free = [lease(tmp_path) for _ in CORES]
    assert sorted(cores_of(*free)) == CORES

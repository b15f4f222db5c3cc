"""What routing costs and what it is worth: decisions per second, then simulated replicas beside TorchRL's balancer.

    python benchmarks/routing.py --json outputs/routing.json

Rates are medians over batches of 1,024 prompts, in CPU time of the deciding thread. The simulation is described in
``routing_simulation.py``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import routing_simulation as simulation
from shared import write_figures

from rl_vllm.config import RoutingConfig
from rl_vllm.service.router import Router, Snapshot
from rl_vllm.types import PromptBatch

BATCH = 1024
NUM_REPLICAS = (1, 8, 64, 512)
RESPONSE_TOKENS = 256
WARM_UP_BATCHES = 4
GOAL_PER_S = 200_000
GOAL_GROWTH = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--batches", type=int, default=24, help="measured batches per rate")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    figures = {
        "decisions_per_s": measure_rates(options.batches, options.seed),
        "simulation": run_simulation(options.seed),
    }
    print_rates(figures["decisions_per_s"])
    print_simulation(figures["simulation"])
    write_figures(figures, options.json)


def measure_rates(num_batches: int, seed: int) -> dict[str, dict[int, float]]:
    """Decisions per second by kind of batch and number of replicas."""
    rates = {}
    for name, make in (("mixed", mixed_batches), ("all different", different_batches)):
        batches = make(np.random.default_rng(seed), num_batches + WARM_UP_BATCHES)
        rates[name] = {num_replicas: rate(batches, num_replicas) for num_replicas in NUM_REPLICAS}
    return rates


def rate(batches: list[PromptBatch], num_replicas: int) -> float:
    """Median decisions per second of one router that gets the batches in turn."""
    router = Router(RoutingConfig(), block_size=16)
    none_R = np.zeros(num_replicas, np.int64)
    snapshot = Snapshot(np.arange(num_replicas), none_R, none_R, np.full(num_replicas, np.nan))
    seconds = []
    for batch in batches:
        costs_B = batch.lengths_B + RESPONSE_TOKENS
        started = time.thread_time()
        router.assign(batch, range(len(batch)), costs_B, snapshot)
        seconds.append(time.thread_time() - started)
    return BATCH / statistics.median(seconds[WARM_UP_BATCHES:])


def different_batches(rng: np.random.Generator, count: int) -> list[PromptBatch]:
    """Prompts of 256 to 512 ids that have nothing in common."""
    return [PromptBatch.from_rows([simulation.ids(rng, 256, 513) for _ in range(BATCH)]) for _ in range(count)]


def mixed_batches(rng: np.random.Generator, count: int) -> list[PromptBatch]:
    """A third GRPO groups of 8, a third questions after one system prompt, a third chats that grow."""
    system = simulation.ids(rng, 320, 321)
    chats = {f"chat-{chat}": simulation.ids(rng, 40, 200) for chat in range(1024)}
    batches = []
    for _ in range(count):
        rows, sessions = [], []
        for _ in range(43):
            rows += [simulation.ids(rng, 64, 257)] * 8
        rows += [np.concatenate([system, simulation.ids(rng, 16, 80)]) for _ in range(340)]
        sessions += [None] * len(rows)
        for chat in rng.choice(len(chats), BATCH - len(rows), replace=False):
            name = f"chat-{chat}"
            grown = np.concatenate([chats[name], simulation.ids(rng, 40, 80)])
            # A chat that is long begins anew.
            chats[name] = grown if len(grown) < 400 else simulation.ids(rng, 40, 200)
            rows.append(chats[name])
            sessions.append(name)
        flat = PromptBatch.from_rows(rows)
        batches.append(PromptBatch(flat.tokens_T, flat.offsets_B1, session_ids=tuple(sessions)))
    return batches


def run_simulation(seed: int) -> dict[str, dict[str, dict[str, float]]]:
    """What every router makes of every workload."""
    return {
        workload: {router: asdict(simulation.simulate(build(), make())) for router, make in simulation.routers()}
        for workload, build in simulation.workloads(seed).items()
    }


def print_rates(rates: dict[str, dict[int, float]]) -> None:
    print(f"decisions per second in batches of {BATCH:,} (goal {GOAL_PER_S:,}, growth below {GOAL_GROWTH:g})")
    print(f"{'replicas':<16}" + "".join(f"{count:>10}" for count in NUM_REPLICAS) + f"{'cost 8 -> 512':>16}")
    for name, by_count in rates.items():
        growth = by_count[8] / by_count[512]
        print(f"{name:<16}" + "".join(f"{per_s:>10,.0f}" for per_s in by_count.values()) + f"{growth:>15.2f}x")


def print_simulation(outcomes: dict[str, dict[str, dict[str, float]]]) -> None:
    print(
        f"\n{simulation.NUM_REPLICAS} simulated replicas; high hit rates, low imbalances and short makespans are good"
    )
    for workload, by_router in outcomes.items():
        print(f"\n{workload:<40}{'hit rate':>10}{'imbalance':>11}{'makespan':>11}")
        for router, one in by_router.items():
            print(f"  {router:<38}{one['hit_rate']:>10.3f}{one['imbalance']:>11.2f}{one['makespan_s']:>9.1f} s")


if __name__ == "__main__":
    main()

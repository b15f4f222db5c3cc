"""What asynchronous collection gains over TorchRL's collector, which waits for the longest response of every batch.

    python benchmarks/collector.py --json outputs/collector.json

Both collect groups of the same prompts, with the same policy and sampling settings, from one running service: a tiny
model whose responses end at random, about one token in a hundred, at 400 tokens the latest: a long tail. A useful token
is one of a response that was delivered. The two take turns; figures are medians over rounds, ratios medians of each
round's ratio. LLMCollector runs our ``RolloutEnv``, which is as fast as it gets; a batch is all that it has in flight.
Ours has the groups of one batch in flight ("same": the last one is waited for, as there), and of two ("double", its
default). ``--train-s`` is what the
caller does with each batch before it asks for the next.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from shared import write_figures

GROUP_SIZE = 4
GROUPS_PER_BATCH = 8
ROWS = GROUP_SIZE * GROUPS_PER_BATCH
MAX_TOKENS = 400
# Of the tiny tokenizer: with this bias about one token in a hundred ends the response.
EOS_ID = 511
EOS_BIAS = 1.5
SAMPLE_PERIOD_S = 0.1


@dataclass(frozen=True)
class Measured:
    """One round of one collector.

    Attributes:
        tokens: Response tokens that were delivered.
        seconds: Wall clock.
        running: Responses that the engine worked on, on average, per rollout of a batch.
        idle: Share of the time in which the engine worked on none.
    """

    tokens: int
    seconds: float
    running: float
    idle: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=6, help="batches per round")
    parser.add_argument("--train-s", type=float, default=0.0, help="seconds that the caller keeps each batch")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, launched(Path(folder)) as service:
        ways = {
            "LLMCollector": lambda: theirs(service),
            "ours, same": lambda: ours(service, in_flight=GROUPS_PER_BATCH),
            "ours, double": lambda: ours(service, in_flight=2 * GROUPS_PER_BATCH),
        }
        rounds: dict[str, list[Measured]] = {name: [] for name in ways}
        for number in range(options.rounds + 1):
            names = list(ways)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                measured = measure(service, ways[name], options.batches, options.train_s)
                # The first round warms up.
                if number:
                    rounds[name].append(measured)
    figures = summarise(rounds)
    print_table(figures)
    write_figures({"train_s": options.train_s, "ways": figures}, options.json)


def launched(folder: Path) -> Any:
    from rl_vllm import AsyncVLLM, EngineConfig, ServiceConfig
    from rl_vllm.testing.models import build_tiny_model

    model = build_tiny_model(folder / "tiny")
    engine = EngineConfig(model=str(model), dtype="float32", max_model_len=512, cpu_kv_cache_gib=0.5)
    return AsyncVLLM.launch(ServiceConfig(engine=engine, metrics_period_s=SAMPLE_PERIOD_S))


def task_and_policy(service: Any) -> tuple[Any, Any]:
    from rl_vllm import VLLMPolicy
    from rl_vllm.envs import PromptSource, RolloutTask
    from rl_vllm.testing.models import tiny_tokenizer

    policy = VLLMPolicy(
        service, tokenizer=tiny_tokenizer(), sampling={"max_tokens": MAX_TOKENS, "logit_bias": {EOS_ID: EOS_BIAS}}
    )
    prompts = PromptSource([f"question {number}" for number in range(64)], epochs=None)
    return RolloutTask(prompts, length_reward, policy=policy), policy


def length_reward(response: str, _entry: Any) -> float:
    return float(len(response))


def theirs(service: Any) -> Iterator[int]:
    """Tokens of each batch that TorchRL's collector yields."""
    from torchrl.collectors.llm import LLMCollector

    from rl_vllm.envs import RolloutEnv

    task, policy = task_and_policy(service)
    env = RolloutEnv(task, num_prompts=GROUPS_PER_BATCH, group_size=GROUP_SIZE)
    collector = LLMCollector(env, policy=policy, dialog_turns_per_batch=ROWS)
    try:
        for batch in collector:
            yield int(batch["completion", "response_length"].sum())
    finally:
        collector.shutdown()


def ours(service: Any, *, in_flight: int) -> Iterator[int]:
    """Tokens of each batch that our collector yields."""
    from rl_vllm.collectors import AsyncRolloutCollector, CollectorConfig

    task, policy = task_and_policy(service)
    config = CollectorConfig(group_size=GROUP_SIZE, groups_per_batch=GROUPS_PER_BATCH, max_in_flight=in_flight)
    with AsyncRolloutCollector(task, policy, config=config) as collector:
        for batch in collector:
            assert batch is not None
            yield sum(int(row["masks", "all_assistant_mask"].sum()) for row in batch.unbind(0))


def measure(service: Any, way: Callable[[], Iterator[int]], batches: int, train_s: float) -> Measured:
    stream = way()
    # The first batch finds an empty pipeline: what follows is the steady state.
    next(stream)
    service.clear_timeline()
    begun = time.perf_counter()
    tokens = 0
    for count in itertools.islice(stream, batches):
        tokens += count
        time.sleep(train_s)
    seconds = time.perf_counter() - begun
    running = [sample.running for sample in service.timeline()]
    stream.close()
    return Measured(
        tokens, seconds, statistics.fmean(running) / ROWS, sum(count == 0 for count in running) / len(running)
    )


def summarise(rounds: dict[str, list[Measured]]) -> dict[str, dict[str, float]]:
    base = rounds["LLMCollector"]
    return {
        name: {
            "useful_tokens_per_s": statistics.median(each.rate for each in measured),
            "ratio": statistics.median(each.rate / other.rate for each, other in zip(measured, base, strict=True)),
            "running_per_batch_row": statistics.median(each.running for each in measured),
            "idle_share": statistics.median(each.idle for each in measured),
        }
        for name, measured in rounds.items()
    }


def print_table(figures: dict[str, dict[str, float]]) -> None:
    print(f"\n{ROWS} rollouts a batch, groups of {GROUP_SIZE}, {torch.get_num_threads()} threads here")
    print(f"{'collector':<16}{'useful tokens/s':>17}{'ratio':>8}{'running':>10}{'idle':>8}")
    for name, row in figures.items():
        print(
            f"{name:<16}{row['useful_tokens_per_s']:>17,.0f}{row['ratio']:>8.2f}"
            f"{row['running_per_batch_row']:>10.2f}{row['idle_share']:>8.2f}"
        )


if __name__ == "__main__":
    main()

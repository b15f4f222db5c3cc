"""What a rollout costs over the bare engine: tokens per second of several ways to generate one batch.

    python benchmarks/overhead.py --json outputs/overhead.json

One run; the ways take turns, each round beginning with another; figures are medians over rounds, and ratios are medians
of each round's ratio. On the tiny model, 10,000 tokens per second and more, every microsecond beside the engine shows;
on SmolLM2-135M nearly all time is the engine's. See ``overhead_paths.py`` for what is held equal.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import overhead_paths as paths
from shared import started_ray, write_figures

# A vLLM worker spins for a second after its last work; the next path must not share its core with that.
SETTLE_S = 1.5
PROMPT_TOKENS = 16
BUILDERS = {"raw": paths.raw, "in-process": paths.in_process, "ours": paths.ours, "torchrl": paths.torchrl}
PLANS = {"tiny": ("raw", "in-process", "ours", "torchrl"), "smollm2": ("raw", "ours")}
# Ratios are given to these.
BASES = ("raw", "AsyncLLM")
Builder = Callable[[paths.Batch], dict[str, paths.Path]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--models", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--paths", nargs="+", choices=BUILDERS, default=list(BUILDERS), help="leave the others out")
    options = parser.parse_args()
    paths.set_environment()
    figures = {}
    with tempfile.TemporaryDirectory() as folder, started_ray():
        for name in options.models:
            chosen = [BUILDERS[path] for path in PLANS[name] if path in options.paths]
            figures[name] = measure(batch_for(name, Path(folder)), chosen, options.rounds)
            print_table(name, figures[name])
    write_figures(figures, options.json)


def batch_for(name: str, folder: Path) -> paths.Batch:
    from rl_vllm.testing.models import build_tiny_model, smollm2_checkpoint

    if name == "tiny":
        return random_batch(str(build_tiny_model(folder / "tiny")), num_prompts=256, response_tokens=64)
    return random_batch(str(smollm2_checkpoint()), num_prompts=32, response_tokens=32)


def random_batch(model: str, *, num_prompts: int, response_tokens: int) -> paths.Batch:
    import torch

    prompts = torch.randint(3, 200, (num_prompts, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
    return paths.Batch(model, prompts.tolist(), response_tokens)


def measure(batch: paths.Batch, builders: list[Builder], rounds: int) -> dict[str, object]:
    """Figures of every path that starts; the others' reasons."""
    ways: dict[str, paths.Path] = {}
    absent: dict[str, str] = {}
    try:
        for build in builders:
            try:
                ways |= warmed_up(build(batch))
            except Exception as error:
                if build is not paths.torchrl:
                    raise
                absent["TorchRL"] = f"did not start: {error}"
        return {**compare({name: way.run for name, way in ways.items()}, rounds, batch), "absent": absent}
    finally:
        for way in ways.values():
            way.close()


def warmed_up(ways: dict[str, paths.Path]) -> dict[str, paths.Path]:
    """Each after one run that does not count."""
    for way in ways.values():
        way.run()
    return ways


def compare(runs: dict[str, Callable[[], int]], rounds: int, batch: paths.Batch) -> dict[str, object]:
    """Run the paths in turn."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for round_index in range(rounds):
        # Start each round with another path, so that a drift of the machine favours none.
        start = round_index % len(names)
        for name in names[start:] + names[:start]:
            time.sleep(SETTLE_S)
            started = time.perf_counter()
            tokens = runs[name]()
            samples[name].append(tokens / (time.perf_counter() - started))
            if tokens != len(batch.prompts) * batch.response_tokens:
                raise SystemExit(f"{name} returned {tokens} tokens")
    return {
        "batch": f"{len(batch.prompts)} prompts x {batch.response_tokens} tokens",
        "rounds": rounds,
        "tokens_per_s": {name: statistics.median(values) for name, values in samples.items()},
        **{f"ratio_to_{base}": ratios(samples, base) for base in BASES if base in samples},
        "samples": samples,
    }


def ratios(samples: dict[str, list[float]], base: str) -> dict[str, float]:
    """Median over rounds of each path's rate by that of ``base`` in the same round."""
    return {
        name: statistics.median(one / other for one, other in zip(values, samples[base], strict=True))
        for name, values in samples.items()
    }


def print_table(name: str, figures: dict[str, object]) -> None:
    bases = [base for base in BASES if f"ratio_to_{base}" in figures]
    print(f"\n{name}: {figures['batch']}, medians of {figures['rounds']} rounds")
    print(f"{'path':<22}{'tokens/s':>12}" + "".join(f"{'of ' + base:>14}" for base in bases))
    for way, rate in figures["tokens_per_s"].items():
        cells = "".join(f"{figures[f'ratio_to_{base}'][way]:>14.3f}" for base in bases)
        print(f"{way:<22}{rate:>12,.0f}{cells}")
    for way, reason in figures["absent"].items():
        print(f"{way:<22}{reason}")


if __name__ == "__main__":
    main()

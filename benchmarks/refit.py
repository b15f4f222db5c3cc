"""What a refit costs: seconds per phase of every transport, beside plain copies of the same bytes and TorchRL's scheme.

    python benchmarks/refit.py --json outputs/refit.json

One run; the ways take turns, each round beginning with another; figures are medians over rounds, and ratios are medians
of each round's ratio. See ``refit_paths.py`` for what is compared.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

import refit_paths as paths
from shared import started_ray, write_figures

MODELS = ("smollm2", "synthetic")
BUILDERS = {"ours": paths.ours, "torchrl": paths.torchrl}
COLUMNS = ("check", "stage", "commit", "stall", "total")
# A stage is compared with the copy that it contains.
REFERENCES = {"shared_storage": "file copy", "broadcast": "memory copy, new", "object_store": "memory copy, new"}
STALL_EXTRA_S = 0.05
Rounds = list[dict[str, dict[str, float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--paths", nargs="+", choices=BUILDERS, default=list(BUILDERS), help="leave the others out")
    options = parser.parse_args()
    paths.set_environment()
    figures = {}
    with tempfile.TemporaryDirectory() as folder, started_ray():
        for name in options.models:
            figures[name] = measure(checkpoint(name, Path(folder)), options.paths, options.rounds)
            print_table(name, figures[name])
    write_figures(figures, options.json)


def checkpoint(name: str, folder: Path) -> Path:
    from rl_vllm.testing.models import smollm2_checkpoint

    return smollm2_checkpoint() if name == "smollm2" else paths.build_synthetic(folder / "synthetic")


def measure(path: Path, builders: list[str], num_rounds: int) -> dict[str, object]:
    model = paths.load(path)
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in set(model.parameters()))
    ways: dict[str, paths.Way] = {}
    rounds: Rounds = []
    with (
        tempfile.TemporaryDirectory(prefix="rl_vllm-bench-", dir=paths.memory_folder()) as scratch,
        ExitStack() as ends,
    ):
        ways.update(paths.copies(model, Path(scratch)))
        for builder in builders:
            ways.update(BUILDERS[builder](path, model, ends))
        names = list(ways)
        for number in range(num_rounds + 1):
            order = names[number % len(names) :] + names[: number % len(names)]
            seconds = {name: ways[name].run() for name in order}
            # The first round fills caches and opens connections.
            if number:
                rounds.append(seconds)
    facts = {name: way.facts for name, way in ways.items() if way.facts}
    return {"num_bytes": num_bytes, **summary(rounds, num_bytes), "facts": facts}


def summary(rounds: Rounds, num_bytes: int) -> dict[str, object]:
    """Medians over the rounds, and medians of each round's ratios."""
    table: dict[str, dict[str, float]] = {}
    for name in rounds[0]:
        row = {key: statistics.median(one[name][key] for one in rounds) for key in rounds[0][name]}
        row["gb_per_s"] = num_bytes / 1e9 / row.get("stage", row["total"])
        reference = REFERENCES.get(name.split(",")[0])
        if reference is not None:
            row["stage_of_copy"] = ratio(rounds, lambda one: one[reference]["total"] / one[name]["stage"])  # noqa: B023
            # Goal: at most one, where the goal is two passes over the weights and 50 ms.
            row["stall_of_goal"] = ratio(
                rounds,
                lambda one: one[name]["stall"] / (2 * one["memory copy, in use"]["total"] + STALL_EXTRA_S),  # noqa: B023
            )
            if "TorchRL double buffer" in rounds[0]:
                row["torchrl_of_ours"] = ratio(
                    rounds,
                    lambda one: one["TorchRL double buffer"]["total"] / one[name]["total"],  # noqa: B023
                )
        table[name] = row
    return {"median": table}


def ratio(rounds: Rounds, of: object) -> float:
    return statistics.median(of(one) for one in rounds)  # type: ignore[operator]


def print_table(name: str, figures: dict[str, object]) -> None:
    print(f"\n{name}, {figures['num_bytes'] / 1e6:,.0f} MB; seconds, medians")  # type: ignore[operator]
    heads = (*COLUMNS, "GB/s", "/ copy", "stall/goal", "TorchRL/it", "RPCs")
    print(f"{'':<28}" + "".join(f"{head:>11}" for head in heads))
    for way, row in figures["median"].items():  # type: ignore[attr-defined]
        cells = [f"{row[key]:.3f}" if key in row else "-" for key in COLUMNS]
        cells += [f"{row['gb_per_s']:.2f}"]
        cells += [
            f"{row[key]:.2f}" if key in row else "-" for key in ("stage_of_copy", "stall_of_goal", "torchrl_of_ours")
        ]
        cells += [f"{row['rpcs']:.0f}" if "rpcs" in row else "-"]
        print(f"{way:<28}" + "".join(f"{cell:>11}" for cell in cells))
    for way, facts in figures["facts"].items():  # type: ignore[attr-defined]
        print(f"{way}: " + ", ".join(f"{key}={value}" for key, value in facts.items()))


if __name__ == "__main__":
    main()

"""Everything a run writes: metrics, rollouts, TensorBoard, checkpoints, the summary and the curve."""

from __future__ import annotations

import json
import shutil
import tempfile
import traceback
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from config import CHECKPOINT, GRPOConfig, find_checkpoint
from evaluate import Difference
from tensordict import TensorDictBase
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from rl_vllm.errors import ConfigError

MEAN_OVER = 5
SAVED = ("step", "model", "optimizer", "rng", "reward_before_P")


class RunReport:
    """The output folder of one run; a context manager.

    Building it clears what an earlier run left there: build it when nothing that can be checked can still fail.

    Args:
        config: The run's settings; written to ``config.json``.
        first_step: Steps that are done already: lines of a resumed run beyond them are dropped.
    """

    def __init__(self, config: GRPOConfig, *, first_step: int) -> None:
        self.folder = Path(config.output)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._replace("config.json", json.dumps(asdict(config), indent=2) + "\n")
        self._keep_lines("metrics.jsonl", first_step)
        self._keep_lines("rollouts.jsonl", first_step)
        self._metrics = (self.folder / "metrics.jsonl").open("a")
        self._rollouts = (self.folder / "rollouts.jsonl").open("a")
        if first_step == 0:
            shutil.rmtree(self.folder / "tensorboard", ignore_errors=True)
        self._board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=first_step)
        self._bar = tqdm(total=config.steps, initial=first_step, unit="step", dynamic_ncols=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        self._metrics.close()
        self._rollouts.close()
        self._board.close()

    def rollouts(self, step: int, batch: TensorDictBase) -> None:
        """One line per response: what was asked and said, its reward, and the weights that said it."""
        for row in batch.unbind(0):
            versions = row["policy_version"][row["masks", "all_assistant_mask"]]
            line = {
                "step": step,
                "prompt": row["question"],
                "response": row["history"].response.content[-1],
                "reward": row["next", "reward"].item(),
                "version": int(versions.max()),
                "oldest_version": int(versions.min()),
                "finish_reason": int(row["completion", "finish_reason"]),
            }
            self._rollouts.write(json.dumps(line) + "\n")
        self._rollouts.flush()

    def metrics(self, step: int, values: dict[str, float | None]) -> None:
        """One line, one point per TensorBoard curve, and the progress bar; None is what a step has no value for."""
        self._metrics.write(json.dumps({"step": step} | values) + "\n")
        self._metrics.flush()
        for name, value in values.items():
            if value is not None:
                self._board.add_scalar(name, value, step)
        mismatch = values["logprob_mismatch"]
        self._bar.set_postfix_str(
            f"reward {values['reward']:.2f}, logprob mismatch {'-' if mismatch is None else format(mismatch, '.1e')}, "
            f"refit {values['seconds_refit']:.1f} s"
        )
        self._bar.update()

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        self._bar.write(text)

    def read_metrics(self) -> list[dict[str, float | None]]:
        """Every step's metrics so far."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        """Replace the checkpoint; the old one stays whole until the new one is."""
        aside = self.folder / f"{CHECKPOINT}.new"
        torch.save(state, aside)
        aside.replace(self.folder / CHECKPOINT)

    def finish(self, difference: Difference, *, seconds_setup: float | None, seconds_train: float) -> None:
        """Write ``summary.json`` and ``reward.png``, and print the result."""
        steps = self.read_metrics()
        mismatches = [float(line["logprob_mismatch"]) for line in steps if line["logprob_mismatch"] is not None]
        summary = {
            "steps": len(steps),
            "reward_before": difference.before,
            "reward_after": difference.after,
            "difference_ci95": [difference.low, difference.high],
            "seconds_setup": seconds_setup,
            "seconds_train": seconds_train,
            "logprob_mismatch_mean": sum(mismatches) / len(mismatches) if mismatches else None,
            "refits": steps[-1]["weight_version"],
        }
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        draw_curve(steps, difference, self.folder / "reward.png")
        self.say(str(difference))
        self.say(f"{self.folder}: summary.json, reward.png, metrics.jsonl, rollouts.jsonl, tensorboard, {CHECKPOINT}")

    def _keep_lines(self, name: str, first_step: int) -> None:
        path = self.folder / name
        lines = path.read_text().splitlines() if path.exists() and first_step else []
        if lines and not _is_json(lines[-1]):
            # The run was killed in the middle of a line.
            lines.pop()
        self._replace(name, "".join(line + "\n" for line in lines if json.loads(line)["step"] <= first_step))

    def _replace(self, name: str, text: str) -> None:
        aside = self.folder / f"{name}.new"
        aside.write_text(text)
        aside.replace(self.folder / name)


def check_output(folder: Path) -> None:
    """Make sure that a run can write to its output folder, without touching what is in there.

    Raises:
        ConfigError: It cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"cannot write to output={str(folder)!r} ({error.strerror}): name another folder") from error


def load_checkpoint(folder: Path) -> dict[str, Any]:
    """The state that :meth:`RunReport.save_checkpoint` wrote last.

    Raises:
        ConfigError: The folder has none, or a damaged one.
    """
    path = find_checkpoint(folder)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        return {name: state[name] for name in SAVED}
    except OSError:
        raise
    except Exception as error:
        # A damaged file fails in as many ways as there are bytes; torch's own words suggest to load it unsafely.
        raise ConfigError(f"the checkpoint {path} is damaged: start again without --resume") from error


def keep_traceback() -> str:
    """Write the current exception's traceback to a new file; says where, or why not."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="grpo_sync_", suffix=".txt", delete=False, encoding="utf-8", errors="backslashreplace"
        ) as file:
            file.write(traceback.format_exc())
    except OSError as error:
        return f"the traceback could not be written: {error}"
    return f"the whole traceback is in {file.name}"


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except json.JSONDecodeError:
        return False
    return True


def draw_curve(steps: list[dict[str, float | None]], difference: Difference, path: Path) -> None:
    """The mean reward of every step, its moving average, and the held-out rewards at both ends."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rewards = torch.tensor([float(line["reward"] or 0.0) for line in steps], dtype=torch.float64)
    numbers = torch.arange(1, len(steps) + 1)
    smooth = [rewards[max(0, end - MEAN_OVER) : end].mean().item() for end in numbers.tolist()]
    figure = Figure(figsize=(7, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(numbers, rewards, ".", color="tab:blue", alpha=0.4, label="training batch")
    axes.plot(numbers, smooth, color="tab:blue", label=f"mean of the last {MEAN_OVER} batches")
    ends = [difference.before, difference.after]
    bars = [[0, difference.after - difference.before - difference.low], [0, difference.high - (ends[1] - ends[0])]]
    axes.errorbar(
        [0, len(steps)], ends, yerr=bars, fmt="D", color="tab:red", capsize=4,
        label="held-out prompts, with the 95 % interval of the difference",
    )  # fmt: skip
    axes.set(xlabel="optimiser step", ylabel="mean reward", ylim=(0, 1))
    # Outside: rewards may lie anywhere in the axes.
    figure.legend(loc="outside lower center", frameon=False)
    figure.savefig(path, dpi=150)

"""What the README shows runs, and what it claims is what was measured."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.truth import load_trainer

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.mark.engine
def test_the_example_runs_and_its_receipt_names_version_one(
    tiny_qwen3_tied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = blocks("python")
    names = {"MODEL": str(tiny_qwen3_tied), "trainer_model": load_trainer(tiny_qwen3_tied)}
    exec(compile(example, "README.md", "exec"), names)
    rollout = names["rollout"]
    assert rollout["tokens"].full.shape == rollout["log_probs"].full.shape == rollout["policy_version"].shape
    assert "version=1 transport=shared_storage replicas=1" in capsys.readouterr().out


def test_every_make_target_it_names_exists() -> None:
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named
    assert named <= targets


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_make_quickstart_trains_smollm2_and_writes_its_summary(tmp_path: Path) -> None:
    short = f"--steps 2 --output {tmp_path}/run --set num_held_out=4 --set eval_samples=1 --set prompts_per_step=2"
    done = subprocess.run(
        ["make", "quickstart", f"ARGS={short}"], cwd=ROOT, capture_output=True, text=True, timeout=580, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["refits"] == 3
    assert summary["logprob_mismatch_mean"] < 1e-3
    assert set(summary) >= {"reward_before", "reward_after", "difference_ci95", "seconds_setup", "seconds_train"}


@pytest.mark.engine
def test_the_benchmark_prints_its_table(tmp_path: Path) -> None:
    path = tmp_path / "overhead.json"
    command = [sys.executable, "benchmarks/overhead.py", "--rounds", "1", "--json", path]
    # The other ways and the larger model are left to whoever measures.
    command += ["--models", "tiny", "--paths", "raw", "ours"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"^policy +[\d,]+ +\d\.\d\d\d$", done.stdout, re.MULTILINE)
    assert set(json.loads(path.read_text())["tiny"]["ratio_to_raw"]) == {"raw", "service", "policy"}

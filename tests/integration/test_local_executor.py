"""Engines in the program's own process: its loop, its variables, its interrupts, and what it leaves when killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rl_vllm.engine.reaper import descendants, mapped_segments, start_time
from tests.integration.test_clean_up import GONE_WITHIN_S, wait_for
from tests.integration.truth import load_trainer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).parents[2]
STEP_TIMEOUT_S = 400.0


@contextmanager
def program(log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


def lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]


def wait_for_line(process: subprocess.Popen[bytes], log: Path, count: int) -> dict[str, Any]:
    wait_for(
        lambda: len(lines(log)) >= count or process.poll() is not None, STEP_TIMEOUT_S, f"line {count} of the script"
    )
    assert len(lines(log)) >= count, log.read_text()
    return lines(log)[count - 1]


def titles(pid: int) -> set[bytes]:
    return {Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[0] for child, _ in descendants(pid)}


def test_an_engine_is_launched_frozen_stopped_restarted_and_killed_with_its_program(
    tiny_qwen3_tied: Path, tmp_path: Path
) -> None:
    import torch

    ids = [5, 6, 7]
    model = load_trainer(tiny_qwen3_tied)
    for _ in range(4):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    log = tmp_path / "log"
    with program(log, "-m", "tests.integration.local_script", str(tiny_qwen3_tied)) as process:
        launched = wait_for_line(process, log, 1)
        assert launched["same_variables"]
        assert launched["titles"] == ["VLLM::EngineCore", "VLLM::Worker"]
        assert launched["answer"] == ids[3:]
        # The loop went on: it is a thread that waits. A launch takes seconds, in which it turned at least this often.
        assert launched["num_ticks"] > 10
        assert wait_for_line(process, log, 2)["left"] == []
        again = wait_for_line(process, log, 3)
        assert again == {"again": ids[3:], "old": [], "same_variables": True}
        family = descendants(process.pid)
        segments = {name for pid, _ in family for name in mapped_segments(pid)}
        assert {b"VLLM::EngineCore", b"VLLM::Worker"} <= titles(process.pid)
        assert segments
        process.kill()
        process.wait(10)
    wait_for(
        lambda: (
            not any(start_time(pid) == began for pid, began in family)
            and not any(Path(name).exists() for name in segments)
        ),
        GONE_WITHIN_S,
        "the processes and segments to go",
    )


INTERRUPTED = """
import os, sys, threading
from rl_vllm import AsyncVLLM, EngineConfig

def main():
    other = __import__("subprocess").Popen(["sleep", "300"])
    try:
        AsyncVLLM.launch(EngineConfig(model=sys.argv[1], dtype="float32", cpu_kv_cache_gib=0.25), executor="local")
    except KeyboardInterrupt:
        names = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("rl_vllm"))
        print('{"interrupted": true, "threads": %d, "mine": %d}' % (len(names), other.pid), flush=True)
    input()
    other.kill()

if __name__ == "__main__":
    main()
"""


def test_an_interrupt_while_it_launches_ends_what_was_started_and_nothing_else(
    tiny_qwen3_tied: Path, tmp_path: Path
) -> None:
    log, script = tmp_path / "log", tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    with program(log, str(script), str(tiny_qwen3_tied)) as process:
        wait_for(lambda: b"VLLM::EngineCore" in titles(process.pid), STEP_TIMEOUT_S, "the engine to start")
        os.kill(process.pid, signal.SIGINT)
        seen = wait_for_line(process, log, 1)
        assert seen["threads"] == 0
        assert not any(title.startswith(b"VLLM::") for title in titles(process.pid))
        assert start_time(seen["mine"]) is not None
        process.communicate(b"\n", timeout=60)
        assert process.returncode == 0

"""Nothing is left behind: not by a killed driver, not by an engine that does not start."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl_vllm import AsyncVLLM, EngineConfig
from rl_vllm.engine.reaper import descendants, mapped_segments, start_time
from rl_vllm.errors import ConfigError, EngineStartError, NotEnoughResourcesError

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

DRIVER = Path(__file__).with_name("driver_to_kill.py")
GONE_WITHIN_S = 15.0


def test_a_killed_driver_leaves_no_process_and_no_shared_memory(tiny_llama: Path, tmp_path: Path) -> None:
    log = (tmp_path / "log").open("w+")
    driver = subprocess.Popen([sys.executable, DRIVER, str(tiny_llama)], stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: "serving" in Path(log.name).read_text(), 240, "the driver to serve")
        family = descendants(driver.pid)
        titles = {Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0] for pid, _ in family}
        # Something must be there to be cleaned up.
        assert {b"VLLM::EngineCore", b"VLLM::Worker"} <= titles
        segments = {name for pid, _ in family for name in mapped_segments(pid)}
        assert segments
    finally:
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait(10)
        log.close()
    wait_for(
        lambda: (
            not any(start_time(pid) == began for pid, began in family)
            and not any(Path(name).exists() for name in segments)
        ),
        GONE_WITHIN_S,
        "the processes and segments to go",
    )


def wait_for(condition: object, within_s: float, what: str) -> None:
    deadline = time.monotonic() + within_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"waited {within_s} s for {what}"
        time.sleep(0.1)


def test_an_engine_that_cannot_start_says_why_in_its_own_words(tiny_llama: Path) -> None:
    config = EngineConfig(model=str(tiny_llama), dtype="float32", max_model_len=512, cpu_kv_cache_gib=0.00001)
    with pytest.raises(EngineStartError, match=r"No available memory for the cache blocks.*cpu_kv_cache_gib") as caught:
        AsyncVLLM.launch(config)
    assert caught.value.replica == 0
    assert "root cause" not in str(caught.value)


def test_a_model_longer_than_its_positions_is_refused_with_the_engines_reason(tiny_llama: Path) -> None:
    with pytest.raises(EngineStartError, match="max_model_len"):
        AsyncVLLM.launch(EngineConfig(model=str(tiny_llama), dtype="float32", max_model_len=100_000))


def test_more_replicas_than_the_cluster_holds_are_refused_at_once(tiny_llama: Path) -> None:
    with pytest.raises(NotEnoughResourcesError, match=r"'CPU': 512\.0"):
        AsyncVLLM.launch(EngineConfig(model=str(tiny_llama)), num_replicas=512)


def test_a_missing_model_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        AsyncVLLM.launch(EngineConfig(model="/no/such/folder"))
    with pytest.raises(ConfigError, match="neither a folder here nor readable from the hub"):
        AsyncVLLM.launch(EngineConfig(model="nobody/no-such-model"))


def test_a_ray_address_where_nothing_listens_is_refused(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        # Bound but not listening: connections are refused.
        with pytest.raises(ConfigError, match=address):
            AsyncVLLM.launch(EngineConfig(model=str(tiny_llama)))


def test_an_unknown_engine_setting_is_refused_with_the_nearest_names(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        AsyncVLLM.from_pretrained(str(tiny_llama), max_num_seq=4)

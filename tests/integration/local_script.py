"""Runs a local executor in an event loop of the main thread, as a notebook does, and says what it sees.

Usage: ``local_script.py MODEL``. Its engine is frozen, stopped and started again; in the end it waits to be killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np

from rl_vllm import EngineConfig, SamplingConfig, ServiceConfig
from rl_vllm.engine.reaper import descendants, start_time
from rl_vllm.protocols import Engine
from rl_vllm.service.local_executor import LocalExecutor
from rl_vllm.types import PromptBatch, RequestBatch


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def engine_processes() -> dict[int, str]:
    """Title of every process that vLLM has started below this one."""
    found = {}
    for pid, _ in descendants(os.getpid()):
        title = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
        if title.startswith("VLLM::"):
            found[pid] = title
    return found


async def answer(engine: Engine, number: int) -> list[int]:
    sampling = SamplingConfig(max_tokens=4, temperature=0.0, ignore_eos=True)
    requests = RequestBatch(np.array([number]), PromptBatch.from_rows([[5, 6, 7]]), (sampling,))
    return [token async for chunk in engine.stream(requests) for token in chunk.tokens_T.tolist()]


async def main() -> None:
    engine = EngineConfig(model=sys.argv[1], dtype="float32", max_model_len=512, cpu_kv_cache_gib=0.25)
    config = ServiceConfig(engine=engine, shutdown_timeout_s=3.0)
    num_ticks = 0

    async def tick() -> None:
        nonlocal num_ticks
        while True:
            await asyncio.sleep(0.01)
            num_ticks += 1

    variables = dict(os.environ)
    executor = LocalExecutor()
    executor.prepare(config)
    ticking = asyncio.create_task(tick())
    (running,), info = await executor.launch(config)
    ticking.cancel()
    say(
        launched=info.model,
        same_variables=dict(os.environ) == variables,
        titles=sorted(engine_processes().values()),
        num_ticks=num_ticks,
        answer=await answer(running, 1),
    )
    before = descendants(os.getpid())
    for pid, title in engine_processes().items():
        if title == "VLLM::EngineCore":
            os.kill(pid, signal.SIGSTOP)
    await executor.stop_one(0)
    await executor.stop_one(0)
    say(left=sorted(engine_processes().values()), lived=len(before))
    again = await executor.start_one(0)
    say(
        again=await answer(again, 1),
        old=[pid for pid in engine_processes() if (pid, start_time(pid)) in before],
        same_variables=dict(os.environ) == variables,
    )
    await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main())

"""What the benchmarks of engines have in common: one Ray for both services, TorchRL's service, and where figures go."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

STOP_TIMEOUT_S = 30.0


@contextlib.contextmanager
def started_ray() -> Iterator[None]:
    """One Ray for our service and TorchRL's.

    TorchRL's takes a GPU per replica without asking: Ray is told that there is one. Ours asks vLLM, which says CPU.
    """
    import ray

    ray.init(num_cpus=4, num_gpus=1, include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def launch_torchrl(**settings: Any) -> tuple[Any, Callable[[], None]]:
    """TorchRL's service with these engine arguments, and what ends it."""
    from torchrl.modules.llm import AsyncVLLM
    from vllm import AsyncEngineArgs

    before = {process.pid for process in psutil.Process().children(recursive=True)}
    service = AsyncVLLM.launch(AsyncEngineArgs(**settings))
    processes = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]

    def close() -> None:
        # Its shutdown kills its actors alone; what vLLM started in them would live on and leave its shared memory.
        engines = [process for process in processes if _is_titled(process, "VLLM::EngineCor")]
        for process in engines:
            process.terminate()
        psutil.wait_procs(engines, timeout=STOP_TIMEOUT_S)
        service.shutdown()

    return service, close


def write_figures(figures: dict[str, Any], path: Path | None) -> None:
    """As JSON, when a path is given."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=2) + "\n")


def _is_titled(process: psutil.Process, title: str) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name().startswith(title)
    return False

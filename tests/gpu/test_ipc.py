"""Refits out of the trainer's memory, with the engine on the trainer's own GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.gpus import need_gpus

need_gpus(1)

from rl_vllm.errors import RefitError
from tests.gpu.refits import engine_config, refit_three_times


def test_an_engine_on_the_trainers_gpu_has_its_weights_three_times_in_a_row(tiny_qwen3_tied: Path) -> None:
    refit_three_times(engine_config(tiny_qwen3_tied), "ipc", device=torch.device("cuda", 0))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_an_engine_on_another_gpu_refuses(tiny_qwen3_tied: Path) -> None:
    with pytest.raises(RefitError, match="needs them on one GPU"):
        refit_three_times(engine_config(tiny_qwen3_tied), "ipc", device=torch.device("cuda", 1))

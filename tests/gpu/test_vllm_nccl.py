"""Refits by vLLM's NCCL weight transfer, the trainer on the last GPU and the engines on the first ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.gpus import need_gpus

need_gpus(2)

from rl_vllm.weights import VLLMNCCLTransport
from tests.gpu.refits import engine_config, refit_three_times

LAST = torch.device("cuda", torch.cuda.device_count() - 1)


@pytest.mark.parametrize("bucket_bytes", [256 << 20, 10_000])
def test_one_replica_has_the_trainers_weights_three_times_in_a_row(tiny_qwen3_tied: Path, bucket_bytes: int) -> None:
    refit_three_times(engine_config(tiny_qwen3_tied), VLLMNCCLTransport(bucket_bytes=bucket_bytes), device=LAST)


@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs 3 GPUs")
def test_two_replicas_have_the_trainers_weights(tiny_qwen3_untied: Path) -> None:
    refit_three_times(engine_config(tiny_qwen3_untied), "vllm_nccl", num_replicas=2, device=LAST)


@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs 3 GPUs")
def test_two_workers_of_one_replica_have_their_parts_of_the_weights(tiny_qwen3_tied: Path) -> None:
    refit_three_times(engine_config(tiny_qwen3_tied, tensor_parallel_size=2), "vllm_nccl", device=LAST)

"""Seeded requests whose prompts are processed in parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_vllm import AsyncVLLM, EngineConfig, SamplingConfig
from rl_vllm.types import PromptBatch

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_seed_gives_the_same_tokens_whether_or_not_the_prompt_is_split(tiny_llama: Path) -> None:
    # 16 prompts of 100 tokens do not fit a step of 256: alone each is processed whole, together some are split.
    config = EngineConfig(
        model=str(tiny_llama), dtype="float32", max_model_len=256, cpu_kv_cache_gib=0.25,
        enable_prefix_caching=False, engine_kwargs={"max_num_batched_tokens": 256},
    )  # fmt: skip
    rows = [[5 + (row * 7 + position * 3) % 200 for position in range(100)] for row in range(16)]
    sampling = SamplingConfig(max_tokens=6, seed=5, ignore_eos=True)
    with AsyncVLLM.launch(config) as service:
        together = service.generate_batch(PromptBatch.from_rows(rows), sampling)
        first_alone = service.generate_batch(PromptBatch.from_rows(rows[:1]), sampling)
        again = service.generate_batch(PromptBatch.from_rows(rows), sampling)
        # Row 2 is the first that is split; its seed belongs to its place in the batch.
        whole = service.generate_batch(PromptBatch.from_rows([[5], [5], rows[2]]), sampling)
    assert together.tokens_T.tolist() == again.tokens_T.tolist()
    assert together.tokens(0).tolist() == first_alone.tokens(0).tolist()
    assert together.tokens(2).tolist() == whole.tokens(2).tolist()

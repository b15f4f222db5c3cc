"""Tokens per second of raw vLLM, of the service and of the policy, in one run with alternating repeats.

    python benchmarks/overhead.py --json outputs/overhead.json

All three generate the same batch on the same kind of engine with one core; the ratios are medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

NUM_PROMPTS = 256
PROMPT_TOKENS = 16
RESPONSE_TOKENS = 64
# A vLLM worker spins for a second after its last work; the next path must not share its core with that.
SETTLE_S = 1.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", help="path or hub id; default: a tiny random model")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(options.model or build_model(Path(folder)), options.rounds)
    print_table(figures)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def build_model(folder: Path) -> str:
    from rl_vllm.testing.models import build_tiny_model

    return str(build_tiny_model(folder / "tiny"))


def measure(model: str, rounds: int) -> dict[str, object]:
    """Median tokens per second of each path and the median ratios to raw vLLM."""
    runs, close = build_runs(model)
    try:
        return compare(runs, rounds)
    finally:
        close()


def compare(runs: dict[str, Callable[[], int]], rounds: int) -> dict[str, object]:
    """Run the paths in turn, after one run of each that does not count."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for round_index in range(rounds):
        # Start each round with another path, so that a drift of the machine favours none.
        names = list(runs)
        order = names[round_index % len(names) :] + names[: round_index % len(names)]
        for name in order:
            time.sleep(SETTLE_S)
            started = time.perf_counter()
            tokens = runs[name]()
            samples[name].append(tokens / (time.perf_counter() - started))
    ratios = {
        name: statistics.median(ours / raw for ours, raw in zip(samples[name], samples["raw"], strict=True))
        for name in runs
    }
    return {
        "batch": f"{NUM_PROMPTS} prompts x {RESPONSE_TOKENS} tokens",
        "rounds": rounds,
        "tokens_per_s": {name: statistics.median(values) for name, values in samples.items()},
        "ratio_to_raw": ratios,
    }


def build_runs(model: str) -> tuple[dict[str, Callable[[], int]], Callable[[], None]]:
    """The three paths, each a call that makes the batch and returns how many tokens came; and a call that ends them."""
    import torch
    from tensordict import TensorDict
    from torchrl.modules.llm.policies import Tokens

    from rl_vllm import AsyncVLLM, EngineConfig, SamplingConfig, VLLMPolicy
    from rl_vllm.types import PromptBatch

    raw_engine, raw_params = build_raw(model)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 200, (NUM_PROMPTS, PROMPT_TOKENS), generator=generator)
    rows = prompts.tolist()
    service = AsyncVLLM.launch(
        EngineConfig(
            model=model, dtype="float32", max_model_len=256, enable_prefix_caching=False, cpu_kv_cache_gib=0.25
        )
    )
    sampling = SamplingConfig(max_tokens=RESPONSE_TOKENS, ignore_eos=True)
    policy = VLLMPolicy(service, input_mode="tokens", sampling=sampling)
    inputs = TensorDict(
        {"tokens": Tokens(prompt=prompts, padded=True, batch_size=[NUM_PROMPTS])}, batch_size=[NUM_PROMPTS]
    )

    def raw() -> int:
        outputs = raw_engine.generate([{"prompt_token_ids": row} for row in rows], raw_params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def through_service() -> int:
        return len(service.generate_batch(PromptBatch.from_rows(rows), sampling).tokens_T)

    def through_policy() -> int:
        return int(policy(inputs.copy())["completion", "response_length"].sum())

    def close() -> None:
        service.shutdown()
        raw_engine.llm_engine.engine_core.shutdown()

    return {"raw": raw, "service": through_service, "policy": through_policy}, close


def build_raw(model: str):
    """A plain ``vllm.LLM`` on core 0, asked for what the service asks for: ids and logprobs, no text."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0"
    from vllm import LLM, SamplingParams

    engine = LLM(
        model,
        dtype="float32",
        max_model_len=256,
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=2**28,
        logprobs_mode="processed_logprobs",
    )
    params = SamplingParams(max_tokens=RESPONSE_TOKENS, logprobs=0, ignore_eos=True, detokenize=False)
    return engine, params


def print_table(figures: dict[str, object]) -> None:
    print(f"{figures['batch']}, medians of {figures['rounds']} rounds")
    print(f"{'path':<10}{'tokens/s':>12}{'ratio to raw':>16}")
    for name, rate in figures["tokens_per_s"].items():
        print(f"{name:<10}{rate:>12.0f}{figures['ratio_to_raw'][name]:>16.2f}")


if __name__ == "__main__":
    main()

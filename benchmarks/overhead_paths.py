"""The ways to generate one batch that ``overhead.py`` compares, each with an engine of its own.

Every engine computes on core 0, in a process of its own, with the same settings; every client runs in this process or
in an actor, and finds the other cores free. Engines of all paths stay up and only one works at a time. All are asked
with the same sampling parameters (ids, one logprob per token, no text); only TorchRL's wrapper makes its own.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shared import launch_torchrl

KV_BYTES = 2**28
MAX_MODEL_LEN = 256


@dataclass(frozen=True)
class Batch:
    """What every path generates.

    Attributes:
        model: Path or hub id.
        prompts: Token ids, rows of one length.
        response_tokens: Length of every response.
    """

    model: str
    prompts: list[list[int]]
    response_tokens: int

    @property
    def sampling(self) -> Any:
        from rl_vllm import SamplingConfig

        return SamplingConfig(max_tokens=self.response_tokens, ignore_eos=True)

    @property
    def params(self) -> Any:
        from rl_vllm.engine.params import to_vllm

        return to_vllm(self.sampling)


@dataclass(frozen=True)
class Path:
    """One way to generate the batch.

    Attributes:
        run: Generates it and returns how many tokens came.
        close: Ends its engine.
    """

    run: Callable[[], int]
    close: Callable[[], None]


def set_environment() -> None:
    """For the engines of this process and for Ray's processes, which inherit it. Call it before either exists."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0"
    # Not forked: this process has threads by then.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def engine_settings(batch: Batch) -> dict[str, Any]:
    return {
        "model": batch.model,
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": KV_BYTES,
        "logprobs_mode": "processed_logprobs",
    }


def raw(batch: Batch) -> dict[str, Path]:
    """``vllm.LLM.generate``."""
    from vllm import LLM

    engine, params = LLM(**engine_settings(batch)), batch.params
    inputs = [{"prompt_token_ids": row} for row in batch.prompts]

    def run() -> int:
        return num_tokens(engine.generate(inputs, params, use_tqdm=False))

    return {"raw": Path(run, engine.llm_engine.engine_core.shutdown)}


def in_process(batch: Batch) -> dict[str, Path]:
    """The engine that both services stand on, ``AsyncLLM``, called in the loop that it lives on."""
    from vllm import AsyncEngineArgs
    from vllm.inputs.engine import tokens_input
    from vllm.v1.engine.async_llm import AsyncLLM

    loop = asyncio.new_event_loop()

    async def build() -> AsyncLLM:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_settings(batch), disable_log_stats=True))

    engine, params = loop.run_until_complete(build()), batch.params

    async def one(number: int, row: list[int]) -> Any:
        return [output async for output in engine.generate(tokens_input(row), params, str(number))][-1]

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(one(number, row) for number, row in enumerate(batch.prompts)))

    def close() -> None:
        engine.shutdown()
        loop.close()

    return {"AsyncLLM": Path(lambda: num_tokens(loop.run_until_complete(all_of_them())), close)}


def ours(batch: Batch) -> dict[str, Path]:
    """Our service on Ray, and our policy on it."""
    import torch
    from tensordict import TensorDict
    from torchrl.modules.llm.policies import Tokens

    from rl_vllm import AsyncVLLM, EngineConfig, VLLMPolicy
    from rl_vllm.types import PromptBatch

    service = AsyncVLLM.launch(
        EngineConfig(
            model=batch.model,
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=False,
            cpu_kv_cache_gib=KV_BYTES / 2**30,
        )
    )
    policy = VLLMPolicy(service, input_mode="tokens", sampling=batch.sampling)
    size = [len(batch.prompts)]
    inputs = TensorDict(
        {"tokens": Tokens(prompt=torch.tensor(batch.prompts), padded=True, batch_size=size)}, batch_size=size
    )

    def through_service() -> int:
        return len(service.generate_batch(PromptBatch.from_rows(batch.prompts), batch.sampling).tokens_T)

    def through_policy() -> int:
        return int(policy(inputs.copy())["completion", "response_length"].sum())

    return {"service": Path(through_service, service.shutdown), "policy": Path(through_policy, lambda: None)}


def torchrl(batch: Batch) -> dict[str, Path]:
    """TorchRL's service on Ray, and its wrapper on it."""
    import torch
    from tensordict import TensorDict
    from torchrl.modules.llm import vLLMWrapper
    from torchrl.modules.llm.policies import Tokens

    service, close = launch_torchrl(**engine_settings(batch))
    params, size = batch.params, [len(batch.prompts)]
    wrapper = vLLMWrapper(
        service,
        input_mode="tokens",
        tokenizer=tokenizer_of(batch.model),
        pad_output=True,
        generate_kwargs={"max_tokens": batch.response_tokens, "ignore_eos": True},
    )
    inputs = TensorDict(
        {"tokens": Tokens(prompt=torch.tensor(batch.prompts), padded=True, batch_size=size)}, batch_size=size
    )

    def through_service() -> int:
        return num_tokens(service.generate([{"prompt_token_ids": row} for row in batch.prompts], params))

    def through_wrapper() -> int:
        return wrapper(inputs.copy())["tokens"].response.numel()

    return {
        "TorchRL AsyncVLLM": Path(through_service, close),
        "TorchRL vLLMWrapper": Path(through_wrapper, lambda: None),
    }


def tokenizer_of(model: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def num_tokens(outputs: list[Any]) -> int:
    return sum(len(sample.token_ids) for output in outputs for sample in output.outputs)

"""A driver that launches a service, says so, and generates until it is killed."""

import sys

from rl_vllm import AsyncVLLM, EngineConfig, SamplingConfig
from rl_vllm.types import PromptBatch


def main() -> None:
    service = AsyncVLLM.launch(
        EngineConfig(model=sys.argv[1], dtype="float32", max_model_len=1024, cpu_kv_cache_gib=0.25), num_replicas=1
    )
    print("serving", flush=True)
    prompts = PromptBatch.from_rows([[7, 3, row] for row in range(64)])
    while True:
        service.generate_batch(prompts, SamplingConfig(max_tokens=1000, ignore_eos=True))
        print("batch", flush=True)


if __name__ == "__main__":
    main()

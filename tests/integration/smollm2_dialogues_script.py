"""200 tool dialogues of four turns with SmolLM2 in float32; prints what was compared and the worst error."""

from __future__ import annotations

from transformers import AutoTokenizer

from rl_vllm import AsyncVLLM, EngineConfig, VLLMPolicy
from rl_vllm.collectors import AsyncRolloutCollector, CollectorConfig
from rl_vllm.envs import RolloutTask
from rl_vllm.testing.models import smollm2_checkpoint
from tests.integration.dialogues import RandomTool, Recorder, check_prefixes, worst_error
from tests.integration.facts import tell
from tests.integration.truth import load_trainer

NUM_DIALOGUES = 200


def main() -> None:
    checkpoint = smollm2_checkpoint()
    config = EngineConfig(model=str(checkpoint), dtype="float32", max_model_len=512, cpu_kv_cache_gib=1.0, cpu_cores=2)
    with AsyncVLLM.launch(config, num_replicas=1) as service:
        recorder = Recorder(service)
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        policy = VLLMPolicy(recorder, tokenizer=tokenizer, sampling={"max_tokens": 24})
        prompts = [f"What is {number} plus {number % 7}? Use the tool." for number in range(NUM_DIALOGUES)]
        task = RolloutTask(prompts, lambda response, entry: 1.0, policy=policy, interaction=RandomTool)
        rollouts = CollectorConfig(group_size=1, groups_per_batch=50, no_progress_s=300.0)
        with AsyncRolloutCollector(task, policy, config=rollouts) as collector:
            rows = [row for batch in collector for row in batch.unbind(0)]
    worst, count = worst_error(rows, load_trainer(checkpoint))
    tell(
        {
            "dialogues": len(rows),
            "turns": [int(row["rollout", "num_turns"]) for row in rows],
            "compared": check_prefixes(recorder.turns),
            "tokens": count,
            "worst_error_nats": worst,
        }
    )


if __name__ == "__main__":
    main()

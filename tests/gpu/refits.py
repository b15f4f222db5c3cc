"""Three refits of a real engine, each compared with the Hugging Face model that the weights came from."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from transformers import PreTrainedModel

from rl_vllm import AsyncVLLM, EngineConfig, RefitConfig, SamplingConfig, VLLMWeightSyncScheme
from rl_vllm.protocols import SendingTransport
from rl_vllm.types import PromptBatch, Verify
from tests.integration.truth import load_trainer, response_logprobs, train_a_bit

ROWS = [[7, 3, 300, 41, row] for row in range(4)]
# The engine computes in bfloat16, the truth in float32 with the same weights.
TOLERANCE_NATS = 0.15


def engine_config(model: Path, *, tensor_parallel_size: int = 1) -> EngineConfig:
    return EngineConfig(
        model=str(model),
        dtype="bfloat16",
        max_model_len=512,
        enforce_eager=True,
        gpu_memory_utilization=0.3,
        tensor_parallel_size=tensor_parallel_size,
    )


def worst_error(service: AsyncVLLM, model: PreTrainedModel, version: int) -> float:
    """Largest difference of a sampled token's logprob, in nats; every token must bear the version."""
    batch = service.generate_batch(PromptBatch.from_rows(ROWS), SamplingConfig(max_tokens=32, ignore_eos=True))
    worst = 0.0
    for index, row in enumerate(ROWS):
        assert set(batch.versions(index).tolist()) == {version}
        truth = response_logprobs(model, row, batch.tokens(index).tolist())
        worst = max(worst, float((torch.tensor(batch.logprobs(index)) - truth).abs().max()))
    return worst


def refit_three_times(
    config: EngineConfig, transport: str | SendingTransport, *, num_replicas: int = 1, device: torch.device
) -> None:
    """Train, refit and compare, three times.

    Args:
        config: The engines.
        transport: How the weights move.
        num_replicas: On GPUs of their own, from the first on.
        device: Where the trainer's model is.
    """
    torch.cuda.set_device(device)
    model = load_trainer(Path(config.model))
    scheme = VLLMWeightSyncScheme(
        transport, config=RefitConfig(verify=Verify.LOGPROBS, max_logprob_difference=TOLERANCE_NATS)
    )
    with AsyncVLLM.launch(config, num_replicas=num_replicas) as service:
        sender = scheme.create_sender(service)
        for seed in range(3):
            old = copy.deepcopy(model)
            train_a_bit(model, seed)
            # What the engine gets, so that rounding to bfloat16 is no difference.
            sent = copy.deepcopy(model).to(device, torch.bfloat16)
            receipt = sender.update_weights(sent)
            truth = copy.deepcopy(sent).float().cpu()
            print(receipt)
            assert receipt.version == seed + 1
            assert receipt.num_replicas == num_replicas
            assert worst_error(service, truth, receipt.version) < TOLERANCE_NATS
            # The check would see weights that stayed behind.
            assert worst_error(service, old, receipt.version) > 2 * TOLERANCE_NATS
        sender.shutdown()

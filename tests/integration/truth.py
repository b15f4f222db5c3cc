"""The independent answer: logprobs of sampled tokens under a Hugging Face model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


def load_trainer(path: Path) -> PreTrainedModel:
    """The checkpoint in float32, for scoring and as the trainer's model."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def train_a_bit(model: PreTrainedModel, seed: int) -> None:
    """Move every weight far enough that an old one left behind costs more than any tolerance."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)


def response_logprobs(model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int]) -> torch.Tensor:
    """Logprob of each response token after the prompt, float32 [response length]."""
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(response)[:, None])[:, 0]

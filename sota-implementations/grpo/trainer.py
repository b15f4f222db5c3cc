"""TorchRL's trainer wrapper, spared the logits of prompt tokens."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.modules.distributions import LLMMaskedCategorical
from torchrl.modules.llm import TransformersWrapper

# Axes: B sequences, T tokens padded on the left, R last tokens, among which all responses lie, V vocabulary.


class ResponseTrainer(TransformersWrapper):
    """:class:`TransformersWrapper` whose training distribution covers the sampled tokens alone.

    When prompts are long and responses short, most of a batch's logits (V numbers for each token) are of prompts and
    are thrown away; on a CPU they cost as much time as the network.
    """

    def _get_rlhf_dist(self, tensordict: TensorDictBase, **_kwargs: Any) -> TailCategorical:
        tokens_BT = _pad_left(tensordict, ("tokens", "full"), fill=self.tokenizer.pad_token_id)
        attention_BT = _pad_left(tensordict, ("masks", "all_attention_mask"), fill=0)
        sampled_BT = _pad_left(tensordict, ("masks", "all_assistant_mask"), fill=0)
        num_last = tokens_BT.shape[1] - int(sampled_BT.any(0).nonzero()[0])
        logits_BRV = self.model(
            input_ids=tokens_BT,
            attention_mask=attention_BT.long(),
            position_ids=(attention_BT.cumsum(1) - 1).clamp(min=0),
            # The logits of a token stand at the token before it.
            logits_to_keep=num_last + 1,
            use_cache=False,
        ).logits[:, :-1]
        return TailCategorical(logits_BRV, sampled_BT)


class TailCategorical(LLMMaskedCategorical):
    """A distribution over T tokens with logits for the last R of them, where every token of the mask is."""

    def __init__(self, logits_BRV: torch.Tensor, mask_BT: torch.Tensor) -> None:
        super().__init__(logits_BRV, mask_BT[:, -logits_BRV.shape[1] :])
        self._mask_BT = mask_BT

    @property
    def mask(self) -> torch.Tensor:
        return self._mask_BT

    def log_prob(self, value: torch.Tensor) -> torch.Tensor:
        """Nats, [B, T]; 0 outside the mask."""
        num_last = self._mask.shape[1]
        return torch.nn.functional.pad(super().log_prob(value[:, -num_last:]), (value.shape[1] - num_last, 0))


def _pad_left(tensordict: TensorDictBase, key: tuple[str, str], *, fill: int) -> torch.Tensor:
    padded: torch.Tensor = tensordict.get(key, as_padded_tensor=True, padding_side="left", padding_value=fill)
    return padded

"""What a policy writes, as TorchRL specs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchrl.data import Composite, NonTensor, Unbounded
from torchrl.data.llm import History

from rl_vllm.policy.keys import PolicyKeys

_TOKENS = torch.int64
_FLAGS = torch.bool
_NATS = torch.float32


def output_spec(groups: Sequence[str], keys: PolicyKeys, shape: Sequence[int], *, generate: bool) -> Composite:
    """The spec of a result; lengths that the data decides are -1.

    Args:
        groups: What is written.
        keys: Under which names.
        shape: The result's batch.
        generate: Whether responses are generated.

    Returns:
        A ``Composite`` of that shape. Entries that only some sampling settings bring are left out.
    """
    batch = tuple(shape)

    def ragged(dtype: torch.dtype) -> Unbounded:
        return Unbounded(shape=(*batch, -1), dtype=dtype)

    def fact(dtype: torch.dtype) -> Unbounded:
        return Unbounded(shape=batch, dtype=dtype)

    def group(**entries: object) -> Composite:
        return Composite(entries, shape=batch)

    def word(*, example: object) -> NonTensor:
        return NonTensor(shape=batch, example_data=example)

    spans = ("prompt", "response", "full") if generate else ("full",)
    scored = ("response", "full") if generate else ("full",)
    flags = ("all_attention_mask", "all_assistant_mask") if generate else ("all_attention_mask",)
    facts = {"prompt_length": fact(_TOKENS), "cached_tokens": fact(_TOKENS), "valid": fact(_FLAGS)}
    facts["logprobs_mode"] = word(example="processed_logprobs")
    if generate:
        facts |= {"finish_reason": fact(_TOKENS), "response_length": fact(_TOKENS), "truncated": fact(_FLAGS)}
        facts |= {"seconds": fact(_NATS), "stop_reason": word(example=None)}
    else:
        facts["known"] = ragged(_FLAGS)
    known = {
        "tokens": group(padded=word(example=False), **{span: ragged(_TOKENS) for span in spans}),
        "masks": group(padded=word(example=False), **{flag: ragged(_FLAGS) for flag in flags}),
        "log_probs": group(padded=word(example=False), **{span: ragged(_NATS) for span in scored}),
        "policy_version": ragged(_TOKENS),
        "completion": group(**facts),
        "text": group(**{span: word(example="") for span in spans}),
        "history": group(**{span: History.default_spec(shape=(*batch, -1)) for span in spans}),
    }
    result = Composite(shape=batch)
    for name in groups:
        result[keys.of(name)] = known[name]
    return result

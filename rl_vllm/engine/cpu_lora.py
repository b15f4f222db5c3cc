"""Make LoRA right on CPUs.

Two corrections of vLLM 0.32's CPU build:

1. A row without an adapter carries the index -1. vLLM's torch operators look weights up by it, so that it means the
   last slot: in a mixed batch such rows get that slot's adapter. Here only rows with one reach the operators.
2. The output head has one adapter index per row that is sampled from. Prompt logprobs need the head for every prompt
   token: another count of rows ends the engine, an equal count mixes up the requests' adapters. Here each request's
   prompt is scored with its own adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

Method = Callable[..., Any]


def install() -> None:
    """Correct vLLM's LoRA operators and CPU model runner in this process. Idempotent."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if "_rl_vllm_lora" in vars(CPUModelRunner):
        return
    CPUModelRunner._rl_vllm_lora = True
    for name in ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice"):
        corrected = only_adapted_rows(vars(lora_ops)[name])
        # The second module has its own names for the first one's functions.
        setattr(lora_ops, name, corrected)
        setattr(punica_cpu, name, corrected)
    CPUModelRunner._get_prompt_logprobs_dict = _one_request_at_a_time(CPUModelRunner._get_prompt_logprobs_dict)


def only_adapted_rows(operator: Method) -> Method:
    """``operator(inputs, weights, output, indices, ...)`` that leaves output rows with a negative index as they are."""

    @wraps(operator)
    def wrapped(
        inputs: torch.Tensor, weights: torch.Tensor, output: torch.Tensor, indices: torch.Tensor, *args: Any, **kw: Any
    ) -> None:
        adapted = indices >= 0
        if bool(adapted.all()):
            operator(inputs, weights, output, indices, *args, **kw)
        elif bool(adapted.any()):
            part = output[adapted]
            operator(inputs[adapted], weights, part, indices[adapted], *args, **kw)
            output[adapted] = part

    return wrapped


def _one_request_at_a_time(score_prompts: Method) -> Method:
    @wraps(score_prompts)
    def wrapped(runner: Any, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        heads = _adapted_heads(runner) if runner.lora_config else []
        if not heads or not runner.num_prompt_logprobs:
            return dict(score_prompts(runner, hidden_states, num_scheduled_tokens))
        every = runner.num_prompt_logprobs
        scored: dict[str, Any] = {}
        try:
            for request in [name for name in every if name in num_scheduled_tokens]:
                # The original works through this table and strikes out the requests whose prompt is complete.
                runner.num_prompt_logprobs = {request: every[request]}
                first_token = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[request]])
                with _HeadForRows(runner.model, heads[0].punica_wrapper, first_token):
                    scored |= score_prompts(runner, hidden_states, num_scheduled_tokens)
                if not runner.num_prompt_logprobs:
                    del every[request]
        finally:
            runner.num_prompt_logprobs = every
        return scored

    return wrapped


def _adapted_heads(runner: Any) -> list[Any]:
    from vllm.lora.layers import LogitsProcessorWithLoRA

    return [layer for layer in runner.model.modules() if isinstance(layer, LogitsProcessorWithLoRA)]


class _HeadForRows:
    """While entered, the model's head takes any number of rows, all with the adapter of one token of the step."""

    def __init__(self, model: Any, punica: Any, token: int) -> None:
        self._model = model
        self._punica = punica
        self._slot = int(punica.token_lora_indices[token])
        self._compute = model.compute_logits

    def __enter__(self) -> None:
        self._kept = self._punica._sampler_indices, self._punica.indices_len[1]
        self._model.compute_logits = self._compute_logits

    def __exit__(self, *_: object) -> None:
        del self._model.compute_logits
        self._punica._sampler_indices, self._punica.indices_len[1] = self._kept

    def _compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        rows = len(hidden_states)
        self._punica._sampler_indices = torch.full((rows,), self._slot, dtype=torch.long)
        self._punica.indices_len[1] = rows
        logits: torch.Tensor = self._compute(hidden_states)
        return logits

"""Which tensors a trainer must send, known before any weight is loaded.

The answer comes from the model's config, not from the checkpoint's index. A checkpoint may hold what nobody should send
(both copies of a tied head, rotary buffers of old exporters, draft layers) or lack files altogether; a trainer built
from the config holds exactly the tensors listed here, and vLLM builds its model from the same config.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from rl_vllm.errors import ConfigError
from rl_vllm.types import TensorSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def expected_weights(model: str, *, dtype: str, trust_remote_code: bool = False) -> tuple[TensorSpec, ...]:
    """The checkpoint names, full shapes and dtypes that a trainer must send to refit ``model``.

    Tied heads and buffers that no checkpoint has are left out; fused experts are listed one by one.

    Args:
        model: Path or hub id; only its config is read.
        dtype: The engine's own, resolved: ``str(model_config.dtype)`` without ``torch.``. ``auto`` is not one, because
            vLLM's rule for it is not the checkpoint's.
        trust_remote_code: Allow a model whose code comes with its checkpoint.

    Raises:
        ConfigError: transformers cannot build a causal language model from the config, or the dtype is not one.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    return expected_from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)


def expected_from_config(
    config: PretrainedConfig, *, dtype: str, trust_remote_code: bool = False
) -> tuple[TensorSpec, ...]:
    """Same as :func:`expected_weights`, from a config in memory, which is not changed."""
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    torch_dtype = vars(torch).get(dtype)
    if not isinstance(torch_dtype, torch.dtype):
        raise ConfigError(f"dtype must be a torch dtype such as bfloat16, got {dtype!r}")
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), dtype=torch_dtype, trust_remote_code=trust_remote_code
            )
    except ValueError as error:
        raise ConfigError(
            f"cannot list the weights of a {config.model_type} model, because transformers builds no causal language "
            f"model from its config: {error}"
        ) from error
    state = dict(model.state_dict())
    for target in model.all_tied_weights_keys:
        state.pop(target, None)
    in_float32 = model._keep_in_fp32_modules_strict if torch_dtype != torch.float32 else set()
    return tuple(
        TensorSpec(
            name,
            "float32" if any(part in in_float32 for part in name.split(".")) else _dtype_name(tensor),
            tuple(tensor.shape),
        )
        for name, tensor in revert_weight_conversion(model, state).items()
    )


def disagreement(offered: Sequence[TensorSpec], expected: Sequence[TensorSpec]) -> str | None:
    """Why these tensors are not the model's, naming each that differs or that only one side has; None when they are."""
    sent = {spec.name: spec for spec in offered}
    wanted = {spec.name: spec for spec in expected}
    wrong = [
        f"{name}: sent {sent.get(name)}, expected {wanted.get(name)}"
        for name in sorted(sent.keys() | wanted.keys())
        if sent.get(name) != wanted.get(name)
    ]
    return f"{len(wrong)} tensors are not the model's: {'; '.join(wrong)}" if wrong else None


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")

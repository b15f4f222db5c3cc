"""Our sampling settings as vLLM's, and back."""

from __future__ import annotations

from typing import Any

from vllm import SamplingParams
from vllm.exceptions import VLLMError
from vllm.sampling_params import RequestOutputKind

from rl_vllm.errors import ConfigError
from rl_vllm.types import SamplingConfig

__all__ = ["SamplingParams", "from_vllm", "to_vllm"]

_SHARED = (
    "n",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "ignore_eos",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "prompt_logprobs",
)
# Set by the engine for its own transport, whatever the caller had there.
_OURS = {"logprobs", "flat_logprobs", "detokenize", "output_kind", "stop", "stop_token_ids", "skip_clone"}


def to_vllm(sampling: SamplingConfig, *, pieces: bool = False) -> SamplingParams:
    """Settings of one request: flat logprobs, text made only where a stop string needs it.

    Args:
        sampling: Ours.
        pieces: Outputs are wanted as tokens come, each with all tokens so far; otherwise the final one only.

    Raises:
        ConfigError: ``sampling.extra`` names a field vLLM does not have, or vLLM refuses a value.
    """
    values: dict[str, Any] = {name: getattr(sampling, name) for name in _SHARED}
    for name, value in sampling.extra:
        if name in values or name in _OURS or name not in SamplingParams.__struct_fields__:
            raise ConfigError(f"SamplingConfig.extra cannot set {name!r}: it is not a further field of SamplingParams")
        values[name] = value
    try:
        return SamplingParams(
            **values,
            stop=list(sampling.stop),
            stop_token_ids=list(sampling.stop_token_ids),
            logprobs=sampling.logprobs,
            flat_logprobs=True,
            detokenize=bool(sampling.stop),
            output_kind=RequestOutputKind.CUMULATIVE if pieces else RequestOutputKind.FINAL_ONLY,
        )
    except (VLLMError, ValueError, TypeError) as error:
        raise ConfigError(f"vLLM refuses these sampling settings: {error}") from error


def from_vllm(params: SamplingParams) -> SamplingConfig:
    """Our settings from a caller's ``vllm.SamplingParams``; what we have no name for is kept in ``extra``."""
    values: dict[str, Any] = {name: getattr(params, name) for name in _SHARED}
    values["stop"] = (params.stop,) if isinstance(params.stop, str) else tuple(params.stop or ())
    values["stop_token_ids"] = tuple(params.stop_token_ids or ())
    values["logprobs"] = 0 if params.logprobs is None else params.logprobs
    default = SamplingParams()
    extra = [
        (name, getattr(params, name))
        for name in SamplingParams.__struct_fields__
        if name not in _SHARED
        and name not in _OURS
        and not name.startswith("_")
        and name != "output_text_buffer_length"
        and getattr(params, name) != getattr(default, name)
    ]
    return SamplingConfig(**values, extra=tuple(extra))

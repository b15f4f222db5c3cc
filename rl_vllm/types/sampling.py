"""How to sample: one frozen value, checked when built."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rl_vllm.errors import ConfigError

# vLLM refuses more.
MAX_TEMPERATURE = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """Sampling settings of one request, with vLLM's names, defaults and meanings.

    Attributes:
        n: Samples per prompt; they share the prompt's prefill.
        max_tokens: Longest response, in tokens. Clamped to what the context leaves; None means up to the context's end.
        temperature: In [0, 2]; 0 is greedy.
        top_p: In (0, 1].
        top_k: -1 or 0 switches it off, otherwise at least 1.
        min_p: In [0, 1].
        seed: Base seed, or None for the engine's own stream. Every prompt and sample derives a distinct one from it.
        stop: Strings that end a response.
        stop_token_ids: Token ids that end a response, besides the model's EOS.
        ignore_eos: Go on after EOS.
        min_tokens: No EOS or stop token before this many.
        presence_penalty: In [-2, 2].
        frequency_penalty: In [-2, 2].
        repetition_penalty: Above 0; 1 switches it off.
        include_stop_str_in_output: Keep the stop string in the text.
        skip_special_tokens: Leave special tokens out of the text.
        logprobs: Also return the logprobs of this many most likely tokens; the sampled token's is always returned.
        prompt_logprobs: Return this many logprobs per prompt token, or None.
        extra: Further fields of ``vllm.SamplingParams`` as (name, value) pairs, handed over unchanged.

    Raises:
        ConfigError: A value is outside its range or two values contradict each other.
    """

    n: int = 1
    max_tokens: int | None = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int = 0
    prompt_logprobs: int | None = None
    extra: tuple[tuple[str, object], ...] = ()

    def __post_init__(self) -> None:
        _check_integer("n", self.n, low=1)
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, low=1)
        _check_integer("min_tokens", self.min_tokens, low=0)
        _check_integer("top_k", self.top_k, low=-1)
        _check_integer("logprobs", self.logprobs, low=0)
        if self.prompt_logprobs is not None:
            _check_integer("prompt_logprobs", self.prompt_logprobs, low=0)
        _check_real("temperature", self.temperature, low=0.0, high=MAX_TEMPERATURE)
        _check_real("top_p", self.top_p, low=0.0, high=1.0)
        _check_real("min_p", self.min_p, low=0.0, high=1.0)
        _check_real("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _check_real("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        _check_real("repetition_penalty", self.repetition_penalty, low=0.0)
        if self.top_p == 0.0:
            raise ConfigError("top_p must be above 0, got 0.0: use temperature=0 for greedy decoding")
        if self.repetition_penalty == 0.0:
            raise ConfigError("repetition_penalty must be above 0, got 0.0: 1.0 switches it off")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}")
        if self.temperature == 0.0 and self.n > 1:
            raise ConfigError(
                f"temperature=0 is greedy: n={self.n} samples would be equal; use n=1 or a temperature above 0"
            )
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise ConfigError(f"seed must be an integer or None, got {self.seed!r} ({type(self.seed).__name__})")
        _check_tuple("stop", self.stop, str)
        _check_tuple("stop_token_ids", self.stop_token_ids, int)
        if any(not text for text in self.stop):
            raise ConfigError("stop holds an empty string, which would end every response at once: remove it")

    @property
    def truncates(self) -> bool:
        """Whether top-p, top-k or min-p cuts tokens off, which biases importance ratios."""
        return self.temperature > 0.0 and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def with_seed(self, seed: int | None) -> SamplingConfig:
        return replace(self, seed=seed)


def _check_tuple(name: str, value: object, kind: type) -> None:
    # A plain string is a sequence too: its letters would each end a response.
    if not isinstance(value, tuple) or any(isinstance(item, bool) or not isinstance(item, kind) for item in value):
        raise ConfigError(f"{name} must be a tuple of {kind.__name__}, got {value!r}: write ({value!r},) for one")


def _check_integer(name: str, value: object, *, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an integer, got {value!r} ({type(value).__name__})")
    if value < low:
        raise ConfigError(f"{name} must be at least {low}, got {value}")


def _check_real(name: str, value: object, *, low: float, high: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    if not math.isfinite(value) or not low <= value <= high:
        limits = f"at least {low:g}" if high == math.inf else f"in [{low:g}, {high:g}]"
        raise ConfigError(f"{name} must be finite and {limits}, got {value}")

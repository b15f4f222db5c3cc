"""Sampling settings from a caller's mapping, under vLLM's or Hugging Face's names, and the seed of each call."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import fields, replace

from rl_vllm.config import name_hint, require_at_least
from rl_vllm.errors import ConfigError
from rl_vllm.types import SamplingConfig

SamplingLike = SamplingConfig | Mapping[str, object]

# The same setting under the name of Hugging Face or TorchRL.
_ALIASES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "num_samples": "n",
    "stop_strings": "stop",
    "stop_sequences": "stop",
}
_FIELDS = frozenset(entry.name for entry in fields(SamplingConfig)) - {"extra"}
# Fields of vllm.SamplingParams that change which tokens are drawn, and nothing about the shape of the results.
_ENGINE_FIELDS = frozenset(
    {
        "allowed_token_ids", "bad_words", "extra_args", "logit_bias", "repetition_detection",
        "skip_reading_prefix_cache", "structured_outputs", "thinking_token_budget", "watermarking",
    }
)  # fmt: skip
# Fields that exist elsewhere and would change nothing or break the results here, with what to do instead.
_REFUSED = {
    "num_beams": "beam search has no sampling distribution to train on: use n samples",
    "length_penalty": "it belongs to beam search: remove it",
    "early_stopping": "it belongs to beam search: remove it",
    "output_kind": "the service returns whole completions: remove it",
    "flat_logprobs": "the results are columns already: remove it",
    "detokenize": "text is decoded by the policy when it has a tokenizer: remove it",
}
_FLOATS = frozenset({"temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"})
_NONE_HAS_A_MEANING = frozenset({"max_tokens", "seed", "prompt_logprobs"})

_MASK_64 = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def sampling_from(values: SamplingLike | None) -> SamplingConfig:
    """The checked settings a caller described.

    Args:
        values: Settings under vLLM's names (those of :class:`SamplingConfig` and of ``vllm.SamplingParams``) or Hugging
            Face's (``max_new_tokens``, ``min_new_tokens``, ``do_sample``, ``num_return_sequences``, ``stop_strings``).
            It is not changed. A None leaves its name unset, except for ``max_tokens``, ``seed`` and
            ``prompt_logprobs``, where :class:`SamplingConfig` gives it a meaning. ``skip_special_tokens`` is False
            unless set: text then says exactly what the tokens say.

    Raises:
        ConfigError: A name is unknown, one setting is given twice, or a value is out of range.
    """
    if isinstance(values, SamplingConfig):
        return values
    return merge_sampling(SamplingConfig(skip_special_tokens=False), values or {})


def merge_sampling(base: SamplingConfig, overrides: Mapping[str, object]) -> SamplingConfig:
    """``base`` with the named settings replaced; the rest stays as configured.

    Raises:
        ConfigError: As :func:`sampling_from`.
    """
    if not isinstance(overrides, Mapping):
        raise ConfigError(
            f"sampling must be a SamplingConfig or a mapping of names to values, got {type(overrides).__name__}"
        )
    named = _canonical(overrides)
    settings = {name: _parse(name, value) for name, value in named.items() if name in _FIELDS}
    extra = dict(base.extra) | {name: value for name, value in named.items() if name in _ENGINE_FIELDS}
    try:
        return replace(base, **settings, extra=tuple(extra.items()))  # type: ignore[arg-type]
    except TypeError as error:
        raise ConfigError(f"sampling settings {settings}: {error}") from error


def names_samples(overrides: Mapping[str, object]) -> bool:
    """Whether a mapping sets the number of samples under any of its names."""
    return any(_ALIASES.get(name, name) == "n" for name in overrides)


def number_of_samples(num_samples: int | None, sampling: SamplingLike | None) -> int | None:
    """Samples per prompt as an axis, or None for no axis."""
    if num_samples is not None:
        require_at_least("num_samples", num_samples, 1)
    configured = sampling_from(sampling)
    stated = configured.n != 1 or (not isinstance(sampling, SamplingConfig) and names_samples(sampling or {}))
    if num_samples is not None and stated and configured.n != num_samples:
        raise ConfigError(f"num_samples={num_samples} contradicts n={configured.n} in sampling: keep one")
    if num_samples is None and configured.n > 1:
        return configured.n
    return num_samples


class CallSeeds:
    """A distinct seed for each call, all determined by one base seed; safe to share between threads.

    The first call gets the base seed itself, call ``k`` the ``k``-th output of splitmix64 seeded with it (Steele, Lea,
    Flood: Fast Splittable Pseudorandom Number Generators, 2014), cut to 62 bits. Two calls never share a seed that the
    service would derive neighbouring ones from. Threads that call at once take their numbers in the order they arrive.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._copies = 0
        # What makes the seeds of a copy others than those of the original, which has none.
        self._key: int | None = None
        self._lock = threading.Lock()

    def derived(self) -> CallSeeds:
        """Seeds for a copy: none of the original's, nor of another copy's, all determined by the order of copying."""
        with self._lock:
            self._copies += 1
            copy = self._copies
        seeds = CallSeeds()
        seeds._key = _splitmix64(((self._key or 0) + copy * _GOLDEN_GAMMA) & _MASK_64)
        return seeds

    def next(self, base: int | None) -> int | None:
        """The seed of the next call; None stays None: the engine's own stream never repeats."""
        with self._lock:
            call = self._calls
            self._calls += 1
        if base is None:
            return None
        if self._key is not None:
            start = _splitmix64((base & _MASK_64) ^ self._key)
            # Above 62 bits, where the original has none.
            return (_splitmix64((start + call * _GOLDEN_GAMMA) & _MASK_64) >> 2) | 1 << 62
        if call == 0:
            return base
        return _splitmix64((base + call * _GOLDEN_GAMMA) & _MASK_64) >> 2

    def __getstate__(self) -> dict[str, int | None]:
        with self._lock:
            return {"_calls": self._calls, "_copies": self._copies, "_key": self._key}

    def __setstate__(self, state: dict[str, int | None]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()


def _splitmix64(state: int) -> int:
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return state ^ (state >> 31)


def _canonical(values: Mapping[str, object]) -> dict[str, object]:
    """The same settings under the names of :class:`SamplingConfig`."""
    named: dict[str, object] = {}
    given_as: dict[str, str] = {}
    for given, value in values.items():
        name = _ALIASES.get(given, given)
        if given in _REFUSED and value not in (None, 1, False):
            raise ConfigError(f"sampling setting {given}={value!r} is not supported: {_REFUSED[given]}")
        if given not in _REFUSED and given != "do_sample":
            _require_known(given, name)
        if name in given_as:
            raise ConfigError(f"sampling sets {given_as[name]} and {given}, which mean the same: keep one")
        given_as[name] = given
        if value is not None or name in _NONE_HAS_A_MEANING:
            named[name] = value
    _apply_do_sample(named)
    return named


def _apply_do_sample(named: dict[str, object]) -> None:
    do_sample = named.pop("do_sample", None)
    if do_sample is None:
        return
    if not isinstance(do_sample, bool):
        raise ConfigError(f"do_sample must be True or False, got {do_sample!r}")
    temperature = named.get("temperature")
    if do_sample and temperature == 0:
        raise ConfigError("do_sample=True contradicts temperature=0, which is greedy: remove one")
    if not do_sample:
        if temperature is not None and temperature != 0:
            raise ConfigError(f"do_sample=False is greedy and contradicts temperature={temperature!r}: remove one")
        named["temperature"] = 0.0


def _require_known(given: str, name: str) -> None:
    if name in _FIELDS or name in _ENGINE_FIELDS:
        return
    known = sorted(_FIELDS | _ENGINE_FIELDS | set(_ALIASES) | {"do_sample"})
    raise ConfigError(f"unknown sampling setting {given!r}: {name_hint(str(given), known, 'known names:')}")


def _parse(name: str, value: object) -> object:
    """Turn what mappings usually hold into what the field takes; the field's own check judges the value."""
    if name in ("stop", "stop_token_ids") and not isinstance(value, tuple):
        return (value,) if isinstance(value, str | int) else _sequence(name, value)
    if name == "logprobs" and isinstance(value, bool):
        if not value:
            raise ConfigError("logprobs=False: the sampled tokens' logprobs are always returned; remove the setting")
        return 0
    if name == "prompt_logprobs" and isinstance(value, bool):
        return 1 if value else None
    if name in _FLOATS and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def _sequence(name: str, value: object) -> tuple[object, ...]:
    if not isinstance(value, list | set | frozenset):
        raise ConfigError(f"{name} must be one value or a list of values, got {value!r}")
    return tuple(value)

"""Settings as frozen values, checked when built; the only module that reads environment variables."""

from __future__ import annotations

import difflib
import enum
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rl_vllm.errors import ConfigError
from rl_vllm.types import InFlight, KVCache, Overload, Verify

LOGPROBS_MODES = ("processed_logprobs", "raw_logprobs", "processed_logits", "raw_logits")
ROUTING_STRATEGIES = ("prefix-aware", "requests", "kv-cache", "round-robin")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def start_timeout_s() -> float:
    """Seconds a replica may take to start: ``RL_VLLM_TIMEOUT_SECONDS``, or 600.

    Raises:
        ConfigError: The variable is not a number above 0.
    """
    text = os.environ.get("RL_VLLM_TIMEOUT_SECONDS", "600")
    try:
        seconds = float(text)
    except ValueError:
        raise ConfigError(f"RL_VLLM_TIMEOUT_SECONDS must be a number of seconds, got {text!r}") from None
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"RL_VLLM_TIMEOUT_SECONDS must be finite and above 0, got {text!r}")
    return seconds


def ray_address() -> str | None:
    """The Ray cluster named by ``RAY_ADDRESS``, or None."""
    return os.environ.get("RAY_ADDRESS") or None


def cache_dir() -> Path:
    """Folder for prepared models: ``RL_VLLM_CACHE``, or ``~/.cache/rl_vllm``."""
    return Path(os.environ.get("RL_VLLM_CACHE", "~/.cache/rl_vllm")).expanduser()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine; every replica of a service has the same.

    Attributes:
        model: Path or hub id.
        tokenizer: Path or hub id; None means the model's own.
        skip_tokenizer: Run on token ids alone, for models without a tokenizer.
        dtype: One of ``DTYPES``.
        max_model_len: Longest prompt plus response, in tokens; None means the model's own limit.
        tensor_parallel_size: Workers that share each layer.
        pipeline_parallel_size: Stages.
        data_parallel_size: Engine copies inside one replica.
        enable_prefix_caching: Share KV of equal prefixes.
        enforce_eager: Run without compilation. None means yes on CPUs, where compiling needs a C++ compiler and takes
            longer than it saves, and no on GPUs.
        enable_fp32_output: Compute the output head in float32.
        seed: Base seed; replica ``i`` runs with ``seed + i``.
        logprobs_mode: One of ``LOGPROBS_MODES``; only ``processed_logprobs`` matches what was sampled from.
        gpu_memory_utilization: Fraction of a GPU's memory; None means vLLM's default.
        cpu_kv_cache_gib: KV cache per CPU replica, in GiB.
        cpu_cores: Cores per CPU worker.
        prometheus: Keep vLLM's own Prometheus metrics; they cost some of the front end's time for every token.
        engine_kwargs: Further fields of vLLM's ``AsyncEngineArgs``, checked when the engine is built.
    """

    model: str
    tokenizer: str | None = None
    skip_tokenizer: bool = False
    dtype: str = "auto"
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_prefix_caching: bool = True
    enforce_eager: bool | None = None
    enable_fp32_output: bool = False
    seed: int = 0
    logprobs_mode: str = "processed_logprobs"
    gpu_memory_utilization: float | None = None
    cpu_kv_cache_gib: float = 1.0
    cpu_cores: int = 1
    prometheus: bool = False
    engine_kwargs: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str | os.PathLike) or not str(self.model):
            raise ConfigError(f"model must be a path or a hub id, got {self.model!r}")
        # A Path is welcome too; what reads it later expects text, with ~ resolved.
        object.__setattr__(self, "model", _as_text(self.model))
        if self.tokenizer is not None:
            object.__setattr__(self, "tokenizer", _as_text(self.tokenizer))
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "cpu_cores"):
            require_at_least(name, getattr(self, name), 1)
        if self.max_model_len is not None:
            require_at_least("max_model_len", self.max_model_len, 2)
        require_choice("dtype", self.dtype, DTYPES)
        require_choice("logprobs_mode", self.logprobs_mode, LOGPROBS_MODES)
        require_above_zero("cpu_kv_cache_gib", self.cpu_kv_cache_gib)
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")

    @property
    def num_workers(self) -> int:
        """Worker processes of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingConfig:
    """Which replica answers which prompt.

    Attributes:
        strategy: Names from ``ROUTING_STRATEGIES``, tried in order: one that has no opinion leaves it to the next.
        prefix_length: Longest prefix that is looked at, in tokens (characters for text), in whole blocks of KV.
        overload_threshold: A replica is overloaded when it has more than this many times the mean of the outstanding
            tokens; prefix and session affinity then give way. Above 1.
        max_prefixes: Prefixes that are remembered, some ten for each prompt; the least recently used are dropped.
        max_sessions: Sessions that are remembered, likewise.
    """

    strategy: tuple[str, ...] = ("prefix-aware", "requests")
    prefix_length: int = 1024
    overload_threshold: float = 1.5
    max_prefixes: int = 262_144
    max_sessions: int = 65_536

    def __post_init__(self) -> None:
        if not isinstance(self.strategy, tuple) or not self.strategy:
            raise ConfigError(f"strategy must be a tuple of one or more names, got {self.strategy!r}")
        for name in self.strategy:
            require_choice("strategy", name, ROUTING_STRATEGIES)
        require_at_least("prefix_length", self.prefix_length, 1)
        require_above_zero("overload_threshold", self.overload_threshold)
        if self.overload_threshold <= 1:
            raise ConfigError(f"overload_threshold must be above 1, got {self.overload_threshold}")
        require_at_least("max_prefixes", self.max_prefixes, 4)
        require_at_least("max_sessions", self.max_sessions, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthConfig:
    """When a replica counts as dead, and what follows.

    Attributes:
        heartbeat_period_s: Seconds between two health checks of a replica.
        heartbeat_timeout_s: A replica that does not answer a check within this time has failed it. It must be longer
            than the engine's longest step.
        max_failures: Failed checks in a row that make a replica dead; fewer make it suspect, and it goes on serving.
        max_restarts: Restarts of one replica in its life; beyond them it is retired.
        restart_pause_s: Wait before the second restart; doubled for each further one.
        min_serving: Below this many serving or restarting replicas every call raises.
    """

    heartbeat_period_s: float = 2.0
    heartbeat_timeout_s: float = 60.0
    max_failures: int = 3
    max_restarts: int = 5
    restart_pause_s: float = 1.0
    min_serving: int = 1

    def __post_init__(self) -> None:
        for name in ("heartbeat_period_s", "heartbeat_timeout_s", "restart_pause_s"):
            require_above_zero(name, getattr(self, name))
        require_at_least("max_failures", self.max_failures, 1)
        require_at_least("max_restarts", self.max_restarts, 0)
        require_at_least("min_serving", self.min_serving, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """All replicas.

    Attributes:
        engine: What every replica runs.
        num_replicas: How many.
        routing: Which replica answers which prompt.
        health: When a replica counts as dead, and what follows.
        max_outstanding_requests: Prompts that all callers together may have outstanding; None means no bound.
        on_overload: What happens to prompts beyond it: their callers wait, or get ``ServiceOverloadedError``.
        metrics_period_s: Seconds between two samples of every engine's metrics; None means none are taken.
        launch_timeout_s: Limit for all replicas to be ready; None means :func:`start_timeout_s`.
        request_timeout_s: Limit for one ``generate`` call, in seconds, unless the call sets its own.
        rpc_timeout_s: Limit for every other call to a replica, in seconds.
        shutdown_timeout_s: Limit for a replica to stop before it is killed, in seconds.
        name: What other processes know the service by, unique among those of this process; None means a random one.
    """

    engine: EngineConfig
    num_replicas: int = 1
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    max_outstanding_requests: int | None = 65_536
    on_overload: Overload = Overload.WAIT
    metrics_period_s: float | None = 0.5
    launch_timeout_s: float | None = None
    request_timeout_s: float = 3600.0
    rpc_timeout_s: float = 60.0
    shutdown_timeout_s: float = 20.0
    name: str | None = None

    def __post_init__(self) -> None:
        if self.name is not None and (not isinstance(self.name, str) or not self.name):
            raise ConfigError(f"name must be a text of at least one character, or None, got {self.name!r}")
        require_at_least("num_replicas", self.num_replicas, 1)
        require_member("on_overload", self.on_overload, Overload)
        if self.max_outstanding_requests is not None:
            require_at_least("max_outstanding_requests", self.max_outstanding_requests, 1)
        for name in ("request_timeout_s", "rpc_timeout_s", "shutdown_timeout_s"):
            require_above_zero(name, getattr(self, name))
        for name in ("launch_timeout_s", "metrics_period_s"):
            if getattr(self, name) is not None:
                require_above_zero(name, getattr(self, name))
        if self.health.min_serving > self.num_replicas:
            raise ConfigError(f"min_serving={self.health.min_serving} is above num_replicas={self.num_replicas}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RefitConfig:
    """How new weights are installed.

    Attributes:
        in_flight: What happens to running requests.
        kv: What happens to KV of the old weights.
        stage_timeout_s: Limit for the bytes to be ready everywhere, in seconds.
        commit_timeout_s: Limit for every replica to serve the new version, in seconds.
        keep_versions: Staged versions kept for late replicas.
        double_buffer: Whether workers load new weights into a second set of parameters while staging, so that a commit
            only swaps the sets: a shorter stall for twice the memory. None means yes on CPUs that have twice what all
            replicas there need at once, no elsewhere. Without effect for quantised models, for attention with weights
            of its own (MLA) and for transports whose bytes come while committing: these are loaded into the parameters
            in use.
        verify: How a refit is proven.
        probe_prompts: Token ids that trainer and replicas score with ``Verify.LOGPROBS``, each row at least two; None
            means 4 rows of 24 random ids, the same at every refit.
        max_logprob_difference: Largest difference of one token's logprob that passes, in nats; None means 1e-3 for an
            engine whose weights are float32, else 0.05.
    """

    in_flight: InFlight = InFlight.KEEP
    kv: KVCache = KVCache.RECOMPUTE
    stage_timeout_s: float = 600.0
    commit_timeout_s: float = 600.0
    keep_versions: int = 2
    double_buffer: bool | None = None
    verify: Verify = Verify.CHECKSUM
    probe_prompts: tuple[tuple[int, ...], ...] | None = None
    max_logprob_difference: float | None = None

    def __post_init__(self) -> None:
        require_member("in_flight", self.in_flight, InFlight)
        if self.kv is KVCache.SEPARATE:
            raise ConfigError("kv=KVCache.SEPARATE is what receipts of adapter refits say: choose RECOMPUTE or REUSE")
        if self.kv not in (KVCache.RECOMPUTE, KVCache.REUSE):
            raise ConfigError(f"kv must be one of KVCache.RECOMPUTE, KVCache.REUSE, got {self.kv!r}")
        require_above_zero("stage_timeout_s", self.stage_timeout_s)
        require_above_zero("commit_timeout_s", self.commit_timeout_s)
        require_at_least("keep_versions", self.keep_versions, 1)
        if self.double_buffer is not None and not isinstance(self.double_buffer, bool):
            raise ConfigError(f"double_buffer must be True, False or None, got {self.double_buffer!r}")
        require_member("verify", self.verify, Verify)
        if self.probe_prompts is not None:
            _require_probe_prompts(self.probe_prompts)
        if self.max_logprob_difference is not None:
            require_above_zero("max_logprob_difference", self.max_logprob_difference)


def _as_text(name: str | os.PathLike[str]) -> str:
    text = str(name)
    return str(Path(text).expanduser()) if text.startswith("~") else text


def _require_probe_prompts(prompts: object) -> None:
    if not isinstance(prompts, tuple) or not prompts:
        raise ConfigError(f"probe_prompts must be a tuple of at least one tuple of token ids, got {prompts!r}")
    for position, row in enumerate(prompts):
        if not isinstance(row, tuple) or len(row) < 2:
            raise ConfigError(f"probe_prompts[{position}] must be a tuple of at least two token ids, got {row!r}")
        for token in row:
            require_at_least(f"probe_prompts[{position}]: a token id", token, 0)


def require_at_least(name: str, value: object, low: int) -> None:
    """Raise :class:`ConfigError` unless ``value`` is an integer of at least ``low``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name} must be an integer of at least {low}, got {value!r}")


def require_above_zero(name: str, value: object) -> None:
    """Raise :class:`ConfigError` unless ``value`` is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigError(f"{name} must be a finite number above 0, got {value!r}")


def require_member(name: str, value: object, kind: type[enum.Enum]) -> None:
    """Raise :class:`ConfigError` unless ``value`` is a member of an enumeration; its text is not."""
    if not isinstance(value, kind):
        members = ", ".join(f"{kind.__name__}.{member.name}" for member in kind)
        raise ConfigError(f"{name} must be one of {members}, got {value!r}")


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise :class:`ConfigError` unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def name_hint(name: str, known: Iterable[str], otherwise: str) -> str:
    """What to write in place of an unknown name: the nearest known one, or after ``otherwise`` all of them."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"{otherwise} {', '.join(names)}"

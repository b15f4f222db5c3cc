"""The proof by logprobs: every replica scores a probe batch, and so does the trainer's model.

A digest proves that the bytes arrived. It cannot see what an engine makes of them (a head that stays tied to the old
embedding, experts that are not repacked); the logprobs of a few fixed sequences can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from rl_vllm.config import RefitConfig
from rl_vllm.errors import BadInputError, RefitError, RLVLLMError
from rl_vllm.protocols import GenerationService, WeightSource
from rl_vllm.types import ModelInfo, PromptBatch, SamplingConfig, TensorSpec, Verify
from rl_vllm.weights.lockstep import LeadingSource
from rl_vllm.weights.source import ModuleSource

# Token ids of each sequence -> nats of tokens 1.. of each, float32 [length - 1].
Scorer: TypeAlias = Callable[[Sequence[Sequence[int]]], list[NDArray[np.float32]]]

PROBE_ROWS = 4
PROBE_TOKENS = 24
PROBE_SEED = 20240
# Rounding of two implementations of one model: a wrong tensor shows as tenths of a nat or more.
LIMIT_FLOAT32 = 1e-3
LIMIT_HALF = 0.05


@dataclass(frozen=True, slots=True)
class LogprobDifference:
    """How far replicas are from the trainer, over all of them and all scored tokens; nats."""

    largest: float
    mean: float


@dataclass(frozen=True, slots=True)
class LogprobProbe:
    """A batch to score, who scores it on the trainer's side, and how far a replica may be from that.

    Attributes:
        rows: Token ids, each row with at least two.
        scorer: The trainer's.
        limit: Largest difference of one token's logprob that passes, in nats.
        timeout_s: For each replica's scoring.
    """

    rows: tuple[tuple[int, ...], ...]
    scorer: Scorer
    limit: float
    timeout_s: float

    def compare(self, service: GenerationService, version: int, *, adapter: str | None = None) -> LogprobDifference:
        """Score everywhere, by this adapter; every replica that is up takes part.

        Raises:
            RefitError: Phase "verify". A replica could not score, or is beyond the limit: every such one is named. The
                weights are committed and do serve; what differs is the model that was made of them.
        """
        want = np.concatenate(self._trainers(version))
        by_replica = {
            receiver.replica: _distances(want, self._replicas_own(service, receiver.replica, version, adapter))
            for receiver in service.weight_receivers()
        }
        if not by_replica:
            raise RefitError(version, "verify", (), "no replica is up to score the probe batch")
        beyond = tuple(replica for replica, values in by_replica.items() if values.max() > self.limit)
        everything = np.concatenate(list(by_replica.values()))
        found = LogprobDifference(float(everything.max()), float(everything.mean()))
        if beyond:
            figures = ", ".join(f"{index}: {by_replica[index].max():.3g}" for index in beyond)
            reason = (
                f"their logprobs differ from the trainer's by up to {found.largest:.3g} nats (by replica {figures}; "
                f"mean {found.mean:.3g} over {len(want)} tokens; at most {self.limit:.3g}): compare the trainer's "
                "model and dtype with the engine's, or raise max_logprob_difference"
            )
            raise RefitError(version, "verify", beyond, reason)
        return found

    def _trainers(self, version: int) -> list[NDArray[np.float32]]:
        scores = self.scorer(self.rows)
        got, due = [len(row) for row in scores], [len(row) - 1 for row in self.rows]
        if got != due:
            reason = f"the scorer returned rows of {got} logprobs and {due} are due: one for each token but the first"
            raise RefitError(version, "verify", (), reason)
        return scores

    def _replicas_own(
        self, service: GenerationService, replica: int, version: int, adapter: str | None
    ) -> NDArray[np.float32]:
        # vLLM processes no logprob of a prompt: raw and processed are the same; temperature 1 would keep them so.
        sampling = SamplingConfig(max_tokens=1, temperature=1.0, prompt_logprobs=0)
        prompts = PromptBatch.from_rows(self.rows)
        if adapter is not None:
            prompts = replace(prompts, loras=(adapter,) * len(prompts))
        try:
            answer = service.generate_batch(prompts, sampling, timeout_s=self.timeout_s, actor_index=replica)
        except RLVLLMError as error:
            raise RefitError(version, "verify", (replica,), f"it could not score the probe batch: {error}") from error
        scores = answer.prompt_logprobs
        if scores is None or [len(row) for row in scores] != [len(row) for row in self.rows]:
            raise RefitError(version, "verify", (replica,), "it returned no logprob for each token of the probe batch")
        return np.concatenate([row[1:] for row in scores])


def prepare_probe(
    service: GenerationService,
    source: WeightSource,
    expected: Sequence[TensorSpec],
    config: RefitConfig,
    scorer: Scorer | None,
) -> LogprobProbe | None:
    """All that can be refused before a byte moves; None unless the refit is to be proven by logprobs.

    Raises:
        BadInputError: Nothing can score on the trainer's side, a probe prompt is not one for this model, or the
            engine's logprobs are no logprobs.
    """
    if config.verify is not Verify.LOGPROBS:
        return None
    info = service.model_info()
    if not info.logprobs_mode.endswith("_logprobs"):
        raise BadInputError(
            f"verify=Verify.LOGPROBS needs logprobs and the engine returns {info.logprobs_mode}: launch it with "
            'logprobs_mode="processed_logprobs", or use Verify.CHECKSUM'
        )
    limit = config.max_logprob_difference
    return LogprobProbe(
        rows=_rows(info, config.probe_prompts),
        scorer=scorer if scorer is not None else _scorer_of(source),
        limit=default_limit(expected) if limit is None else limit,
        timeout_s=config.commit_timeout_s,
    )


def default_limit(expected: Sequence[TensorSpec]) -> float:
    """Nats that pass: 1e-3 when every weight of the engine is float32 or wider, else 0.05."""
    wide = {"float32", "float64"}
    floats = [spec.dtype for spec in expected if "float" in spec.dtype]
    return LIMIT_FLOAT32 if floats and wide.issuperset(floats) else LIMIT_HALF


def _scorer_of(source: WeightSource) -> Scorer:
    if isinstance(source, ModuleSource | LeadingSource) and source.can_score:
        return source.score
    raise BadInputError(
        "verify=Verify.LOGPROBS compares with the trainer's model, and this weight source has none that gives logits: "
        "pass the Hugging Face model itself, or refit(..., scorer=...), or use Verify.CHECKSUM"
    )


def _rows(info: ModelInfo, prompts: tuple[tuple[int, ...], ...] | None) -> tuple[tuple[int, ...], ...]:
    longest = info.max_model_len - 1  # scoring makes one token
    if prompts is None:
        if longest < 2:
            raise BadInputError(f"a context of {info.max_model_len} tokens has no room for a probe: use CHECKSUM")
        random = np.random.default_rng(PROBE_SEED)
        ids = random.integers(0, info.vocab_size, (PROBE_ROWS, min(PROBE_TOKENS, longest)))
        return tuple(tuple(row) for row in ids.tolist())
    for position, row in enumerate(prompts):
        if len(row) > longest:
            raise BadInputError(f"probe_prompts[{position}] has {len(row)} tokens, the engine takes {longest}: cut it")
        outside = [token for token in row if token >= info.vocab_size]
        if outside:
            raise BadInputError(
                f"probe_prompts[{position}] has token {outside[0]}, the vocabulary ends at {info.vocab_size}: leave it"
                " out"
            )
    return prompts


def _distances(want: NDArray[np.float32], got: NDArray[np.float32]) -> NDArray[np.float64]:
    """Absolute differences; what is not finite on either side is infinitely far."""
    known = np.isfinite(want) & np.isfinite(got)
    distances = np.full(len(want), np.inf)
    distances[known] = np.abs(want[known].astype(np.float64) - got[known].astype(np.float64))
    return distances

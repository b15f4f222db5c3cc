"""Columns of pooled embeddings.

Axes: N finished prompts, D entries of a vector.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl_vllm.errors import ConfigError
from rl_vllm.types.batch import PromptBatch, RequestFailure

POOLING_TASKS = ("embed", "classify")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingConfig:
    """How hidden states become one vector per prompt; vLLM's names and meanings.

    Attributes:
        task: ``embed`` (pooled hidden state) or ``classify`` (one score per class).
        use_activation: Normalise an embedding, or apply the classifier's activation; None means the model's own choice.
        dimensions: Keep the first of them, for models trained for it; None means all.

    Raises:
        ConfigError: A value is outside its range.
    """

    task: str = "embed"
    use_activation: bool | None = None
    dimensions: int | None = None

    def __post_init__(self) -> None:
        if self.task not in POOLING_TASKS:
            raise ConfigError(f"task must be one of {', '.join(POOLING_TASKS)}, got {self.task!r}")
        if self.dimensions is not None and (isinstance(self.dimensions, bool) or self.dimensions < 1):
            raise ConfigError(f"dimensions must be at least 1 or None, got {self.dimensions!r}")


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """What one engine is asked to embed.

    Attributes:
        numbers_B: int64 [B], unique in the life of the service, as for generation.
        prompts: The prompts, in the same order.
        pooling: Used by every row.
    """

    numbers_B: NDArray[np.int64]
    prompts: PromptBatch
    pooling: PoolingConfig


@dataclass(frozen=True, slots=True)
class EmbeddingBatch:
    """Finished embeddings as columns.

    Attributes:
        numbers_N: int64 [N], the request each vector answers (the prompt's row in the service's results).
        values_ND: float32 [N, D].
        failures: Prompts without a vector.
    """

    numbers_N: NDArray[np.int64]
    values_ND: NDArray[np.float32]
    failures: tuple[RequestFailure, ...] = ()

    def __len__(self) -> int:
        return len(self.numbers_N)

    @classmethod
    def concatenate(cls, chunks: Iterable[EmbeddingBatch]) -> EmbeddingBatch:
        """Join chunks in the order given."""
        parts = list(chunks)
        filled = [part.values_ND for part in parts if len(part)]
        return cls(
            numbers_N=np.concatenate([np.zeros(0, np.int64), *(part.numbers_N for part in parts)]),
            values_ND=np.concatenate(filled) if filled else np.zeros((0, 0), np.float32),
            failures=tuple(failure for part in parts for failure in part.failures),
        )

    def sorted_rows(self) -> EmbeddingBatch:
        """The same vectors ordered by request."""
        order = np.argsort(self.numbers_N, kind="stable")
        return EmbeddingBatch(self.numbers_N[order], self.values_ND[order], self.failures)

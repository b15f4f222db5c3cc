"""Pooling settings as vLLM's, and its pooled outputs as columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from vllm.outputs import PoolingRequestOutput
from vllm.pooling_params import PoolingParams

from rl_vllm.types import EmbeddingBatch, PoolingConfig, RequestFailure


def to_pooling_params(pooling: PoolingConfig) -> PoolingParams:
    """Settings of one request."""
    return PoolingParams(task=pooling.task, use_activation=pooling.use_activation, dimensions=pooling.dimensions)


def to_embeddings(
    finished: Sequence[tuple[int, PoolingRequestOutput]], failures: Sequence[RequestFailure]
) -> EmbeddingBatch:
    """Columns of finished requests; one that was aborted or went wrong, or whose vector is not finite, is a failure."""
    numbers: list[int] = []
    rows: list[np.ndarray[tuple[int], np.dtype[np.float32]]] = []
    lost = list(failures)
    for number, output in finished:
        row = output.outputs.data.float().numpy().reshape(-1)
        if output.error is not None:
            lost.append(RequestFailure(number, output.error.message))
        elif not len(row):
            lost.append(RequestFailure(number, "aborted before its vector was made"))
        elif not np.isfinite(row).all():
            lost.append(RequestFailure(number, "its vector is not finite: the weights are probably broken"))
        else:
            numbers.append(number)
            rows.append(row)
    return EmbeddingBatch(
        numbers_N=np.array(numbers, np.int64),
        values_ND=np.stack(rows) if rows else np.zeros((0, 0), np.float32),
        failures=tuple(lost),
    )

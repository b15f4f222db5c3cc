"""One refit of a model that several processes hold in shards: rank 0 drives, the others gather with it.

Every gather is a collective that all ranks must make in the same order. Which passes a refit makes is the transport's
affair, so rank 0 tells the others before each step::

    source = ModuleSource(model)
    if torch.distributed.get_rank() == 0:
        with LeadingSource(source) as leading:
            receipt = refit(service, leading, transport)
    else:
        join_refit(source)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed

from rl_vllm.errors import BadInputError
from rl_vllm.protocols import WeightSource
from rl_vllm.types import TensorSpec
from rl_vllm.weights.source import ModuleSource

_SPECS, _PASS, _NEXT, _STOP, _SCORE, _END = "specs", "pass", "next", "stop", "score", "end"


class LeadingSource:
    """Rank 0's side: a weight source whose every step the other ranks, in :func:`join_refit`, make too.

    Leaving the context lets the other ranks go, also after a failure.

    Args:
        source: This rank's view of the sharded model.
        group: All ranks that hold shards; None means the default group. Waits are bounded by its own timeout.

    Raises:
        BadInputError: This is not rank 0 of the group.
    """

    def __init__(self, source: WeightSource, *, group: distributed.ProcessGroup | None = None) -> None:
        if distributed.get_rank(group) != 0:
            raise BadInputError(f"rank {distributed.get_rank(group)} drives no refit: call join_refit(source) on it")
        self._source = source
        self._group = group

    def __enter__(self) -> LeadingSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tell(_END)

    @property
    def is_on_gpu(self) -> bool:
        """Whether a weight of this rank is known to lie on a CUDA device."""
        return isinstance(self._source, ModuleSource) and self._source.is_on_gpu

    @property
    def can_score(self) -> bool:
        return isinstance(self._source, ModuleSource) and self._source.can_score

    @property
    def merges_adapters(self) -> bool:
        return isinstance(self._source, ModuleSource) and self._source.merges_adapters

    def specs(self) -> tuple[TensorSpec, ...]:
        """As the source says, asked on all ranks."""
        self._tell(_SPECS)
        return self._source.specs()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A pass of all ranks; a pass that is given up ends on all of them."""
        self._tell(_PASS)
        tensors = iter(self._source)
        try:
            while True:
                self._tell(_NEXT)
                item = next(tensors, None)
                if item is None:
                    return
                yield item
        finally:
            self._tell(_STOP)

    def score(self, rows: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """See :meth:`ModuleSource.score`; all ranks run the model."""
        if not isinstance(self._source, ModuleSource):
            raise BadInputError(f"a {type(self._source).__name__} cannot score: wrap a ModuleSource")
        self._tell(_SCORE, rows)
        return self._source.score(rows)

    def _tell(self, step: str, rows: Sequence[Sequence[int]] = ()) -> None:
        distributed.broadcast_object_list([step, rows], group=self._group, group_src=0)


def join_refit(source: WeightSource, *, group: distributed.ProcessGroup | None = None) -> None:
    """Take part in a refit that rank 0 drives; returns when rank 0 leaves its :class:`LeadingSource`.

    What it gathers is dropped. Rank 0 alone learns whether the refit took.

    Args:
        source: This rank's view of the model that rank 0 sends.
        group: The same ranks as rank 0's.

    Raises:
        BadInputError: This is rank 0.
    """
    if distributed.get_rank(group) == 0:
        raise BadInputError("rank 0 drives the refit: use LeadingSource(source) on it")
    tensors: Iterator[tuple[str, torch.Tensor]] = iter(())
    while True:
        message: list[object] = [None, None]
        distributed.broadcast_object_list(message, group=group, group_src=0)
        step, rows = message
        if step == _END:
            return
        if step == _SPECS:
            source.specs()
        elif step == _PASS:
            tensors = iter(source)
        elif step == _NEXT:
            next(tensors, None)
        elif step == _STOP:
            tensors = iter(())
        elif step == _SCORE and isinstance(source, ModuleSource) and isinstance(rows, Sequence):
            source.score(rows)

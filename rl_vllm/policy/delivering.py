"""Where a result is written."""

from __future__ import annotations

from collections.abc import Sequence

from tensordict import LazyStackedTensorDict, TensorDictBase

from rl_vllm.policy.keys import PolicyKeys
from rl_vllm.policy.outputs import stack_rows


def deliver(
    result: TensorDictBase, target: TensorDictBase | None, groups: Sequence[str], keys: PolicyKeys
) -> TensorDictBase:
    """Write a result where it belongs; a group that was there is replaced, never mixed with the new one.

    Args:
        result: Its groups have their usual names.
        target: Where to write, or None for nowhere.
        groups: What to write.
        keys: The names to write under.

    Returns:
        The target, or the result when there is none; of a dense target and a ragged result, a lazy stack of both.
    """
    if target is None or (isinstance(target, LazyStackedTensorDict) and not len(target)):
        # A lazy stack of nothing has no rows that could hold the keys.
        return _renamed(result, groups, keys)
    if not isinstance(result, LazyStackedTensorDict):
        _copy(result, target, groups, keys)
        return target
    in_place = isinstance(target, LazyStackedTensorDict) and target.ndim == 1
    # Ragged entries exist row by row only: a dense target becomes a lazy stack of its rows.
    rows = target.reshape(-1).unbind(0)
    if not in_place:
        rows = [row.copy() for row in rows]
    for row, result_row in zip(rows, result.reshape(-1).unbind(0), strict=True):
        _copy(result_row, row, groups, keys)
    return target if in_place else stack_rows(rows, target.batch_size)


def _copy(result: TensorDictBase, target: TensorDictBase, groups: Sequence[str], keys: PolicyKeys) -> None:
    for group in groups:
        target.set(keys.of(group), result.get(group))


def _renamed(result: TensorDictBase, groups: Sequence[str], keys: PolicyKeys) -> TensorDictBase:
    if keys == PolicyKeys() or not len(result.keys()):
        return result
    if isinstance(result, LazyStackedTensorDict):
        for row in result.tensordicts:
            _renamed(row, groups, keys)
        return result
    moved = [(group, keys.of(group)) for group in groups if keys.of(group) != group]
    values = {group: result.pop(group) for group, _ in moved}
    for group, name in moved:
        result.set(name, values[group])
    return result

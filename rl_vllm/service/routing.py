"""Which replica answers which prompt: pure functions over a snapshot of counters kept by the driver.

Nothing here asks a replica anything. Axes: B prompts of one batch, R replicas that serve.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]


def assign_least_outstanding(cost_B: Int64, load_R: Int64, *, first: int) -> Int64:
    """Give each prompt, in order, to the replica with the fewest outstanding tokens.

    Args:
        cost_B: int64 [B], tokens each prompt may still cost: its own and the longest response, for all samples.
        load_R: int64 [R], tokens outstanding on each serving replica; at least one replica.
        first: Replica to try first among equals; a caller that counts it up spreads ties over all of them.

    Returns:
        int64 [B], positions in ``load_R``. Cost O(B log R).
    """
    num_replicas = len(load_R)
    heap = [(int(load_R[i]), (i - first) % num_replicas, i) for i in range(num_replicas)]
    heapq.heapify(heap)
    chosen_B = np.empty(len(cost_B), np.int64)
    for row, cost in enumerate(cost_B.tolist()):
        load, order, replica = heap[0]
        chosen_B[row] = replica
        heapq.heapreplace(heap, (load + cost, order, replica))
    return chosen_B

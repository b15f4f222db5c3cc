"""A sampling seed for every request of a collector, all determined by one base seed."""

from __future__ import annotations

import hashlib

_SEED_BITS = 62


def request_seed(base: int | None, *, position: int, sample: int, attempt: int, turn: int) -> int | None:
    """The seed of one turn of one rollout, whatever order rollouts run in; None stays None.

    The first 62 bits of BLAKE2b over the five numbers: two of a run's requests share a seed with a probability of
    about their number squared by 2**63.
    """
    if base is None:
        return None
    named = f"{base}/{position}/{sample}/{attempt}/{turn}".encode()
    return int.from_bytes(hashlib.blake2b(named, digest_size=8).digest(), "big") >> (64 - _SEED_BITS)

"""Copies of a policy, in this process and in others."""

from __future__ import annotations

import copy
from typing import Any, Self

from rl_vllm.policy.sampling import CallSeeds
from rl_vllm.protocols import GenerationService


class Copied:
    """What a copy of a policy keeps, and what it has of its own.

    The service is pickled in its own way, and shared by ``copy.deepcopy``. A copy belongs to no collector, and its
    calls have seeds of their own, determined by the policy's and by how many copies were made before.
    """

    _service: GenerationService
    _seeds: CallSeeds

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_collector": None, "_seeds": self._seeds.derived()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        memo[id(self._service)] = self._service
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin

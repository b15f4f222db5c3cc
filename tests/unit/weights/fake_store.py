"""An object store in this process: what is put is copied, and goes with its reference, as in Ray's."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np

from rl_vllm.protocols.object_store import Bytes


class Reference:
    """To one object."""


class FakeStore:
    """Attributes say what happens and what happened.

    Attributes:
        objects: What is in it, by reference.
        waits: The limits that gets were given, in order, in seconds.
        before_put: Called with the number of objects put so far.
        before_get: Called with the number of gets so far.
    """

    def __init__(self) -> None:
        self.objects: weakref.WeakKeyDictionary[Reference, Bytes] = weakref.WeakKeyDictionary()
        self.waits: list[float] = []
        self.before_put: Callable[[int], None] = lambda _number: None
        self.before_get: Callable[[int], None] = lambda _number: None
        self._given: list[weakref.ref[Bytes]] = []

    @property
    def num_puts(self) -> int:
        """Arrays that were given to it."""
        return len(self._given)

    @property
    def num_given_alive(self) -> int:
        """How many of them are still in the giver's memory."""
        return sum(given() is not None for given in self._given)

    def put(self, data: Bytes) -> object:
        self.before_put(len(self._given))
        self._given.append(weakref.ref(data))
        reference = Reference()
        stored = np.array(data)
        stored.flags.writeable = False
        self.objects[reference] = stored
        return reference

    def get(self, reference: object, timeout_s: float) -> Bytes:
        self.waits.append(timeout_s)
        self.before_get(len(self.waits) - 1)
        assert isinstance(reference, Reference)
        return self.objects[reference]

    def tear(self, number: int) -> None:
        """Cut the last byte off one object."""
        reference = list(self.objects)[number]
        self.objects[reference] = self.objects[reference][:-1]

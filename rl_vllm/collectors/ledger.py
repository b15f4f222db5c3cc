"""Which prompts were drawn, and which of them are done with: what an exact resume needs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rl_vllm.envs.prompts import Entry
from rl_vllm.envs.sources import PromptSource
from rl_vllm.errors import BadInputError


@dataclass(frozen=True, slots=True)
class Draw:
    """A prompt on its way through a collector.

    Attributes:
        position: Its place in the source.
        entry: What the source holds there.
    """

    position: int
    entry: Entry


class Ledger:
    """Draws prompts in order, each once, for one caller at a time; the rest is safe to use from several threads.

    A prompt is *open* from its draw until it is settled: delivered, or dropped for good. The state of a ledger is the
    next position and the open prompts, so that a run that goes on from it repeats none and skips none.
    """

    def __init__(self, source: PromptSource) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._next = 0
        self._entries: Iterator[Entry] | None = None
        self._open: dict[int, Entry] = {}
        self._again: list[Draw] = []

    def draw(self) -> Draw | None:
        """The next prompt, those of a loaded state first; None when there are no more."""
        with self._lock:
            if self._again:
                return self._again.pop(0)
            if self._entries is None:
                self._entries = self._source.entries(self._next)
        # A source may be slow: nobody waits for it who only settles a prompt or asks for the state.
        entry = next(self._entries, None)
        if entry is None:
            return None
        with self._lock:
            draw = Draw(self._next, entry)
            self._open[draw.position] = entry
            self._next += 1
            return draw

    def settle(self, position: int) -> None:
        """Say that a prompt is done with."""
        with self._lock:
            del self._open[position]

    def state_dict(self) -> dict[str, Any]:
        """``next_position`` and ``open``, (position, entry) pairs in the order of the draws."""
        with self._lock:
            return {"next_position": self._next, "open": sorted(self._open.items(), key=lambda item: item[0])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; nothing may have been drawn yet.

        Raises:
            BadInputError: Something has been drawn, or the state is not one of a ledger.
        """
        position, again = _read(state)
        with self._lock:
            if self._next or self._entries is not None:
                raise BadInputError(
                    f"{self._next} prompts have been drawn already: load the state before the first batch"
                )
            self._next = position
            self._again = again
            self._open = {draw.position: draw.entry for draw in self._again}


def _read(state: Mapping[str, Any]) -> tuple[int, list[Draw]]:
    """The next position and the open prompts of a state; nothing has changed when it is refused."""
    missing = {"next_position", "open"} - set(state if isinstance(state, Mapping) else ())
    if missing:
        raise BadInputError(f"the collector's state lacks {sorted(missing)}: give what state_dict() returned")
    try:
        position = int(state["next_position"])
        again = [Draw(int(place), entry) for place, entry in state["open"]]
    except (TypeError, ValueError) as error:
        raise BadInputError(
            f"the collector's state cannot be read: give what state_dict() returned ({error})"
        ) from error
    places = [draw.position for draw in again]
    if len(set(places)) < len(places) or not all(0 <= place < position for place in places) or position < 0:
        raise BadInputError(
            f"the collector's state has the open prompts {places} before position {position}: each must come once, "
            "below it; give what state_dict() returned"
        )
    if not all(isinstance(draw.entry, Mapping) for draw in again):
        raise BadInputError(
            "the collector's state has open prompts that are no mappings: give what state_dict() returned"
        )
    return position, again

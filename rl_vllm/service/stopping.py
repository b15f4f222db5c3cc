"""Stops that several callers may ask for at once: a start that was cancelled, a shutdown, a removal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Stops:
    """At most one stop per index at a time; used on the service's loop only."""

    def __init__(self) -> None:
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def run(self, index: int, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Await ``work``, or the stop of this index that is under way; a caller that is cancelled leaves it running."""
        task = self._tasks.get(index)
        if task is None:
            task = self._tasks[index] = asyncio.create_task(work(), name=f"replica-{index}-stop")
            task.add_done_callback(lambda _task: self._tasks.pop(index, None))
        await asyncio.shield(task)

    def under_way(self) -> list[int]:
        """Indices of the stops that have not ended."""
        return list(self._tasks)

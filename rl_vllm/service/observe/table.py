"""A service's state as text for a person: what ``print(service)`` shows."""

from __future__ import annotations

import io
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from rl_vllm.service.observe.stats import ServiceStats
from rl_vllm.types import ReplicaState, ReplicaStats

if TYPE_CHECKING:
    from rich.table import Table

_COLUMNS = ("replica", "state", "version", "running", "waiting", "KV use", "tokens/s", "restarts")
_UNKNOWN = "-"
_STYLES = {
    ReplicaState.HEALTHY: "green",
    ReplicaState.SUSPECT: "yellow",
    ReplicaState.DEAD: "red",
    ReplicaState.STALE: "red",
    ReplicaState.RETIRED: "red",
}


def table(stats: ServiceStats, *, styled: bool, width: int = 80) -> str:
    """The replicas as a table between one line about the service and some about its work; no line end.

    Args:
        stats: What to show.
        styled: With lines and colours, for terminals; plain text otherwise.
        width: Columns to fit in.
    """
    rows = [_cells(replica) for replica in stats.replicas]
    body = _styled(stats, rows, width) if styled else _plain(rows)
    notes = [
        _cut(f"replica {replica.replica} is {replica.state.value}: {replica.reason}", width)
        for replica in stats.replicas
        if replica.state is not ReplicaState.HEALTHY and replica.reason
    ]
    return "\n".join([_title(stats, width), body, *notes, *_work(stats, width)])


def not_running(model: str, num_replicas: int, state: str) -> str:
    """One line about a service that has not been launched yet or has been shut down, as ``state`` says."""
    return f"{_short(model)}: {state} ({num_replicas} replica{'s' * (num_replicas > 1)})"


def _title(stats: ServiceStats, width: int) -> str:
    rest = f": {stats.num_serving} of {len(stats.replicas)} replicas serve version {stats.version}"
    return _cut(_short(stats.model), width - len(rest)) + rest


def _work(stats: ServiceStats, width: int) -> list[str]:
    done = stats.counters
    text = (
        f"{done.requests:,} prompts: {done.completed:,} answered, {done.failed:,} failed, "
        f"{done.cancelled:,} cancelled, {stats.outstanding_requests:,} outstanding; {done.refused:,} more refused, "
        f"{done.rerouted:,} sent again; {done.tokens:,} tokens; "
        f"{done.refits:,} refits, {done.refits_failed:,} failed; {done.deaths:,} deaths"
    )
    return textwrap.wrap(text, width)


def _cells(replica: ReplicaStats) -> list[str]:
    return [
        str(replica.replica),
        replica.state.value,
        str(replica.version),
        _UNKNOWN if replica.running is None else str(replica.running),
        _UNKNOWN if replica.waiting is None else str(replica.waiting),
        _UNKNOWN if replica.kv_usage is None else f"{replica.kv_usage:.0%}",
        _UNKNOWN if replica.tokens_per_s is None else f"{replica.tokens_per_s:,.0f}",
        str(replica.restarts),
    ]


def _plain(rows: list[list[str]]) -> str:
    lines = [list(_COLUMNS), *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]
    return "\n".join("  ".join(map(_aligned, line, widths, range(len(line)))).rstrip() for line in lines)


def _aligned(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if _COLUMNS[column] == "state" else cell.rjust(width)


def _styled(stats: ServiceStats, rows: list[list[str]], width: int) -> str:
    from rich.console import Console

    text = io.StringIO()
    console = Console(file=text, width=width, force_terminal=True, color_system="standard", no_color=False)
    console.print(_rich_table(stats, rows), end="")
    return text.getvalue().rstrip("\n")


def _rich_table(stats: ServiceStats, rows: list[list[str]]) -> Table:
    from rich import box
    from rich.table import Table

    # Without vertical lines: with them the eight columns do not fit in 80.
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in _COLUMNS:
        made.add_column(column, justify="left" if column == "state" else "right", no_wrap=True)
    for replica, row in zip(stats.replicas, rows, strict=True):
        row[1] = f"[{_STYLES[replica.state]}]{row[1]}[/]" if replica.state in _STYLES else row[1]
        made.add_row(*row)
    return made


def _short(model: str) -> str:
    """A folder's own name; a hub id as it is."""
    path = Path(model)
    return path.name if path.is_absolute() else model


def _cut(text: str, width: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: max(width - 3, 0)] + "..."

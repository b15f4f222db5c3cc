"""Why an engine did not start, in its own words.

vLLM starts its engine core and workers as processes of their own; when one fails, the parent only learns that it did
("See root cause above"). The reason stands in what the processes printed.
"""

from __future__ import annotations

import re
from pathlib import Path

from rl_vllm.config import EngineConfig
from rl_vllm.errors import EngineStartError, RLVLLMError

_EXCEPTION = re.compile(r"^(?:\(.*?\)\s*)?(?:ERROR .*?\]\s*)?((?:\w+\.)*\w*(?:Error|Exception|Killed))\s*: (.+)$")
# What a parent process says of a child's failure; never the cause.
_HEARSAY = ("root cause", "See stack trace", "initialization failed due to an exception in a background process")


class OutputMark:
    """A position in what this process and its children print, when that goes to files."""

    def __init__(self) -> None:
        self._starts: dict[Path, int] = {}
        for descriptor in (1, 2):
            target = Path(f"/proc/self/fd/{descriptor}").resolve()
            if target.is_file():
                self._starts[target] = target.stat().st_size

    def printed_since(self) -> str:
        """All that was printed since the mark; empty when the output goes to a terminal or a pipe."""
        parts = []
        for path, start in self._starts.items():
            with path.open("rb") as file:
                file.seek(start)
                parts.append(file.read().decode(errors="replace"))
        return "\n".join(parts)


def root_cause(error: BaseException, printed: str) -> str:
    """The first exception that a process printed, or the error itself when it is the cause.

    Args:
        error: What the parent process raised.
        printed: Everything the engine's processes printed while it started.
    """
    own = f"{type(error).__name__}: {error}"
    if not any(phrase in own for phrase in _HEARSAY):
        return own
    for line in printed.splitlines():
        match = _EXCEPTION.match(line.strip())
        if match and not any(phrase in line for phrase in _HEARSAY):
            return f"{match[1].rpartition('.')[2]}: {match[2].strip()}"
    tail = [line for line in printed.splitlines() if line.strip()][-5:]
    return own + (". Last lines printed: " + " | ".join(tail) if tail else "")


def start_error(
    error: Exception, mark: OutputMark, config: EngineConfig, replica: int, *, on_cpu: bool
) -> EngineStartError:
    """What to raise for an engine that did not start, with the reason and our name of the setting it blames."""
    if isinstance(error, RLVLLMError):
        return EngineStartError(replica, str(error))
    reason = root_cause(error, mark.printed_since())
    if on_cpu and "gpu_memory_utilization" in reason:
        reason += f" Here that is EngineConfig.cpu_kv_cache_gib, now {config.cpu_kv_cache_gib:g}."
    return EngineStartError(replica, reason)

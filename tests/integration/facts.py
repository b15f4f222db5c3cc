"""Scripts that need a Ray, cores or an end of their own: run in a process, they print what they found as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

_MARK = "FOUND "


def found_by(script: str, *arguments: str, timeout_s: float) -> dict[str, Any]:
    """What a script of this folder found; it must have ended well."""
    command = [sys.executable, "-m", f"tests.integration.{script}", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    found = [line.removeprefix(_MARK) for line in ended.stdout.splitlines() if line.startswith(_MARK)]
    assert found, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert ended.returncode == 0
    facts: dict[str, Any] = json.loads(found[0])
    return facts


def tell(facts: dict[str, Any]) -> None:
    """Print them, as the script's last word."""
    print(_MARK + json.dumps(facts))

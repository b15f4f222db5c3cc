"""Fakes and tiny models, shipped for users' own tests."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_vllm.testing.answers import FakeRequest, FakeScript
    from rl_vllm.testing.engine_script import FakeEngineScript
    from rl_vllm.testing.fake_engine import FakeEngine
    from rl_vllm.testing.fake_executor import FakeExecutor, FakeExecutorScript
    from rl_vllm.testing.fake_service import FakeService
    from rl_vllm.testing.gate import Gate

_WHERE = {
    "FakeEngine": "rl_vllm.testing.fake_engine",
    "FakeEngineScript": "rl_vllm.testing.engine_script",
    "FakeExecutor": "rl_vllm.testing.fake_executor",
    "FakeExecutorScript": "rl_vllm.testing.fake_executor",
    "FakeRequest": "rl_vllm.testing.answers",
    "FakeScript": "rl_vllm.testing.answers",
    "FakeService": "rl_vllm.testing.fake_service",
    "Gate": "rl_vllm.testing.gate",
}

__all__ = [
    "FakeEngine",
    "FakeEngineScript",
    "FakeExecutor",
    "FakeExecutorScript",
    "FakeRequest",
    "FakeScript",
    "FakeService",
    "Gate",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that a fake costs no model library."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)

"""Fakes and tiny models, shipped for users' own tests."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_vllm.testing.fake_service import FakeRequest, FakeScript, FakeService

_WHERE = dict.fromkeys(("FakeRequest", "FakeScript", "FakeService"), "rl_vllm.testing.fake_service")

__all__ = ["FakeRequest", "FakeScript", "FakeService"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that a fake costs no model library."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)

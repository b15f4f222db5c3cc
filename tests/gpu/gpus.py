"""How many GPUs a test file needs, asked before anything heavy is imported."""

from __future__ import annotations

import pytest
import torch


def need_gpus(count: int) -> None:
    """Skip the importing module where there are fewer."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < count:
        pytest.skip(f"GPUs: {count} needed, torch sees {found}", allow_module_level=True)

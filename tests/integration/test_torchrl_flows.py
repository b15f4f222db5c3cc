"""What TorchRL's documentation does, on real engines; and the table of ``docs/torchrl.md``, of what comes out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tensordict import set_list_to_stack

from rl_vllm import AsyncVLLM, VLLMWeightSyncScheme
from rl_vllm.testing.models import tiny_tokenizer
from tests.integration.torchrl_flows import FLOWS, Setting
from tests.integration.truth import load_trainer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

PAGE = Path(__file__).parents[2] / "docs" / "torchrl.md"


def table() -> dict[str, dict[str, tuple[list[str], str]]]:
    """Key, shape and dtype of each entry, by flow."""
    rows: dict[str, dict[str, tuple[list[str], str]]] = {}
    for line in PAGE.read_text().splitlines():
        found = re.fullmatch(r"\| `(\w+)` \| .* \| `([\w.]+)` \| \[([^\]]*)\] \| (\w+) \|", line)
        if found:
            flow, key, shape, dtype = found.groups()
            rows.setdefault(flow, {})[key] = ([axis.strip() for axis in shape.split(",")], dtype)
    return rows


@pytest.fixture(scope="module")
def setting(service: AsyncVLLM, tiny_qwen3_tied: Path) -> Setting:
    model = load_trainer(tiny_qwen3_tied)
    scheme = VLLMWeightSyncScheme(service=service)
    scheme.create_sender().update_weights(model)
    scheme.shutdown()
    return Setting(service, model, tiny_tokenizer())


def test_the_table_lists_every_flow():
    assert set(table()) == set(FLOWS)


@pytest.mark.parametrize("name", FLOWS)
def test_a_flow_gives_what_the_table_says(setting: Setting, name: str) -> None:
    with set_list_to_stack(True):
        out = FLOWS[name](setting)
    assert out.batch_size[0] == 2
    for key, (axes, dtype) in table()[name].items():
        value = out[0].get(tuple(key.split(".")))
        if not isinstance(value, torch.Tensor):
            value = getattr(value, "content", value) if dtype == "History" else value
            assert value is not None, key
            continue
        assert str(value.dtype).removeprefix("torch.") == dtype, key
        # The first axis is the batch's, which the row has not.
        assert axes[0] == "2"
        assert value.ndim == len(axes) - 1, (key, value.shape)
        for axis, size in zip(axes[1:], value.shape, strict=True):
            assert not axis.isdigit() or int(axis) == size, (key, value.shape)

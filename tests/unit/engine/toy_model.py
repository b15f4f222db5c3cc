"""A model of two layers without kernels, which vLLM's reload and ours load."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import nn
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

LOADED: list[weakref.ref[torch.Tensor]] = []


class Scaled(nn.Module):
    """Doubles what it loads, and counts how often."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, size), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(size), requires_grad=False)
        self.register_buffer("table", torch.arange(3.0))
        self.num_loads = 0
        self.weight.weight_loader = self.load
        self.bias.weight_loader = self.load

    def load(self, param: nn.Parameter, loaded: torch.Tensor) -> None:
        self.num_loads += 1
        LOADED.append(weakref.ref(param))
        param.data.copy_(2 * loaded)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


class Model(nn.Module):
    """Two layers that share one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Scaled(4)
        self.second = Scaled(4)
        self.second.weight = self.first.weight
        record_metadata_for_reloading(self)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        parameters = dict(self.named_parameters())
        names = set()
        for name, tensor in weights:
            parameters[name].weight_loader(parameters[name], tensor)
            names.add(name)
        return names

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def weights(value: float) -> dict[str, torch.Tensor]:
    return {
        "first.weight": torch.full((4, 4), value),
        "first.bias": torch.full((4,), 10 * value),
        "second.bias": torch.full((4,), 100 * value),
    }


X = torch.ones(1, 4)


def answer(value: float) -> float:
    """By hand: every weight is twice its value, every row sums four products."""
    first = 4 * 2 * value + 20 * value
    return 4 * 2 * value * first + 200 * value

"""What is done with tensors and modules that several processes hold in shards; of others, nothing."""

from __future__ import annotations

import torch
from torch import nn


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a sharded tensor: only plain tensors leave."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor: itself unless it is sharded."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gathers(module: nn.Module) -> bool:
    """Whether a call of ``module`` itself gathers parameters for what is inside it."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def let_go(module: nn.Module) -> None:
    """Drop the gathered parameters that a forward without backward leaves: the next one would use them, stale."""
    from torch.distributed.fsdp import FSDPModule

    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()

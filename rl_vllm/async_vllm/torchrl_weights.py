"""What TorchRL's weight senders hand over, and an engine in the shape that its receivers look for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

import torch
from tensordict import TensorDict

from rl_vllm.errors import BadInputError, UnsupportedByEngineError

# The worker's method that TorchRL's double buffer calls, with a folder and a number of threads.
LOAD_FROM_STORAGE = "load_weights_from_storage"

_HEAD = "lm_head.weight"
# Computed from the model's settings; TorchRL's tensordict strategy sends every buffer, checkpoints hold none of these.
_COMPUTED = (".rotary_emb.inv_freq", ".rotary_emb.original_inv_freq")


def without_copies(weights: Mapping[str, torch.Tensor], expected: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Leave out what a checkpoint would not hold: computed buffers, and a tied head that was copied on its way.

    What the engine expects stays, and so does a head that differs from every other tensor.
    """
    kept = {name: t for name, t in weights.items() if name in expected or not name.endswith(_COMPUTED)}
    head = kept.get(_HEAD)
    if head is not None and _HEAD not in expected:
        others = (tensor for name, tensor in kept.items() if name != _HEAD and tensor.shape == head.shape)
        if any(torch.equal(head, other) for other in others):
            del kept[_HEAD]
    return kept


def read_storage(folder: str) -> dict[str, torch.Tensor]:
    """The tensors that TorchRL's double-buffer sender wrote last, mapped.

    Raises:
        BadInputError: There is no tensordict in the folder.
    """
    try:
        found = TensorDict.load_memmap(folder)
    except (OSError, ValueError, KeyError) as error:
        raise BadInputError(
            f"{folder} holds no weights: call the sender's update_weights() first, with the same folder ({error})"
        ) from error
    return {name: tensor for name, tensor in found.flatten_keys(".").items() if isinstance(tensor, torch.Tensor)}


class ActorIndex(int):
    """A replica's index, which says so to who takes it for TorchRL's own actor of an engine."""

    @property
    def init_weight_transfer_engine(self) -> NoReturn:
        """Raises :class:`UnsupportedByEngineError`: TorchRL's NCCL scheme drives vLLM's workers by itself."""
        raise UnsupportedByEngineError(
            "TorchRL's NCCL scheme sends to engines that are its own actors, past checks, versions and recovery: use "
            'rl_vllm.VLLMWeightSyncScheme(transport="broadcast"), which has the same sender and receiver calls'
        )


class LocalLLM:
    """A service in the shape of vLLM's in-process ``LLM``, whose model TorchRL's receivers load into directly.

    Args:
        load: Installs weights on every replica.
        reset: Forgets cached prefixes; False when running requests hold some.
    """

    def __init__(self, load: Callable[[Iterable[tuple[str, torch.Tensor]]], None], reset: Callable[[], bool]) -> None:
        self._load = load
        self._reset = reset

    @property
    def llm_engine(self) -> LocalLLM:
        return self

    @property
    def model_executor(self) -> LocalLLM:
        return self

    @property
    def driver_worker(self) -> LocalLLM:
        return self

    @property
    def model_runner(self) -> LocalLLM:
        return self

    @property
    def model(self) -> LocalLLM:
        return self

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """One refit of every replica; raises what :meth:`rl_vllm.AsyncVLLM.update_weights` raises."""
        self._load(weights)

    def reset_prefix_cache(self) -> bool:
        """As the service's; the refit has settled it already."""
        return self._reset()

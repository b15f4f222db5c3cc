"""The names under which a policy reads and writes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from tensordict import unravel_key

from rl_vllm.config import name_hint
from rl_vllm.errors import ConfigError
from rl_vllm.policy.options import Key


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyKeys:
    """The name of each group of entries; what is in the groups keeps its names.

    Attributes:
        tokens, masks, log_probs: TorchRL's tensorclasses of these names.
        policy_version: The versions, one tensor.
        completion: Facts about each row.
        text, history: In the modes that have them.
    """

    tokens: Key = "tokens"
    masks: Key = "masks"
    log_probs: Key = "log_probs"
    policy_version: Key = "policy_version"
    completion: Key = "completion"
    text: Key = "text"
    history: Key = "history"

    def of(self, group: str) -> Key:
        """The name of a group, from its usual one."""
        names: dict[str, Key] = {
            "tokens": self.tokens,
            "masks": self.masks,
            "log_probs": self.log_probs,
            "policy_version": self.policy_version,
            "completion": self.completion,
            "text": self.text,
            "history": self.history,
        }
        return names[group]

    def within(self, group: str, entry: str) -> tuple[str, ...]:
        """The key of an entry of a group."""
        name = self.of(group)
        return (name, entry) if isinstance(name, str) else (*name, entry)

    def renamed(self, changes: dict[str, Any]) -> PolicyKeys:
        """The same with some names changed.

        Raises:
            ConfigError: A group is unknown, a name is no key, or two groups would share a name.
        """
        known = [entry.name for entry in fields(self)]
        for group, name in changes.items():
            if group not in known:
                raise ConfigError(f"the policy writes no group {group!r}: {name_hint(group, known, 'they are')}")
            parts = name if isinstance(name, tuple) else (name,)
            if not parts or any(not isinstance(part, str) or not part for part in parts):
                raise ConfigError(f"the key of {group!r} must be a string or a tuple of strings, got {name!r}")
        changed = replace(self, **{group: unravel_key(name) for group, name in changes.items()})
        names = [changed.of(group) for group in known]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"two groups would be written under {name!r}: give each a name of its own")
        return changed


class Keyed:
    """A policy's key names, as TorchRL's wrappers show them."""

    _keys: PolicyKeys
    # Of the nested tensors that TorchRL's transforms make of ragged logprobs; and that there are logprobs.
    layout = torch.strided
    return_log_probs = True

    @property
    def tokens_key(self) -> Key:
        return self._keys.tokens

    @property
    def masks_key(self) -> Key:
        return self._keys.masks

    @property
    def log_probs_key(self) -> Key:
        return self._keys.log_probs

    @property
    def text_key(self) -> Key:
        return self._keys.text

    @property
    def history_key(self) -> Key:
        return self._keys.history


def take_key_names(changes: dict[str, Any]) -> tuple[dict[str, Key], Key | None]:
    """Take TorchRL's arguments about keys out of ``changes``.

    Returns:
        Names by group, and the ``input_key``.

    Raises:
        ConfigError: ``return_log_probs`` is not True.
    """
    names = {}
    for entry in fields(PolicyKeys):
        given = changes.pop(f"{entry.name}_key", None)
        if given is not None:
            names[entry.name] = given
    if changes.pop("return_log_probs", True) is not True:
        raise ConfigError("return_log_probs=False: logprobs are always returned; remove it")
    return names, changes.pop("input_key", None)


def refuse_unknown(changes: dict[str, Any], known: list[str]) -> None:
    """Raise :class:`ConfigError` for the first name that is not known."""
    for name in changes:
        if name not in known:
            raise ConfigError(f"VLLMPolicy has no argument {name!r}: {name_hint(name, known, 'it takes')}")

"""The policy's rarer settings."""

from __future__ import annotations

from dataclasses import dataclass

from rl_vllm.config import require_above_zero
from rl_vllm.errors import ConfigError
from rl_vllm.types import BadPrompt

Key = str | tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions:
    """Settings that most users leave alone.

    Attributes:
        timeout_s: Limit for one forward call, in seconds; None means the service's own.
        on_bad_prompt: ``RAISE`` refuses a batch with a prompt that cannot be sent; ``MARK`` returns its row with
            ``("completion", "valid")`` False and an empty response.
        attention_mask_key: Entry that says which positions of a padded ``("tokens", "prompt")`` are real.
        pad_token_id: Fills padding in the output; None means the model's own, or 0 when it has none. Nothing reads
            it back: masks come from positions.
        chat_template: Jinja template for history mode; None means the tokenizer's own.
        chat_template_name: One of TorchRL's templates, for example ``chatml_format``, instead of ``chat_template``.
        allow_truncated_sampling: Allow ``top_p < 1``, ``top_k > 0`` and ``min_p > 0``, which bias importance ratios.
        in_place: Write into the tensordict that was given when its batch shape allows; otherwise return a new one.
    """

    timeout_s: float | None = None
    on_bad_prompt: BadPrompt = BadPrompt.RAISE
    attention_mask_key: Key = "attention_mask"
    pad_token_id: int | None = None
    chat_template: str | None = None
    chat_template_name: str | None = None
    allow_truncated_sampling: bool = False
    in_place: bool = True

    def __post_init__(self) -> None:
        if self.timeout_s is not None:
            require_above_zero("timeout_s", self.timeout_s)
        if not isinstance(self.on_bad_prompt, BadPrompt):
            raise ConfigError(f"on_bad_prompt must be a BadPrompt, got {self.on_bad_prompt!r}: use BadPrompt.MARK")
        if self.pad_token_id is not None and self.pad_token_id < 0:
            raise ConfigError(f"pad_token_id must be a token id, got {self.pad_token_id}")
        if self.chat_template is not None and self.chat_template_name is not None:
            raise ConfigError("chat_template and chat_template_name are both set: keep one")

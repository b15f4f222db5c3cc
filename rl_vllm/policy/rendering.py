"""Chats as token ids, rendered with a chat template."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from rl_vllm.errors import ConfigError

_PROBE_ANSWER = "an answer"
_PROBE = ({"role": "user", "content": "a question"}, {"role": "assistant", "content": _PROBE_ANSWER})


class ChatRenderer:
    """Renders lists of messages; safe to share between threads, which a bare fast tokenizer is not.

    Args:
        tokenizer: A Hugging Face tokenizer. It is not changed.
        chat_template: Jinja template; None means the tokenizer's own.
        template_kwargs: Further values that the template reads, for example ``{"enable_thinking": False}``.
        end_of_turn_ids: Ids that end an answer; None means the tokenizer's EOS and ``eos_token_ids``.
        eos_token_ids: Ids on which the model stops.

    Attributes:
        end_of_turn_ids: Ids with which the template ends an answer.
        answer_end_ids: Ids with which an answer of the model may end: these and every EOS.

    Raises:
        ConfigError: There is no chat template, or it ends an answer with none of the ids.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        end_of_turn_ids: Sequence[int] | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self._lock = threading.Lock()
        self._options = dict(template_kwargs or {})
        if chat_template is None and not tokenizer.chat_template:
            raise ConfigError("the tokenizer has no chat template: pass chat_template=, a Jinja template")
        if chat_template is not None:
            self._options["chat_template"] = chat_template
        own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        stops = frozenset((*own, *eos_token_ids))
        self.end_of_turn_ids = stops if end_of_turn_ids is None else frozenset(end_of_turn_ids)
        self.answer_end_ids = self.end_of_turn_ids | stops
        probe = self.ids(_PROBE, add_generation_prompt=False)
        last_end = max((place for place, token in enumerate(probe) if token in self.end_of_turn_ids), default=-1)
        if _PROBE_ANSWER in self.decode(probe[last_end + 1 :]):
            raise ConfigError(
                f"the chat template ends an answer with none of {sorted(self.end_of_turn_ids)} "
                f"(an answer renders as {tokenizer.convert_ids_to_tokens(probe)}): name its token in end_of_turn_ids"
            )

    def ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Token ids of a chat; the special tokens are the template's."""
        with self._lock:
            encoded = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=list(tools) if tools else None,
                tokenize=True,
                return_dict=True,
                **self._options,
            )
        ids: list[int] = encoded["input_ids"]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of ids, without tidying spaces."""
        with self._lock:
            text: str = self.tokenizer.decode(
                list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        return text

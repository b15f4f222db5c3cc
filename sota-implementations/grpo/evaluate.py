"""Mean reward on held-out prompts, and how sure a difference of two such means is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl_vllm import VLLMPolicy
from rl_vllm.envs import PromptSet, make_env

Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean reward before and after on the same prompts, with a 95 % bootstrap interval of the difference."""

    before: float
    after: float
    low: float
    high: float

    def __str__(self) -> str:
        return (
            f"mean reward on held-out prompts: {self.before:.3f} before, {self.after:.3f} after, "
            f"difference {self.after - self.before:+.3f} (95 % interval {self.low:+.3f} to {self.high:+.3f})"
        )


def evaluate(policy: VLLMPolicy, prompts: PromptSet, *, samples: int) -> Float64:
    """Mean reward of each prompt, float64 [P], over ``samples`` responses sampled as in training."""
    env = make_env(prompts, num_prompts=len(prompts), group_size=samples, tokenizer=policy.tokenizer)
    rewards = env.step(policy(env.reset()))["next", "reward"]
    env.close()
    means: Float64 = rewards.reshape(len(prompts), samples).double().mean(1).numpy()
    return means


def compare(before_P: Float64, after_P: Float64, *, resamples: int = 10_000, seed: int = 0) -> Difference:
    """Compare two evaluations of the same prompts.

    Percentile bootstrap over prompts (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13). The
    pairs are resampled: what makes a prompt easy before makes it easy after.
    """
    difference_P = after_P - before_P
    rows = np.random.default_rng(seed).integers(len(difference_P), size=(resamples, len(difference_P)))
    low, high = np.quantile(difference_P[rows].mean(1), [0.025, 0.975])
    return Difference(float(before_P.mean()), float(after_P.mean()), float(low), float(high))

"""The ways in which TorchRL's documentation uses its wrappers, environments, collectors, losses and transforms.

Each flow gets a service that runs and a Hugging Face model with the same weights, and returns a tensordict of batch
size [2]; ``docs/torchrl.md`` lists what is in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch.utils.data import DataLoader
from torchrl.collectors.llm import LLMCollector, RayLLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer, Unbounded
from torchrl.data.llm import History
from torchrl.envs import Transform
from torchrl.envs.llm import ChatEnv, DatasetChatEnv
from torchrl.envs.llm.transforms import KLRewardTransform, RetrieveLogProb
from torchrl.envs.llm.transforms.tools import SimpleToolTransform
from torchrl.modules.llm.policies import ChatHistory, Text, TransformersWrapper
from torchrl.objectives.llm.grpo import GRPOLoss, MCAdvantage
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rl_vllm import VLLMPolicy
from rl_vllm.envs import RolloutEnv, RolloutTask
from rl_vllm.testing.models import tiny_tokenizer

QUESTIONS = ["What is 1 + 1?", "Name a colour, please."]
SAMPLING = {"max_tokens": 8, "seed": 3}


@dataclass(frozen=True)
class Setting:
    """What a flow works with.

    Attributes:
        service: Two replicas of the tiny model.
        model: The same weights, as the trainer has them.
        tokenizer: The model's.
    """

    service: Any
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def policy(self, **settings: Any) -> VLLMPolicy:
        settings = {"sampling": SAMPLING, "tokenizer": self.tokenizer} | settings
        return VLLMPolicy(self.service, **settings)

    def scorer(self, **settings: Any) -> VLLMPolicy:
        return self.policy(sampling=None, generate=False, **settings)

    def trainer(self, input_mode: str) -> TransformersWrapper:
        return TransformersWrapper(
            self.model, tokenizer=self.tokenizer, input_mode=input_mode, generate=False, pad_output=True,
            pad_model_input=True, return_log_probs=True,
        )  # fmt: skip


def tokens(setting: Setting) -> TensorDictBase:
    ids = setting.tokenizer(QUESTIONS)["input_ids"]
    prompts = lazy_stack([TensorDict({("tokens", "prompt"): torch.tensor(row)}) for row in ids])
    return setting.policy()(prompts)


def text(setting: Setting) -> TensorDictBase:
    prompts = TensorDict(text=Text(prompt=QUESTIONS, batch_size=2), batch_size=2)
    return setting.policy(input_mode="text")(prompts)


def chats() -> TensorDictBase:
    history = History.from_chats([[{"role": "user", "content": question}] for question in QUESTIONS])
    return TensorDict(history=ChatHistory(prompt=history, batch_size=2), batch_size=2)


def history(setting: Setting) -> TensorDictBase:
    return setting.policy(input_mode="history")(chats())


def ragged(setting: Setting) -> TensorDictBase:
    return setting.policy(input_mode="history", pad_output=False)(chats())


def samples(setting: Setting) -> TensorDictBase:
    return setting.policy(input_mode="history", num_samples=3)(chats())


def score_tokens(setting: Setting) -> TensorDictBase:
    return setting.scorer()(tokens(setting))


def score_text(setting: Setting) -> TensorDictBase:
    whole = TensorDict(text=Text(full=QUESTIONS, batch_size=2), batch_size=2)
    return setting.scorer(input_mode="text")(whole)


def score_history(setting: Setting) -> TensorDictBase:
    return setting.scorer(input_mode="history")(history(setting).select("history"))


def chat_env(setting: Setting) -> TensorDictBase:
    env = ChatEnv(batch_size=(2,), tokenizer=setting.tokenizer, input_mode="history", system_prompt="be brief")
    return env.step(setting.policy(input_mode="history")(env.reset(TensorDict(query=QUESTIONS, batch_size=2))))


def dataset_env(setting: Setting, **settings: Any) -> Any:
    rows = DataLoader(
        [{"query": question} for question in QUESTIONS],
        batch_size=1,
        collate_fn=lambda rows: {"query": [row["query"] for row in rows]},
    )
    return DatasetChatEnv.from_dataloader(
        rows, batch_size=(2,), tokenizer=setting.tokenizer, input_mode="history", **settings
    )


def llm_collector(setting: Setting) -> TensorDictBase:
    policy = setting.policy(input_mode="history")
    collector = LLMCollector(dataset_env(setting), policy=policy, dialog_turns_per_batch=2, total_dialog_turns=2)
    (batch,) = list(collector)
    collector.shutdown()
    return batch[:, 0]


def ray_llm_collector(setting: Setting) -> TensorDictBase:
    """The policy goes to the collector's actor, and from there asks the service that this process owns."""
    questions = list(QUESTIONS)

    def make_env() -> Any:
        rows = DataLoader(
            [{"query": question} for question in questions],
            batch_size=1,
            collate_fn=lambda rows: {"query": [row["query"] for row in rows]},
        )
        return DatasetChatEnv.from_dataloader(
            rows, batch_size=(2,), tokenizer=tiny_tokenizer(), input_mode="history"
        )  # fmt: skip

    collector = RayLLMCollector(
        make_env, policy=setting.policy(input_mode="history"), dialog_turns_per_batch=2, remote_config={"num_cpus": 0}
    )
    try:
        return collector.next()[:, 0]
    finally:
        collector.shutdown()


class Length(Transform):
    """Rewards each answer with its number of characters, and ends the dialogue."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        lengths = [len(row["history"].response.content[0]) for row in tensordict.unbind(0)]
        reward = torch.tensor(lengths, dtype=torch.float32).reshape(-1, 1, 1)
        over = torch.ones(len(lengths), 1, dtype=torch.bool)
        return next_tensordict.update({"reward": reward, "done": over, "terminated": over.clone()})

    def transform_reward_spec(self, reward_spec: Any) -> Any:
        reward_spec["reward"] = Unbounded(shape=(*reward_spec.shape, 1, 1))
        return reward_spec


def grpo(setting: Setting) -> TensorDictBase:
    """Two samples of one question: collected, given advantages by the buffer, scored by the trainer."""
    env = dataset_env(setting, repeats=2).append_transform(Length())
    buffer = ReplayBuffer(storage=LazyStackStorage(2), batch_size=2)
    buffer.append_transform(MCAdvantage(grpo_size=2, prompt_key="query"))
    policy = setting.policy(input_mode="history")
    collector = LLMCollector(
        env, policy=policy, dialog_turns_per_batch=2, total_dialog_turns=2, replay_buffer=buffer, flatten_data=True
    )
    for _ in collector:
        pass
    collector.shutdown()
    batch = buffer[:]
    loss = GRPOLoss(setting.trainer("tokens"), masking_strategy="sft", entropy_bonus=False)(batch)
    torch.testing.assert_close(loss.ESS.squeeze(), torch.tensor(1.0), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(loss.kl_approx, torch.tensor(0.0), rtol=0, atol=1e-4)
    loss.loss_objective.backward()
    norms = [parameter.grad.norm() for parameter in setting.model.parameters() if parameter.grad is not None]
    assert torch.isfinite(torch.stack(norms)).all()
    return batch


def kl_reward(setting: Setting) -> TensorDictBase:
    """The trainer's model is the reference: with equal weights the KL is zero."""
    env = dataset_env(setting).append_transform(Length())
    env = env.append_transform(KLRewardTransform(setting.trainer("tokens"), coef=1.0))
    out = env.step(setting.policy(input_mode="history")(env.reset()))
    kl = out["next", "kl_penalty"]
    torch.testing.assert_close(kl, torch.zeros_like(kl), rtol=0, atol=1e-3)
    return out


def log_probs_of_the_policy(setting: Setting) -> TensorDictBase:
    scorer = setting.scorer(input_mode="history")
    transform = RetrieveLogProb(scorer, log_probs_full_key=("old", "full"), tokenizer=setting.tokenizer)
    return transform(history(setting).select("history"))


def simple_tool(setting: Setting) -> TensorDictBase:
    """A tool of TorchRL's answers a call; the call is written into the answer, as no tiny model makes one."""
    env = dataset_env(setting).append_transform(SimpleToolTransform(tools={"add": lambda a, b: {"sum": a + b}}))
    state = setting.policy(input_mode="history")(env.reset())
    for row in state.unbind(0):
        row["history"].full.content[-1] = '<tool>add\n{"a": 1, "b": 2}</tool>'
    return env.step(state)


def rollout_env(setting: Setting) -> TensorDictBase:
    policy = setting.policy()
    task = RolloutTask(QUESTIONS, lambda response, entry: float(len(response)), policy=policy)
    collector = LLMCollector(
        RolloutEnv(task, num_prompts=2), policy=policy, dialog_turns_per_batch=2, total_dialog_turns=2
    )
    (batch,) = list(collector)
    collector.shutdown()
    return batch[:, 0]


FLOWS: dict[str, Callable[[Setting], TensorDictBase]] = {
    flow.__name__: flow
    for flow in (
        tokens, text, history, ragged, samples, score_tokens, score_text, score_history, chat_env, llm_collector,
        ray_llm_collector, grpo, kl_reward, log_probs_of_the_policy, simple_tool, rollout_env,
    )
}  # fmt: skip

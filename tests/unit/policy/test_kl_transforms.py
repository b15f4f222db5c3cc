"""TorchRL's KL transforms, with the policy on either side and a trainer's wrapper on the other."""

import copy

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader
from torchrl.collectors.llm import LLMCollector
from torchrl.data.llm import History
from torchrl.envs import TransformedEnv
from torchrl.envs.llm import ChatEnv, DatasetChatEnv
from torchrl.envs.llm.transforms import KLRewardTransform, RetrieveKL, RetrieveLogProb
from torchrl.modules.llm.policies import ChatHistory, TransformersWrapper

from rl_vllm.errors import ConfigError
from rl_vllm.policy import VLLMPolicy
from rl_vllm.testing.fake_service import FakeScript, FakeService

CHATS = [
    [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}],
    [{"role": "user", "content": "and you?"}, {"role": "assistant", "content": "fine"}],
]


def logprobs_of(model, ids):
    """Logprob of each id after the first, without padding; float32 [T - 1]."""
    ids = torch.as_tensor(np.asarray(ids, np.int64))
    with torch.no_grad():
        logprobs = model(ids[None]).logits[0].log_softmax(-1)
    return logprobs[torch.arange(len(ids) - 1), ids[1:]]


@pytest.fixture(scope="module")
def other_model(hf_model):
    """The same architecture with other weights: its KL to the served one is far from 0."""
    model = copy.deepcopy(hf_model)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))
    return model


@pytest.fixture
def service(hf_model, tiny_info):
    def score_prompt(ids, version, replica):
        return np.concatenate([[np.nan], logprobs_of(hf_model, ids).numpy()])

    def score(prompt, response):
        return logprobs_of(hf_model, np.concatenate([prompt, response]))[len(prompt) - 1 :].numpy()

    return FakeService(info=tiny_info, script=FakeScript(score=score, score_prompt=score_prompt))


def reference(model, tokenizer, *, mode, pad_output, log_probs_key="ref_log_probs"):
    return TransformersWrapper(
        model, tokenizer=tokenizer, input_mode=mode, generate=False, pad_output=pad_output, log_probs_key=log_probs_key
    )


def chats_td(part="full"):
    chats = CHATS if part == "full" else [chat[:1] for chat in CHATS]
    td = TensorDict(history=ChatHistory(**{part: History.from_chats(chats)}, batch_size=[2]), batch_size=[2])
    td["next"] = TensorDict(reward=torch.zeros(2, 1, 1), batch_size=[2])
    return td


def expected_of(tokenizer, *models):
    """For each chat, ``models[0]``'s logprobs minus those of ``models[1]``, 0 on all the assistant did not write."""
    rows = []
    for chat in CHATS:
        encoded = tokenizer.apply_chat_template(
            chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, add_generation_prompt=False
        )
        scores = [logprobs_of(model, encoded["input_ids"]) for model in models]
        total = scores[0] - scores[1] if len(scores) == 2 else scores[0]
        rows.append(torch.cat([torch.zeros(1), total]) * torch.tensor(encoded["assistant_masks"]))
    return rows


def assert_rows(actual, expected):
    """Rows padded on the left, or not at all."""
    for row, values in zip(actual, expected, strict=True):
        gap = len(row) - len(values)
        torch.testing.assert_close(row, torch.cat([torch.zeros(gap), values]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pad_output", [True, False])
def test_retrieve_log_prob_writes_the_assistants_logprobs(service, hf_model, tokenizer, pad_output):
    scorer = VLLMPolicy(service, generate=False, input_mode="history", tokenizer=tokenizer, pad_output=pad_output)
    out = RetrieveLogProb(scorer, log_probs_full_key=("gen_log_probs", "full"))(chats_td())
    got = out["next"].get(("gen_log_probs", "full"), as_list=True)
    assert_rows(list(got), expected_of(tokenizer, hf_model))


@pytest.mark.parametrize("pad_output", [True, False])
def test_retrieve_kl_is_the_difference_of_both_models(service, hf_model, other_model, tokenizer, pad_output):
    scorer = VLLMPolicy(service, generate=False, input_mode="history", tokenizer=tokenizer, pad_output=pad_output)
    scorer.set_keys(log_probs="gen_log_probs")
    transform = RetrieveKL(
        scorer, reference(other_model, tokenizer, mode="history", pad_output=pad_output),
        gen_log_probs_full_key=("gen_log_probs", "full"), ref_log_probs_full_key=("ref_log_probs", "full"),
        add_to_reward=False,
    )  # fmt: skip
    kl = transform(chats_td())["next"].get("kl_penalty", as_list=True)
    expected = expected_of(tokenizer, hf_model, other_model)
    assert_rows(list(kl.unbind() if isinstance(kl, torch.Tensor) else kl), expected)
    assert max(row.abs().max() for row in expected) > 0.1


def test_retrieve_kl_makes_its_own_scorer_of_the_collectors_policy(service, hf_model, other_model, tokenizer):
    transform = RetrieveKL(
        "from_collector", reference(other_model, tokenizer, mode="history", pad_output=False), add_to_reward=False,
        gen_log_probs_full_key=("gen_log_probs", "full"), ref_log_probs_full_key=("ref_log_probs", "full"),
    )  # fmt: skip
    loader = DataLoader([{"query": "hi"}, {"query": "and you?"}], batch_size=1, collate_fn=joined)
    env = DatasetChatEnv.from_dataloader(loader, batch_size=(2,), tokenizer=tokenizer, input_mode="history")
    policy = VLLMPolicy(
        service, input_mode="history", tokenizer=tokenizer, pad_output=False, sampling={"max_tokens": 6}
    )
    collector = LLMCollector(env, policy=policy, dialog_turns_per_batch=2, total_dialog_turns=2)
    batch = next(iter(collector)).reshape(-1)
    # The environment tells the transform its collector, and that one its policy. Attached before the rollout, TorchRL's
    # own check of the environment's specs refuses the transform, whatever the policy is.
    collector.env.append_transform(transform)
    batch = transform(batch)
    collector.shutdown()
    largest = 0.0
    for row in batch.unbind(0):
        # The chat is rendered anew with the answer: what the assistant wrote is its text, and the end of its turn.
        chat = row["history"].full
        encoded = tokenizer.apply_chat_template(
            [{"role": r, "content": c} for r, c in zip(chat.role, chat.content, strict=True)],
            tokenize=True, return_dict=True, return_assistant_tokens_mask=True, add_generation_prompt=False,
        )  # fmt: skip
        ids = encoded["input_ids"]
        expected = torch.cat([torch.zeros(1), logprobs_of(hf_model, ids) - logprobs_of(other_model, ids)])
        expected *= torch.tensor(encoded["assistant_masks"])
        got = row["next", "kl_penalty"]
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        largest = max(largest, float(got.abs().max()))
    assert largest > 0.1


def joined(rows):
    return {"query": [row["query"] for row in rows]}


def test_a_policy_that_samples_at_another_temperature_is_not_scored_at_one(service, tokenizer):
    # The KL would be between two other distributions than the sampled one.
    policy = VLLMPolicy(service, input_mode="history", tokenizer=tokenizer, sampling={"temperature": 0.5})
    with pytest.raises(ConfigError, match=r"temperature=0\.5"):
        policy.get_new_version(
            generate=False, return_log_probs=True, log_probs_key=("gen_log_probs",), input_mode="history",
            input_key=("history", "full"), pad_output=True,
        )  # fmt: skip


@pytest.mark.parametrize("pad_output", [True, False])
@pytest.mark.parametrize("scored_by", ["trainer", "policy"])
def test_kl_reward_transform_takes_the_policys_rollout(
    service, hf_model, other_model, tokenizer, pad_output, scored_by
):
    """A trainer's model as the reference of the policy's rollout; or the service's own, whose KL is 0."""
    policy = VLLMPolicy(
        service, input_mode="history", pad_output=pad_output, tokenizer=tokenizer, sampling={"max_tokens": 6}
    )
    ref_model = (
        reference(other_model, tokenizer, mode="tokens", pad_output=pad_output, log_probs_key="log_probs")
        if scored_by == "trainer"
        else policy.get_new_version(generate=False, input_mode="tokens")
    )
    transform = KLRewardTransform(ref_model, coef=0.5)
    # The transform asks its environment where the actions are.
    env = TransformedEnv(ChatEnv(batch_size=(2,), tokenizer=tokenizer, input_mode="history"), transform)
    td = policy(chats_td("prompt"))
    sampled = [row.clone() for row in td.unbind(0)]
    if not pad_output:
        # The transform cannot read a ragged mask; without one it takes what follows the prompt, which is the same.
        for row in td.unbind(0):
            row["masks"].all_assistant_mask = None
    td["next"] = TensorDict(reward=torch.zeros(2, 1, 1), batch_size=[2])
    out = transform(td)["next"]
    assert env.transform is transform
    for row, before in enumerate(sampled):
        real, spoken = before["masks", "all_attention_mask"], before["masks", "all_assistant_mask"]
        ids = before["tokens", "full"][real]
        other = other_model if scored_by == "trainer" else hf_model
        expected = torch.zeros(len(real))
        expected[spoken] = (logprobs_of(hf_model, ids) - logprobs_of(other, ids))[-int(spoken.sum()) :]
        kl, reward = (out.get(name, as_list=True)[row] for name in ("kl_penalty", "reward"))
        torch.testing.assert_close(kl[:, 0], expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(reward[:, 0], -0.5 * expected, rtol=1e-4, atol=1e-4)
        assert (expected.abs().max() > 0.1) == (scored_by == "trainer")

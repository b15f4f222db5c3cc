"""Rollouts as a TorchRL environment: exact prompts, whole groups, rewards or errors."""

import time
from collections import Counter
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors.llm import LLMCollector
from torchrl.envs.utils import check_env_specs

from rl_vllm import VLLMPolicy
from rl_vllm.envs import PromptSource, Reply, Rewards, RolloutEnv, RolloutSetup, RolloutTask
from rl_vllm.errors import BadInputError, ConfigError, DeadlineError, RewardError
from rl_vllm.testing import FakeScript, FakeService
from rl_vllm.testing.answers import FAKE_MODEL
from rl_vllm.testing.models import TINY_VOCAB_SIZE, tiny_tokenizer
from rl_vllm.types import FinishReason

END = 511


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def make_policy(tokenizer, *, max_model_len=256, respond=None, sampling=None):
    info = replace(
        FAKE_MODEL, vocab_size=TINY_VOCAB_SIZE, max_model_len=max_model_len, eos_token_ids=(END,), pad_token_id=END
    )
    script = FakeScript() if respond is None else FakeScript(respond=respond)
    return VLLMPolicy(
        FakeService(info=info, script=script), tokenizer=tokenizer, sampling=sampling or {"max_tokens": 6}
    )  # fmt: skip


class Quiz:
    """Asks "next?" until the model has answered ``turns`` times; each turn is worth a quarter."""

    turns = 3

    def __init__(self, entry):
        self._left = self.turns

    def begin(self, messages):
        return messages

    def reply(self, answer, messages):
        self._left -= 1
        return Reply(({"role": "user", "content": "next?"},), reward=0.25, done=not self._left)

    def close(self):
        self._left = 0


@pytest.fixture
def make_env(tokenizer):
    built = []

    def build(
        prompts=("a", "b", "c"), reward=lambda r, e: 1.0, *, interaction=None, group_size=1, num_prompts=1, policy=None,
        **settings,
    ):  # fmt: skip
        policy = policy or make_policy(tokenizer)
        task = RolloutTask(list(prompts), reward, policy=policy, interaction=interaction, **settings)
        built.append(RolloutEnv(task, num_prompts=num_prompts, group_size=group_size))
        return built[-1], policy

    yield build
    for env in built:
        if not env.is_closed:
            env.close()


@pytest.mark.parametrize("interaction", [None, Quiz])
def test_the_specs_are_true(make_env, interaction):
    env, _ = make_env(interaction=interaction, num_prompts=2, group_size=2)
    check_env_specs(env, break_when_any_done="both")


def test_a_reset_gives_each_prompt_to_a_group(make_env, tokenizer):
    env, _ = make_env(["a", "bb"], num_prompts=2, group_size=2)
    td = env.reset()
    assert td["group_id"].tolist() == [0, 0, 1, 1]
    for row, question in zip(td.unbind(0), ["a", "a", "bb", "bb"], strict=True):
        ids = row["tokens", "prompt"][row["attention_mask"]].tolist()
        assert tokenizer.decode(ids) == f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        # Padded on the left.
        assert row["attention_mask"].int().diff().min() >= 0


def test_the_next_prompt_is_the_exact_sequence_and_what_is_new(make_env, tokenizer):
    env, policy = make_env(interaction=Quiz, num_prompts=2)
    td = policy(env.reset())
    exact = [row["tokens", "full"][row["masks", "all_attention_mask"]].tolist() for row in td.unbind(0)]
    following = env.step(td)["next"]
    for row, before in zip(following.unbind(0), exact, strict=True):
        ids = row["tokens", "prompt"][row["attention_mask"]].tolist()
        assert ids[: len(before)] == before
        assert tokenizer.decode(ids[len(before) :]) == "\n<|im_start|>user\nnext?<|im_end|>\n<|im_start|>assistant\n"
    assert following["reward"].tolist() == [[0.25]] * 2
    assert following["turn"].tolist() == [1, 1]
    assert not following["done"].any()


def test_the_outcomes_reward_comes_with_the_last_turn(make_env):
    env, policy = make_env(reward=lambda r, e: 10.0, interaction=Quiz)
    rewards, done = [], []
    td = env.reset()
    for _ in range(3):
        stepped = env.step(policy(td))["next"]
        rewards.append(stepped["reward"].item())
        done.append(stepped["done"].item())
        td = stepped
    assert rewards == [0.25, 0.25, 10.25]
    assert done == [False, False, True]
    assert stepped["terminated"].item()


def test_llm_collector_yields_whole_dialogues_round_and_round(make_env):
    env, policy = make_env(["a", "b"], interaction=Quiz, num_prompts=2)
    collector = LLMCollector(
        env, policy=policy, dialog_turns_per_batch=3, total_dialog_turns=12, yield_completed_trajectories=True
    )
    batches = [batch for batch in collector if batch is not None]
    collector.shutdown()
    seen = Counter(group for batch in batches for group in batch["group_id"].reshape(-1).tolist())
    # Two prompts at a time and three turns each; the collector has reset once for itself before.
    assert seen == {2: 3, 3: 3, 4: 3, 5: 3}
    questions = [batch["text", "prompt"][0] for batch in batches]
    assert all("\na<" in question for question in questions)


def test_rows_that_are_reset_alone_fill_one_group_after_the_other(make_env):
    env, _ = make_env(["a", "b", "c"], num_prompts=1, group_size=2)
    td = env.reset()
    assert td["group_id"].tolist() == [0, 0]
    reset = TensorDict({"_reset": torch.tensor([[True], [False]])}, batch_size=2)
    assert env.reset(td.update(reset))["group_id"].tolist() == [1, 0]
    reset = TensorDict({"_reset": torch.tensor([[False], [True]])}, batch_size=2)
    assert env.reset(td.update(reset))["group_id"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("reward", "match"),
    [
        (lambda r, e: 1 / 0, "ZeroDivisionError.*prompt 'a'"),
        (lambda r, e: float("nan"), "nan.*prompt 'a'"),
        (lambda r, e: "good", "good.*prompt 'a'"),
        (Rewards(lambda r, e: time.sleep(5), timeout_s=0.1), "had not returned after 0.1 s.*prompt 'a'"),
    ],
)
def test_a_reward_that_fails_is_an_error_that_names_prompt_and_value(make_env, reward, match):
    env, policy = make_env(["a"], reward)
    with pytest.raises(RewardError, match=match):
        env.step(policy(env.reset()))


def test_an_interaction_that_fails_or_hangs_is_an_error(make_env):
    class Broken(Quiz):
        def reply(self, answer, messages):
            raise ConnectionError("the game is gone")

    class Hangs(Quiz):
        def reply(self, answer, messages):
            time.sleep(5)

    env, policy = make_env(interaction=Broken)
    with pytest.raises(ConnectionError, match="the game is gone"):
        env.step(policy(env.reset()))
    env, policy = make_env(interaction=Hangs, interaction_timeout_s=0.1)
    with pytest.raises(DeadlineError, match="reply"):
        env.step(policy(env.reset()))


def test_a_rollout_whose_context_is_full_is_truncated_and_keeps_what_was_sampled(make_env, tokenizer):
    class Long(Quiz):
        def reply(self, answer, messages):
            return Reply(({"role": "user", "content": "word " * 30},))

    env, policy = make_env(interaction=Long, policy=make_policy(tokenizer, max_model_len=64))
    td = policy(env.reset())
    stepped = env.step(td)["next"]
    assert stepped["done"].item()
    assert stepped["truncated"].item()
    assert not stepped["terminated"].item()
    (segment,) = env.rollouts[0].segments
    assert segment.tokens_T.tolist() == td[0]["tokens", "full"][td[0]["masks", "all_attention_mask"]].tolist()


def test_turns_are_bounded(make_env):
    env, policy = make_env(interaction=Quiz, max_turns=2)
    td = env.step(policy(env.reset()))["next"]
    stepped = env.step(policy(td))["next"]
    assert stepped["truncated"].item()
    assert stepped["turn"].item() == 2


def test_an_answer_cut_by_length_is_truncated(make_env, tokenizer):
    policy = make_policy(tokenizer, respond=lambda request: [20] * request.limit)
    env, policy = make_env(policy=policy)
    td = policy(env.reset())
    assert td["completion", "finish_reason"].item() == FinishReason.LENGTH
    assert env.step(td)["next", "truncated"].item()


def test_the_answer_is_what_was_sampled_whatever_the_padding_looks_like(make_env, tokenizer):
    # Padding is the EOS here, and the second row's answer is the EOS alone.
    answers = [[104, 105, END], [END]]
    texts = []

    def reward(response, entry):
        texts.append((entry["question"], response))
        return 0.0

    policy = make_policy(tokenizer, respond=lambda request: answers[request.row])
    env, policy = make_env(["a", "b"], reward, num_prompts=2, policy=policy)
    env.step(policy(env.reset()))
    assert sorted(texts) == [("a", "hi"), ("b", "")]
    assert [segment.sampled_T.sum() for rollout in env.rollouts for segment in rollout.segments] == [3, 1]


def test_an_answer_without_provenance_is_taken_with_unknowns(make_env):
    env, _ = make_env()
    td = env.reset()
    td["tokens", "response"] = torch.tensor([[104, 105, END]])
    env.step(td)
    (segment,) = env.rollouts[0].segments
    assert segment.versions_T[segment.sampled_T].tolist() == [-1] * 3
    assert segment.logprobs_T.shape == segment.tokens_T.shape


def test_steps_need_a_response_and_a_completion(make_env):
    env, policy = make_env()
    td = env.reset()
    with pytest.raises(BadInputError, match=r"tokens.*response"):
        env.step(td.clone())
    done = policy(td)
    done["completion", "valid"] = torch.tensor([False])
    with pytest.raises(BadInputError, match="row 0 has no completion"):
        env.step(done)


def test_prompts_that_fill_the_context_are_refused_with_the_numbers(make_env, tokenizer):
    env, _ = make_env(["long " * 100], policy=make_policy(tokenizer, max_model_len=32))
    with pytest.raises(BadInputError, match="the context 32"):
        env.reset()


def test_an_iterator_that_is_exhausted_says_so(tokenizer):
    policy = make_policy(tokenizer)
    task = RolloutTask(PromptSource(iter(["a"])), lambda r, e: 1.0, policy=policy)
    env = RolloutEnv(task)
    env.reset()
    with pytest.raises(ConfigError, match="iterator"):
        env.reset()
    env.close()


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"max_turn": 2}, "did you mean 'max_turns'"),
        ({"max_turns": 0}, "max_turns"),
        ({"on_rewrite": "mend"}, "on_rewrite"),
        ({"interaction_timeout_s": 0.0}, "interaction_timeout_s"),
        ({"end_of_turn_ids": [5]}, "end_of_turn_ids"),
    ],
)
def test_settings_that_cannot_be_are_refused(tokenizer, settings, match):
    with pytest.raises(ConfigError, match=match):
        RolloutTask(["a"], lambda r, e: 1.0, policy=make_policy(tokenizer), **settings)


def test_a_policy_without_a_tokenizer_cannot_render():
    with pytest.raises(ConfigError, match="tokenizer="):
        RolloutSetup.of(VLLMPolicy(FakeService()))


def test_closing_closes_every_interaction_and_is_final(make_env):
    closed = []

    class Counted(Quiz):
        def close(self):
            closed.append(1)

    env, policy = make_env(interaction=Counted, num_prompts=2)
    env.step(policy(env.reset()))
    env.close()
    assert len(closed) == 2

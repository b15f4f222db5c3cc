"""Rows of the rollout environment do not disturb one another."""

import math
import time
from dataclasses import replace

import pytest

from rl_vllm.envs import PromptSource, Reply, RolloutEnv, RolloutTask
from rl_vllm.policy import VLLMPolicy
from rl_vllm.testing import FakeScript, FakeService
from rl_vllm.testing.answers import FAKE_MODEL
from rl_vllm.testing.models import TINY_VOCAB_SIZE

MORE = {"role": "user", "content": "more"}


class Turns:
    """Asks for more until the model has answered ``count`` times."""

    def __init__(self, count, fails=False):
        self.count, self.fails, self.closed = count, fails, 0

    def begin(self, messages):
        return messages

    def reply(self, answer, messages):
        if self.fails:
            raise OSError("the game is lost")
        done = sum(message["role"] == "assistant" for message in messages) >= self.count
        return Reply(() if done else (MORE,), reward=0.5, done=done)

    def close(self):
        self.closed += 1


@pytest.fixture
def build(tokenizer):
    """An environment and its policy; ``close`` is called at the end."""
    envs = []

    def make(
        prompts=("hi", "go", "no", "so"), reward=lambda r, e: 1.0, *, ids=None, max_len=256, script=None, **settings
    ):
        env_settings = {name: settings.pop(name) for name in ("num_prompts", "group_size") if name in settings}
        info = replace(
            FAKE_MODEL, vocab_size=TINY_VOCAB_SIZE, max_model_len=max_len,
            eos_token_ids=(tokenizer.eos_token_id,), pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        facts = {} if ids is None else {"respond": lambda request: ids}
        script = FakeScript(**facts, **(script or {}))
        policy = VLLMPolicy(FakeService(info=info, script=script), tokenizer=tokenizer, sampling={"max_tokens": 6})
        data = list(prompts) if not isinstance(prompts, PromptSource) else prompts
        env = RolloutEnv(RolloutTask(data, reward, policy=policy, **settings), **env_settings)
        envs.append(env)
        return env, policy

    yield make
    for env in envs:
        env.close()


def endless(*prompts):
    return PromptSource(list(prompts), epochs=None)


def raising(response, entry):
    raise ValueError("no scale")


def not_a_number(response, entry):
    return math.nan


def hanging(response, entry):
    time.sleep(30)


def test_what_an_interaction_raises_rises_and_the_other_rows_are_closed(build):
    made = []

    def factory(entry):
        made.append(Turns(2, fails=not made))
        return made[-1]

    env, policy = build(num_prompts=2, interaction=factory)
    with pytest.raises(OSError, match="the game is lost"):
        env.step(policy(env.reset()))
    env.close()
    assert [each.closed for each in made] == [1, 1]


@pytest.mark.parametrize("only_end", [True, False])
def test_an_answer_without_text_is_scored(build, tokenizer, only_end):
    env, policy = build(reward=lambda r, e: float(r == ""), ids=[tokenizer.eos_token_id] if only_end else [])
    last = env.step(policy(env.reset()))["next"]
    assert (last["reward"].item(), last["truncated"].item()) == (1.0, not only_end)


def test_a_row_that_is_over_takes_no_further_answer(build, tokenizer):
    counts = {"hi": 1, "go": 2}
    env, policy = build(
        ids=[97, tokenizer.eos_token_id], num_prompts=2, interaction=lambda entry: Turns(counts[entry["question"]])
    )
    first = env.step(policy(env.reset()))["next"]
    assert first["reward"].reshape(-1).tolist() == [1.5, 0.5]
    second = env.step(policy(first.select("tokens", "attention_mask", "group_id", "turn")))["next"]
    assert second["reward"].reshape(-1).tolist() == [0.0, 1.5]
    assert second["turn"].tolist() == [1, 2]


def test_answers_are_clamped_to_the_context(build):
    # The prompt has 14 tokens of 16: the response gets 2, not 6.
    env, policy = build(ids=[97] * 6, max_len=16)
    td = policy(env.reset())
    assert td["tokens", "response"][0].tolist() == [97, 97]
    assert env.step(td)["next", "truncated"].item()


def test_a_row_without_room_for_a_question_leaves_the_others_room_to_go_on(build, tokenizer):
    # Of 40 tokens "hi" takes 14 and the answer 2; "more" takes 18 more, and a long word does not fit.
    class Words(Turns):
        def __init__(self, word):
            super().__init__(2)
            self.word = word

        def reply(self, answer, messages):
            reply = super().reply(answer, messages)
            return reply if reply.done else Reply(({"role": "user", "content": self.word},))

    words = {"hi": "z" * 40, "go": "more"}
    env, policy = build(
        ids=[97, tokenizer.eos_token_id], num_prompts=2, max_len=40, interaction=lambda e: Words(words[e["question"]])
    )
    first = env.step(policy(env.reset()))["next"]
    assert first["truncated"].reshape(-1).tolist() == [True, False]
    second = env.step(policy(first.select("tokens", "attention_mask", "group_id", "turn")))["next"]
    assert second["truncated"].reshape(-1).tolist() == [True, False]
    assert second["terminated"].reshape(-1).tolist() == [False, True]


@pytest.mark.parametrize("stops", [{}, {0: 65}, {0: 65, 1: 65}])
def test_a_stop_id_is_not_part_of_the_answer(build, stops):
    seen = []
    env, policy = build(
        reward=lambda r, e: seen.append((e["question"], r)) or 0.0,
        ids=[121, 65],
        num_prompts=2,
        script={"stops": stops},
    )
    env.step(policy(env.reset()))
    assert dict(seen) == {"hi": "y" if 0 in stops else "yA", "go": "y" if 1 in stops else "yA"}

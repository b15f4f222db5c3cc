import pickle

import numpy as np
import pytest
import torch

from rl_vllm.envs import PromptSet, make_env
from rl_vllm.errors import RewardError
from tests.unit.envs.conftest import ENTRIES, exact


def rewards_of(env, policy):
    return env.step(policy(env.reset()))["next"]


@pytest.mark.parametrize("input_mode", ["history", "text"])
@pytest.mark.parametrize("pad_output", [True, False])
def test_each_response_is_scored_against_its_own_prompt(prompts, speaking, tokenizer, input_mode, pad_output):
    env = make_env(prompts, num_prompts=3, input_mode=input_mode, tokenizer=tokenizer)
    policy = speaking(["red", "red", " blue\n"], input_mode=input_mode, pad_output=pad_output)
    following = rewards_of(env, policy)
    assert following["reward"].tolist() == [[1.0], [0.0], [1.0]]
    assert following["reward"].dtype == torch.float32
    assert following["done"].tolist() == following["terminated"].tolist() == [[True]] * 3


@pytest.mark.parametrize("value", [1, True, np.float32(1.0), torch.tensor([1.0])])
def test_any_single_number_is_a_reward(speaking, value):
    env = make_env(PromptSet(ENTRIES, lambda response, entry: value), num_prompts=2)
    assert rewards_of(env, speaking("x"))["reward"].tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (float("nan"), "the reward is nan"),
        (float("-inf"), "the reward is -inf"),
        (torch.tensor([1.0, 2.0]), r"the reward has shape \(2,\) instead of one number"),
        (np.zeros((3, 1)), "ndarray. instead of one number"),
        ("1.0", r"the reward is '1.0' \(str\)"),
        (None, "the reward is 'None'"),
    ],
)
def test_what_is_not_one_finite_number_is_refused_with_prompt_and_response(speaking, value, complaint):
    env = make_env(PromptSet(ENTRIES, lambda response, entry: value), num_prompts=2)
    with pytest.raises(RewardError, match=complaint) as caught:
        rewards_of(env, speaking("bla"))
    assert "prompt 0 ('red?'), response 'bla'" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_reward_function_that_raises_is_named_with_its_reason(speaking):
    def careless(response, entry):
        return exact(response, entry) / len(response)

    env = make_env(PromptSet(ENTRIES, careless), num_prompts=2)
    with pytest.raises(RewardError, match=r"raised ZeroDivisionError: .*prompt 1 .'green.'., response ''") as caught:
        rewards_of(env, speaking(["red", ""]))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)

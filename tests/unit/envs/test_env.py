import warnings

import pytest
import torch
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.objectives.llm import MCAdvantage

from rl_vllm.envs import PromptSet, make_env
from rl_vllm.errors import ConfigError
from tests.unit.envs.conftest import ENTRIES, exact


def drawn(env, batches):
    return [env.reset()["prompt_id"].tolist() for _ in range(batches)]


def test_a_reset_draws_each_prompt_group_size_times_in_a_row(prompts):
    env = make_env(prompts, num_prompts=2, group_size=3)
    state = env.reset()
    assert env.batch_size == (6,)
    assert state["prompt_id"].tolist() == [0, 0, 0, 1, 1, 1]
    assert [row["question"] for row in state.unbind(0)] == ["red?"] * 3 + ["green?"] * 3
    assert [row["answer"] for row in state.unbind(0)] == ["red"] * 3 + ["green"] * 3


def test_resets_walk_through_the_prompts_and_start_again(prompts):
    assert drawn(make_env(prompts, num_prompts=2), 4) == [[0, 1], [2, 3], [4, 0], [1, 2]]


def test_an_env_goes_on_where_another_stopped(prompts):
    whole = drawn(make_env(prompts, num_prompts=2, seed=5), 6)
    assert drawn(make_env(prompts, num_prompts=2, seed=5, first_position=6), 3) == whole[3:]


def test_an_entry_without_answer_shows_an_empty_one():
    env = make_env(PromptSet(({"question": "why?"},), lambda response, entry: 0.0), num_prompts=1)
    assert env.reset()[0]["answer"] == ""


@pytest.mark.parametrize("input_mode", ["history", "text"])
def test_the_model_sees_system_prompt_examples_and_question(speaking, tokenizer, input_mode):
    example = {"question": "sky?", "answer": "blue"}
    prompts = PromptSet(ENTRIES, exact, examples=(example,), system_prompt="one word")
    env = make_env(prompts, num_prompts=1, input_mode=input_mode, tokenizer=tokenizer)
    policy = speaking("red", input_mode=input_mode)
    policy(env.reset())
    sent = policy.service.generate_calls[0].prompts.row(0).tolist()
    assert tokenizer.decode(sent) == (
        "<|im_start|>system\none word<|im_end|>\n<|im_start|>user\nsky?<|im_end|>\n"
        "<|im_start|>assistant\nblue<|im_end|>\n<|im_start|>user\nred?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("input_mode", ["history", "text"])
def test_a_collector_fills_a_buffer_with_groups_and_their_advantages(prompts, speaking, tokenizer, input_mode):
    env = make_env(prompts, num_prompts=2, group_size=2, input_mode=input_mode, tokenizer=tokenizer)
    policy = speaking(["blue", "pink", "white", "white"], input_mode=input_mode)
    with warnings.catch_warnings():
        # LLMCollector has no argument for the transforms that it warns about: the env must have them.
        warnings.simplefilter("error", FutureWarning)
        collector = LLMCollector(env, policy=policy, dialog_turns_per_batch=4, total_dialog_turns=4)
    batch = next(iter(collector)).reshape(-1)
    collector.shutdown()
    buffer = ReplayBuffer(
        storage=LazyStackStorage(4), transform=MCAdvantage(grpo_size=2, prompt_key="prompt_id"), batch_size=4
    )
    buffer.extend(batch)
    stored = buffer[:]
    # The first batch went into the collector's construction, which resets the env once.
    assert stored["prompt_id"].flatten().tolist() == [2, 2, 3, 3]
    # Rewards 1 and 0: mean 1/2, standard deviation sqrt(1/2); two equal rewards: nothing to learn.
    expected = torch.tensor([0.5**0.5, -(0.5**0.5), 0.0, 0.0])
    torch.testing.assert_close(stored["advantage"].flatten(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"num_prompts": 0}, "num_prompts must be an integer of at least 1"),
        ({"num_prompts": 6}, "num_prompts=6, but the prompt set has 5"),
        ({"num_prompts": 1, "group_size": 0}, "group_size must be"),
        ({"num_prompts": 1, "first_position": -1}, "first_position must be"),
        ({"num_prompts": 1, "input_mode": "tokens"}, "input_mode must be one of history, text, got 'tokens'"),
        ({"num_prompts": 1, "input_mode": "text"}, "pass tokenizer="),
    ],
)
def test_arguments_out_of_range_are_refused(prompts, arguments, complaint):
    with pytest.raises(ConfigError, match=complaint):
        make_env(prompts, **arguments)

from dataclasses import replace

import pytest

from rl_vllm.envs import TaskConfig, load_task
from rl_vllm.errors import BadInputError, ConfigError

NEEDLE = TaskConfig(
    name="needle_haystack", options={"min_num_statements": 2, "max_num_statements": 2}, num_train=40, num_held_out=20
)
# Thirty different questions in all.
SMALL = TaskConfig(name="count_bits", options={"min_n": 1, "max_n": 30}, num_train=18, num_held_out=10)


def questions(entries):
    return [entry["question"].strip() for entry in entries]


@pytest.mark.parametrize("config", [NEEDLE, SMALL])
def test_no_question_is_in_two_of_training_held_out_and_examples(config):
    splits = load_task(config)
    everything = questions([*splits.train.entries, *splits.held_out.entries, *splits.train.examples])
    assert len(everything) == config.num_train + config.num_held_out + config.num_examples
    assert len(set(everything)) == len(everything)
    assert splits.train.examples == splits.held_out.examples


def test_the_same_seed_gives_the_same_prompts_and_another_seed_gives_others():
    first, again = load_task(NEEDLE), load_task(NEEDLE)
    assert questions(first.train.entries) == questions(again.train.entries)
    other = load_task(replace(NEEDLE, seed=1))
    assert not set(questions(first.train.entries)) & set(questions(other.train.entries))


def test_the_held_out_prompts_stay_when_there_are_more_training_prompts():
    more = load_task(replace(NEEDLE, num_train=80))
    assert questions(more.held_out.entries) == questions(load_task(NEEDLE).held_out.entries)


def test_examples_have_different_answers():
    splits = load_task(replace(SMALL, num_examples=4, num_train=4))
    answers = [entry["answer"] for entry in splits.train.examples]
    assert len(answers) == len(set(answers)) == 4


def test_the_reward_is_one_for_the_right_name_and_zero_for_more_than_it():
    prompts = load_task(NEEDLE).train
    entry = prompts.entries[0]
    assert prompts.reward(entry["answer"], entry) == 1.0
    assert prompts.reward(f"It is {entry['answer']}.", entry) == 0.0
    assert prompts.reward("", entry) == 0.0


def test_an_unknown_task_names_near_ones():
    with pytest.raises(ConfigError, match="no task 'needle_haystak'; near: needle_haystack"):
        load_task(replace(NEEDLE, name="needle_haystak"))


@pytest.mark.parametrize("options", [{"number_of_needles": 3}, {"min_num_statements": 5, "max_num_statements": 2}])
def test_options_that_the_task_refuses_are_shown_with_its_reason(options):
    with pytest.raises(ConfigError, match=r"needle_haystack refuses \{.*\}: .*num"):
        load_task(replace(NEEDLE, options=options))


@pytest.mark.parametrize("name", ["seed", "size"])
def test_options_cannot_set_what_the_config_sets(name):
    with pytest.raises(ConfigError, match=name):
        replace(NEEDLE, options={name: 3})


@pytest.mark.parametrize(("name", "value"), [("num_train", 0), ("num_held_out", 0), ("num_examples", -1), ("seed", -1)])
def test_numbers_out_of_range_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"{name} must be an integer of at least"):
        replace(NEEDLE, **{name: value})


def test_a_task_that_is_too_small_says_how_many_prompts_it_has():
    with pytest.raises(BadInputError, match="count_bits has too few different prompts: 18 of 19"):
        load_task(replace(SMALL, num_train=19))

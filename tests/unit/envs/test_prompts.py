from itertools import islice

import pytest

from rl_vllm.envs import PromptSet
from rl_vllm.errors import BadInputError
from tests.unit.envs.conftest import ENTRIES, exact


def test_an_empty_dataset_is_refused():
    with pytest.raises(BadInputError, match="the dataset is empty"):
        PromptSet((), exact)


@pytest.mark.parametrize("entry", [{}, {"question": None}, {"question": "  "}, {"question": 7}])
def test_an_entry_without_a_question_is_refused_by_its_number(entry):
    with pytest.raises(BadInputError, match="entry 1 of the dataset has question="):
        PromptSet((ENTRIES[0], entry), exact)


def test_an_example_without_an_answer_is_refused():
    with pytest.raises(BadInputError, match="example 0 of the dataset has answer=None"):
        PromptSet(ENTRIES, exact, examples=({"question": "1 + 1?", "answer": None},))


def test_a_chat_is_system_prompt_then_examples_then_the_question():
    prompts = PromptSet(ENTRIES, exact, examples=({"question": " hi ", "answer": "yo"},), system_prompt="be brief")
    assert prompts.chat(1) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "green?"},
    ]


def test_without_system_prompt_and_examples_a_chat_is_the_question(prompts):
    assert prompts.chat(0) == [{"role": "user", "content": "red?"}]


def test_every_pass_has_every_prompt_once_in_an_order_of_its_own(prompts):
    first, second, third = (list(islice(prompts.order(seed=3, start=5 * epoch), 5)) for epoch in range(3))
    assert sorted(first) == sorted(second) == sorted(third) == [0, 1, 2, 3, 4]
    assert len({tuple(first), tuple(second), tuple(third)}) > 1


def test_the_order_goes_on_where_another_run_stopped(prompts):
    whole = list(islice(prompts.order(seed=1), 12))
    assert list(islice(prompts.order(seed=1, start=7), 5)) == whole[7:]


def test_without_a_seed_the_order_is_the_datasets(prompts):
    assert list(islice(prompts.order(seed=None), 7)) == [0, 1, 2, 3, 4, 0, 1]


def test_another_seed_gives_another_order(prompts):
    orders = {tuple(islice(prompts.order(seed=seed), 10)) for seed in range(5)}
    assert len(orders) == 5

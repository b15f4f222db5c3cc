"""A run that stops anywhere and goes on repeats no prompt and leaves none out."""

import pickle
import time

import pytest
import torch
from torchrl.data import LazyStackStorage, ReplayBuffer

from rl_vllm.envs import PromptSource
from rl_vllm.errors import BadInputError
from tests.unit.collectors.conftest import groups_of, prompts


@pytest.mark.parametrize("stop_after", range(5))
def test_the_rest_comes_once_after_any_number_of_batches(collect, stop_after):
    source = {"seed": 5, "epochs": 2}
    first = collect(prompts(4, **source))
    found = [group for _ in range(stop_after) for group in groups_of(next(first))]
    # Groups that are finished and not delivered, too, are made again.
    state = pickle.loads(pickle.dumps(first.state_dict()))
    first.shutdown()
    second = collect(prompts(4, **source))
    second.load_state_dict(state)
    batches = list(second)
    found += [group for batch in batches for group in groups_of(batch)]
    assert sorted(found) == list(range(8))
    questions = {group: entry["question"] for group, entry in enumerate(prompts(4, **source).entries())}
    for batch in batches:
        for row in batch.unbind(0):
            assert questions[row["group_id"].item()] in row["text", "prompt"]


def test_prompts_in_flight_of_a_generator_come_back_from_the_state(collect):
    def rows():
        yield from (f"row {number}" for number in range(6))

    first = collect(PromptSource(rows))
    found = groups_of(next(first))
    state = first.state_dict()
    assert len(state["ledger"]["open"]) == state["ledger"]["next_position"] - 2
    second = collect(PromptSource(rows))
    second.load_state_dict(state)
    found += [group for batch in second for group in groups_of(batch)]
    assert sorted(found) == list(range(6))


def test_a_dropped_prompt_is_done_with(collect):
    def reward(response, entry):
        return 1 / 0 if entry["question"] == "q0" else 1.0

    first = collect(prompts(4), reward, max_retries=0)
    found = groups_of(next(first))
    second = collect(prompts(4), lambda r, e: 1.0)
    second.load_state_dict(first.state_dict())
    found += [group for batch in second for group in groups_of(batch)]
    assert sorted(found) == [1, 2, 3]


def test_groups_delivered_count_towards_the_total_after_a_resume(collect):
    first = collect(prompts(100), total_groups=6)
    next(first)
    second = collect(prompts(100), total_groups=6)
    second.load_state_dict(first.state_dict())
    assert sum(len(groups_of(batch)) for batch in second) == 4


def test_a_state_is_loaded_before_the_first_batch_and_whole(collect):
    collector = collect(prompts(4))
    with pytest.raises(BadInputError, match="next_position"):
        collector.load_state_dict({"ledger": {"open": []}, "groups": 0})
    state = collector.state_dict()
    next(collector)
    with pytest.raises(BadInputError, match="before the first batch"):
        collector.load_state_dict(state)


def test_groups_that_wait_in_the_buffer_count_towards_the_total_after_a_resume(collect):
    buffer = ReplayBuffer(storage=LazyStackStorage(100))
    first = collect(prompts(100), total_groups=6, max_in_flight=4, replay_buffer=buffer)
    next(first)
    while len(buffer) < 8:
        time.sleep(0.01)
    time.sleep(0.1)
    second = collect(prompts(100), total_groups=6, replay_buffer=buffer)
    second.load_state_dict(first.state_dict())
    list(second)
    assert sorted(buffer[:]["group_id"].tolist()) == sorted(2 * list(range(6)))


@pytest.mark.parametrize("buffered", [False, True])
def test_a_total_that_is_passed_already_ends_the_iteration_at_once(collect, buffered):
    own = {"replay_buffer": ReplayBuffer(storage=LazyStackStorage(100))} if buffered else {}
    first = collect(prompts(100), total_groups=4)
    assert len(list(first)) == 2
    second = collect(prompts(100), total_groups=2, **own)
    second.load_state_dict(first.state_dict())
    assert list(second) == []
    assert second.stats.groups_begun == 0


@pytest.mark.parametrize(
    "state",
    [
        None, 3, {}, {"groups": 1}, {"ledger": None, "groups": 1},
        {"ledger": {"next_position": 1, "open": []}},
        {"ledger": {"next_position": 1, "open": []}, "groups": -1},
        {"ledger": {"next_position": 1, "open": []}, "groups": "many"},
        {"ledger": {"next_position": -1, "open": []}, "groups": 0},
        {"ledger": {"next_position": 1, "open": 7}, "groups": 0},
        {"ledger": {"next_position": 1, "open": [(1, {"question": "q"})]}, "groups": 0},
        {"ledger": {"next_position": 2, "open": [(0, {"question": "q"})] * 2}, "groups": 0},
        {"ledger": {"next_position": 2, "open": [(0, "q")]}, "groups": 0},
    ],
)  # fmt: skip
def test_rubbish_is_no_state_and_leaves_the_collector_as_it_was(collect, state):
    collector = collect(prompts(2))
    before = collector.state_dict()
    with pytest.raises(BadInputError):
        collector.load_state_dict(state)
    assert collector.state_dict() == before


def test_a_state_goes_through_torch_save(collect, tmp_path):
    first = collect(prompts(6))
    found = groups_of(next(first))
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = collect(prompts(6))
    second.load_state_dict(torch.load(tmp_path / "state.pt"))
    found += [group for batch in second for group in groups_of(batch)]
    assert sorted(found) == list(range(6))

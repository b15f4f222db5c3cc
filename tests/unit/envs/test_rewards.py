import asyncio
import functools
import pickle
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from rl_vllm.envs import Finished, Reward, Rewards
from rl_vllm.errors import ConfigError, RewardError


def rollout(question, response, **entry):
    entry = {"question": question, **entry}
    return Finished(
        entry, ({"role": "user", "content": question}, {"role": "assistant", "content": response}), response
    )


ROLLOUTS = [rollout("red?", "red", answer="red"), rollout("sky?", "green", answer="blue")]


def correct(response, entry):
    return response == entry["answer"]


def length(response, entry):
    return len(response)


async def test_values_are_weighted_and_added_and_the_parts_are_kept():
    rewards = Rewards([(correct, 2.0), Reward(length, weight=-0.1)])
    scores = await rewards.score(ROLLOUTS)
    assert rewards.names == ("correct", "length")
    # 2 * 1 - 0.1 * 3 and 2 * 0 - 0.1 * 5
    assert [score.value for score in scores] == pytest.approx([1.7, -0.5])
    assert [score.parts for score in scores] == [{"correct": 1.0, "length": 3.0}, {"correct": 0.0, "length": 5.0}]
    assert [score.error for score in scores] == [None, None]


class Grader:
    def __call__(self, response, entry):
        return 1.0


class AsyncGrader:
    async def __call__(self, response, entry):
        await asyncio.sleep(0)
        return 2.0


async def plain_coroutine(response, entry):
    return 3.0


@pytest.mark.parametrize(
    ("function", "name", "value"),
    [
        (Grader(), "Grader", 1.0),
        (AsyncGrader(), "AsyncGrader", 2.0),
        (plain_coroutine, "plain_coroutine", 3.0),
        (functools.partial(plain_coroutine), "plain_coroutine", 3.0),
        (lambda response, entry: plain_coroutine(response, entry), "<lambda>", 3.0),
        (Reward(length, name="letters"), "letters", 3.0),
        (Reward(lambda finished: finished.num_turns, whole=True), "<lambda>", 1.0),
    ],
)
async def test_any_callable_is_a_reward(function, name, value):
    (score,) = await Rewards(function).score(ROLLOUTS[:1])
    assert (score.value, score.parts) == (value, {name: value})


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, lambda x: torch.tensor(x).unsqueeze(1)])
async def test_a_batched_function_sees_all_rollouts_at_once(kind):
    def lengths(responses, entries):
        assert [entry["answer"] for entry in entries] == ["red", "blue"]
        return kind([float(len(response)) for response in responses])

    async def turns(finished):
        return kind([10.0 * one.num_turns for one in finished])

    rewards = Rewards([Reward(lengths, batched=True), Reward(turns, batched=True, whole=True)])
    assert [score.value for score in await rewards.score(ROLLOUTS)] == [13.0, 15.0]


async def test_functions_of_one_name_are_numbered():
    rewards = Rewards([lambda r, e: 1, lambda r, e: 2, Reward(length, name="<lambda>")])
    (score,) = await rewards.score(ROLLOUTS[:1])
    assert score.parts == {"<lambda>": 1.0, "<lambda>_2": 2.0, "<lambda>_3": 3.0}


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (float("nan"), "the reward is nan"),
        (float("inf"), "the reward is inf"),
        (None, "the reward is 'None'"),
        ("1", r"the reward is '1' \(str\)"),
        (torch.ones(2), r"shape \(2,\)"),
    ],
)
async def test_what_is_not_one_finite_number_costs_its_own_row_only(bad, complaint):
    def picky(response, entry):
        return bad if response == "green" else 1.0

    fine, failed = await Rewards([picky, length]).score(ROLLOUTS)
    assert (fine.value, fine.error) == (4.0, None)
    assert (failed.value, failed.parts) == (None, {"length": 5.0})
    assert isinstance(failed.error, RewardError)
    for fact in ("reward 'picky'", "prompt 'sky?'", "response 'green'"):
        assert fact in str(failed.error)
    with pytest.raises(RewardError, match=complaint):
        raise failed.error


@pytest.mark.parametrize("error", [ZeroDivisionError("oh"), StopIteration("oh"), SystemExit("oh"), RewardError("oh")])
async def test_a_function_that_raises_is_named_with_its_reason(error):
    def careless(response, entry):
        raise error

    (score,) = await Rewards(careless).score(ROLLOUTS[:1])
    assert score.value is None
    assert "reward 'careless'" in str(score.error)
    assert "oh, on prompt 'red?', response 'red'" in str(score.error)
    assert str(pickle.loads(pickle.dumps(score.error))) == str(score.error)


async def test_a_coroutine_that_raises_is_named_too():
    async def careless(response, entry):
        return 1 / 0

    (score,) = await Rewards(careless).score(ROLLOUTS[:1])
    assert "reward 'careless' raised ZeroDivisionError: division by zero" in str(score.error)


@pytest.mark.parametrize(
    ("returned", "complaint"),
    [
        ([1.0], "returned 1 numbers for 2 rollouts"),
        (torch.zeros(2, 2), "returned 4 numbers for 2 rollouts"),
        (None, r"returned 'None' \(NoneType\) instead of 2 numbers"),
    ],
)
async def test_a_batch_of_another_length_costs_every_row(returned, complaint):
    scores = await Rewards([Reward(lambda r, e: returned, name="odd", batched=True), length]).score(ROLLOUTS)
    assert [score.value for score in scores] == [None, None]
    assert [score.parts for score in scores] == [{"length": 3.0}, {"length": 5.0}]
    for score, question in zip(scores, ("red?", "sky?"), strict=True):
        with pytest.raises(RewardError, match=f"reward 'odd' {complaint}, on prompt .{question[:3]}"):
            raise score.error


async def test_two_failures_are_both_told():
    rewards = Rewards([Reward(lambda r, e: None, name="a"), Reward(lambda r, e: 1 / 0, name="b")])
    (score,) = await rewards.score(ROLLOUTS[:1])
    assert "reward 'a': the reward is 'None'" in str(score.error)
    assert "; reward 'b' raised ZeroDivisionError" in str(score.error)


async def test_a_function_that_hangs_costs_its_row_and_no_more_time_than_allowed():
    released = threading.Event()

    def slow(response, entry):
        if response == "green":
            released.wait(20)
        return 1.0

    async def asleep(response, entry):
        await asyncio.sleep(20 if response == "green" else 0)
        return 1.0

    started = time.monotonic()
    fine, failed = await Rewards([slow, asleep], timeout_s=0.2).score(ROLLOUTS)
    released.set()
    assert time.monotonic() - started < 10
    assert (fine.value, failed.value) == (2.0, None)
    assert "reward 'slow' had not returned after 0.2 s, on prompt 'sky?'" in str(failed.error)
    assert "reward 'asleep' had not returned after 0.2 s" in str(failed.error)


async def test_all_functions_and_rows_run_at_the_same_time():
    together = threading.Barrier(4)

    def first(response, entry):
        return together.wait(20) * 0.0

    def second(response, entry):
        return together.wait(20) * 0.0

    assert [score.value for score in await Rewards([first, second], timeout_s=30).score(ROLLOUTS)] == [0.0, 0.0]


async def test_no_more_calls_run_at_a_time_than_allowed():
    running, most = 0, 0

    async def counting(response, entry):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return 1.0

    scores = await Rewards(counting, max_running=3).score(ROLLOUTS * 10)
    assert [score.value for score in scores] == [1.0] * 20
    assert most == 3


async def test_a_sum_that_overflows_is_an_error():
    (score,) = await Rewards([(lambda r, e: 1e38, 10.0)]).score(ROLLOUTS[:1])
    assert score.value is None
    assert "weighted sum" in str(score.error)


async def test_no_rollouts_have_no_scores():
    assert await Rewards(length).score([]) == []


def test_a_hung_function_does_not_keep_the_program_from_ending():
    program = (
        "import asyncio, threading\n"
        "from rl_vllm.envs import Finished, Rewards\n"
        "hung = lambda response, entry: threading.Event().wait(600)\n"
        "rollout = Finished({'question': 'q'}, (), 'r')\n"
        "print(asyncio.run(Rewards(hung, timeout_s=0.1).score([rollout]))[0].value)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout.strip() == "None"


@pytest.mark.parametrize(
    ("functions", "complaint"),
    [
        ([], "there are no reward functions"),
        (7, "a reward is 7: give a function"),
        ([(length, 1.0, 2.0)], r"a tuple must be \(function, weight\)"),
        ([(length, float("nan"))], "weight of reward 'length' must be a finite number, got nan"),
        ([(length, True)], "must be a finite number, got True"),
    ],
)
def test_settings_that_cannot_be_are_refused(functions, complaint):
    with pytest.raises(ConfigError, match=complaint):
        Rewards(functions)


@pytest.mark.parametrize("settings", [{"timeout_s": 0}, {"max_running": 0}])
def test_limits_out_of_range_are_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Rewards(length, **settings)

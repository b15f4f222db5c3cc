"""Groups come whole, once, as they finish; failures cost what they must and nothing more."""

import asyncio
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as futures_wait
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.objectives.llm.grpo import MCAdvantage

from rl_vllm.collectors import CollectorConfig
from rl_vllm.envs import Reply, Rewards
from rl_vllm.errors import (
    BadInputError,
    ConfigError,
    GenerationError,
    NoProgressError,
    OverSamplingError,
    ServiceNotRunningError,
)
from tests.unit.collectors.conftest import Gates, groups_of, prompts


def test_every_prompt_comes_once_with_all_its_rollouts_and_the_last_batch_is_smaller(collect):
    batches = list(collect(prompts(5)))
    assert [batch.batch_size for batch in batches] == [(4,), (4,), (2,)]
    assert sorted(group for batch in batches for group in groups_of(batch)) == [0, 1, 2, 3, 4]
    for batch in batches:
        assert Counter(batch["group_id"].tolist()) == dict.fromkeys(groups_of(batch), 2)
        assert batch["rollout", "sample"].tolist() == [0, 1] * len(groups_of(batch))


def test_a_row_is_the_fakes_stated_answer_with_its_provenance(collect, service, tokenizer):
    service.serve_version(7)
    (batch,) = collect(prompts(1), groups_per_batch=1)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "q0"}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    for sample in range(2):
        row = batch[sample]
        # stated_response: key = sum(prompt) + 5 * sample, 1 + key % 8 ids from 3 + key % 509 on, the last one EOS.
        key = sum(prompt) + 5 * sample
        response = [3 + (key + t) % (512 - 3) for t in range(1 + key % 8)]
        response[-1] = tokenizer.eos_token_id
        assert row["tokens", "prompt"].tolist() == prompt
        assert row["tokens", "response"].tolist() == response
        assert row["tokens", "full"].tolist() == prompt + response
        assert row["masks", "all_assistant_mask"].tolist() == [False] * len(prompt) + [True] * len(response)
        assert row["policy_version"].tolist() == [-1] * len(prompt) + [7] * len(response)
        assert row["log_probs", "response"].tolist() == [-(1 + token % 7) / 8 for token in response]
        assert row["log_probs", "full"][: len(prompt)].isnan().all()
        text = tokenizer.decode(response[:-1]).strip()
        assert row["next", "reward"].tolist() == [float(len(text))]
        assert row["next", "done"].tolist() == [True]
        assert row["rollout", "staleness"].item() == 0
        assert row["completion", "logprobs_mode"] == "processed_logprobs"


def test_a_slow_group_does_not_hold_up_the_others(collect, service):
    gates = Gates()

    async def before(text):
        if "q0" in text:
            await gates.wait("q0")

    service.before = before
    collector = collect(prompts(5), max_in_flight=3)
    assert groups_of(next(collector)) == [1, 2]
    assert groups_of(next(collector)) == [3, 4]
    gates.open("q0")
    assert groups_of(next(collector)) == [0]
    with pytest.raises(StopIteration):
        next(collector)


def test_no_more_groups_are_begun_than_may_be_in_flight(collect, service):
    gates = Gates()

    async def before(text):
        await gates.wait("all")

    service.before = before
    collector = collect(prompts(40), max_in_flight=5, no_progress_s=0.3)
    with pytest.raises(NoProgressError):
        next(collector)
    assert service.most_running == 5
    assert collector.stats.groups_begun == 5


def test_a_rollout_whose_reward_failed_is_made_again_and_its_siblings_are_kept(collect):
    calls = Counter()

    def reward(response, entry):
        calls[entry["question"]] += 1
        if entry["question"] == "q1" and calls["q1"] == 1:
            return float("nan")
        return 1.0

    collector = collect(prompts(2), reward)
    (batch,) = collector
    assert sorted(groups_of(batch)) == [0, 1]
    # Two rollouts, and one of them a second time.
    assert calls == {"q0": 2, "q1": 3}
    assert collector.stats.rollouts_retried == 1
    assert sorted(batch["rollout", "attempt"].tolist()) == [0, 0, 0, 1]
    assert batch["next", "reward"].tolist() == [[1.0]] * 4
    assert collector.stats.failures == {"RewardError": 1}


@pytest.mark.parametrize("broken", [lambda r, e: 1 / 0, lambda r, e: float("inf"), lambda r, e: None])
def test_a_group_is_dropped_whole_when_a_rollout_keeps_failing_and_is_never_a_zero(collect, broken):
    def reward(response, entry):
        return broken(response, entry) if entry["question"] == "q1" else 1.0

    collector = collect(prompts(4), reward, max_retries=1)
    batches = list(collector)
    assert sorted(group for batch in batches for group in groups_of(batch)) == [0, 2, 3]
    assert all(batch["next", "reward"].eq(1.0).all() for batch in batches)
    assert collector.stats.groups_failed == 1


def test_a_reward_that_hangs_fails_its_rollout(collect):
    def reward(response, entry):
        if entry["question"] == "q0":
            time.sleep(3.0)
        return 1.0

    collector = collect(prompts(3), Rewards(reward, timeout_s=0.1), max_retries=0)
    assert sorted(group for batch in collector for group in groups_of(batch)) == [1, 2]


def test_a_policy_that_always_fails_raises_within_the_limit_with_the_reason(collect, service):
    async def before(text):
        raise GenerationError(((0, "the engine said no"),))

    service.before = before
    begun = time.monotonic()
    with pytest.raises(NoProgressError, match="the engine said no"):
        next(collect(prompts(1000), no_progress_s=0.5))
    assert time.monotonic() - begun < 5.0


def test_prompts_are_not_burned_while_everything_fails(collect, service):
    async def before(text):
        raise GenerationError(((0, "no"),))

    service.before = before
    collector = collect(prompts(1000), no_progress_s=0.5, max_in_flight=2, max_retries=0)
    with pytest.raises(NoProgressError):
        next(collector)
    assert collector.stats.groups_begun < 20


def test_prompts_that_all_fail_are_not_taken_for_an_end(collect):
    with pytest.raises(NoProgressError, match="ZeroDivisionError"):
        list(collect(prompts(2), lambda r, e: 1 / 0, max_retries=0))


def test_a_service_that_is_gone_ends_the_collector_at_once(collect, service):
    async def before(text):
        raise ServiceNotRunningError("shut down", "agenerate_batch()")

    service.before = before
    with pytest.raises(ServiceNotRunningError):
        next(collect(prompts(10), no_progress_s=60.0))


def test_a_prompt_that_fills_the_context_is_dropped_without_a_second_attempt(collect):
    collector = collect(["short", "long " * 600, "also short"], groups_per_batch=1)
    assert sorted(group for batch in collector for group in groups_of(batch)) == [0, 2]
    assert collector.stats.rollouts_retried == 0
    assert collector.stats.failures == {"BadInputError": 1}


def test_a_bad_row_of_the_data_is_named(collect):
    def rows():
        yield "fine"
        yield {"wrong": 1}

    with pytest.raises(BadInputError, match="row 1"):
        list(collect(rows, groups_per_batch=1))


def test_equal_rewards_are_rejected_up_to_a_cap_with_the_counts(collect):
    collector = collect(
        prompts(100), lambda r, e: 1.0, require_different_rewards=True, max_oversampling=3.0, groups_per_batch=4
    )
    with pytest.raises(OverSamplingError, match="9 with equal rewards"):
        next(collector)
    # 3 times 4 groups, less the batch itself, may be rejected; one more is too many.
    assert collector.stats.groups_rejected == 9


def test_groups_that_can_be_told_apart_take_the_place_of_those_that_cannot(collect):
    def reward(response, entry):
        return float(len(response)) if int(entry["question"][1:]) % 2 else 1.0

    collector = collect(prompts(12), reward, require_different_rewards=True)
    batches = list(collector)
    found = sorted(group for batch in batches for group in groups_of(batch))
    # Answers of one length make a group of an odd prompt equal too.
    assert set(found) <= {1, 3, 5, 7, 9, 11}
    for batch in batches:
        for group in groups_of(batch):
            rewards = batch["next", "reward"].reshape(-1)[batch["group_id"] == group]
            assert rewards.unique().numel() > 1
    assert collector.stats.groups_rejected == 12 - len(found)


def test_postproc_changes_groups_and_rejects_them(collect):
    def postproc(rows):
        if rows["group_id"][0] == 1:
            return None
        rows["advantage"] = torch.full((len(rows), 1), float(rows["group_id"][0]))
        return rows

    collector = collect(prompts(4), postproc=postproc, groups_per_batch=3)
    (batch,) = collector
    assert sorted(groups_of(batch)) == [0, 2, 3]
    assert batch["advantage"].reshape(-1).tolist() == [float(group) for group in batch["group_id"].tolist()]
    assert collector.stats.groups_rejected == 1


def test_one_seed_gives_one_run_whatever_is_in_flight(collect):
    def run(seed, **settings):
        rows = [row for batch in collect(prompts(6), seed=seed, **settings) for row in batch.unbind(0)]
        rows.sort(key=lambda row: (row["group_id"].item(), row["rollout", "sample"].item()))
        return [row["tokens", "response"].tolist() for row in rows]

    assert run(3, max_in_flight=2) == run(3, max_in_flight=6)
    assert run(3) != run(4)


def test_samples_of_a_group_differ_when_the_policy_has_a_seed(collect):
    (batch,) = collect(prompts(1), sampling={"max_tokens": 8, "seed": 3}, group_size=4, groups_per_batch=1)
    assert len({tuple(row["tokens", "response"].tolist()) for row in batch.unbind(0)}) == 4


def test_greedy_groups_are_refused(collect):
    with pytest.raises(ConfigError, match="greedy"):
        collect(prompts(1), sampling={"temperature": 0.0})


@pytest.mark.parametrize(
    "settings",
    [
        {"group_size": 0}, {"groups_per_batch": 0}, {"max_in_flight": 1}, {"max_staleness": -1}, {"on_stale": "mend"},
        {"max_retries": -1}, {"max_oversampling": 0.5}, {"total_groups": 0}, {"no_progress_s": 0.0}, {"seed": -1},
        {"group_size": 1, "require_different_rewards": True},
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(settings):
    with pytest.raises(ConfigError):
        CollectorConfig(**settings)


def test_total_groups_end_the_iteration(collect):
    batches = list(collect(prompts(100), total_groups=5))
    assert [len(groups_of(batch)) for batch in batches] == [2, 2, 1]


def test_a_replay_buffer_gets_whole_groups_and_its_advantages_are_right(collect):
    buffer = ReplayBuffer(storage=LazyStackStorage(100))
    buffer.append_transform(MCAdvantage(grpo_size=2, prompt_key="group_id"))
    collector = collect(prompts(6), replay_buffer=buffer)
    assert [next(collector) for _ in range(3)] == [None] * 3
    with pytest.raises(StopIteration):
        next(collector)
    rows = buffer[:]
    assert len(rows) == 12
    for group in range(6):
        mine = [row for row in rows.unbind(0) if row["group_id"].item() == group]
        rewards = torch.tensor([row["next", "reward"].item() for row in mine])
        expected = (rewards - rewards.mean()) / rewards.std().clamp(min=1e-6)
        found = torch.tensor([row["advantage"].reshape(-1)[0].item() for row in mine])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_start_fills_the_buffer_without_being_asked(collect):
    buffer = ReplayBuffer(storage=LazyStackStorage(100))
    collector = collect(prompts(20), replay_buffer=buffer, max_in_flight=2)
    collector.start()
    deadline = time.monotonic() + 20
    while len(buffer) < 40:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert Counter(row["group_id"].item() for row in buffer[:].unbind(0)) == dict.fromkeys(range(20), 2)


def test_start_needs_a_buffer_and_comes_first(collect):
    with pytest.raises(ConfigError, match="replay_buffer"):
        collect(prompts(2)).start()
    collector = collect(prompts(2), replay_buffer=ReplayBuffer(storage=LazyStackStorage(100)))
    next(collector)
    with pytest.raises(ConfigError, match="begun"):
        collector.start()


def test_a_buffer_that_raises_ends_the_collector_with_its_error(collect):
    class Full(ReplayBuffer):
        def extend(self, *_args, **_kwargs):
            raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="the disk is full"):
        next(collect(prompts(4), replay_buffer=Full(storage=LazyStackStorage(10))))


class Guess:
    """Says "more" until the model has answered three times; counts what is made and closed."""

    made = 0
    closed = 0
    fails = 0

    def __init__(self, entry):
        type(self).made += 1
        self._turns = 0

    def begin(self, messages):
        return messages

    async def reply(self, answer, messages):
        self._turns += 1
        if Guess.fails and self._turns == 2:
            Guess.fails -= 1
            raise ConnectionError("the game is gone")
        return Reply(({"role": "user", "content": "more"},), reward=0.25, done=self._turns == 3)

    def close(self):
        type(self).closed += 1


@pytest.fixture
def guess():
    Guess.made = Guess.closed = Guess.fails = 0
    return Guess


def test_turns_are_one_row_with_the_rewards_of_turns_and_outcome(collect, guess):
    (batch,) = collect(prompts(2), lambda r, e: 10.0, interaction=guess)
    assert batch["next", "reward"].reshape(-1).tolist() == [10.75] * 4
    assert batch["rollout", "num_turns"].tolist() == [3] * 4
    assert batch["rollout", "num_segments"].tolist() == [1] * 4
    for row in batch.unbind(0):
        sampled = row["masks", "all_assistant_mask"]
        # Three answers, each a run of sampled tokens.
        starts = sampled & ~torch.cat([torch.zeros(1, dtype=torch.bool), sampled[:-1]])
        assert starts.sum() == 3
        assert torch.equal(row["policy_version"] >= 0, sampled)
        assert torch.equal(row["log_probs", "full"].isfinite(), sampled)
    assert guess.made == guess.closed == 4


def test_an_interaction_that_fails_is_closed_and_a_fresh_one_is_made(collect, guess):
    guess.fails = 2
    collector = collect(prompts(2), lambda r, e: 0.0, interaction=guess)
    (batch,) = collector
    assert len(batch) == 4
    assert guess.made == guess.closed == 6
    assert collector.stats.failures == {"ConnectionError": 2}


def test_shutdown_aborts_what_is_in_flight_and_ends_the_iteration(collect, service):
    gates = Gates()

    async def before(text):
        if "q0" not in text and "q1" not in text:
            await gates.wait("never")

    service.before = before
    collector = collect(prompts(10))
    next(collector)
    collector.shutdown()
    collector.shutdown()
    assert service.num_running == 0
    with pytest.raises(StopIteration):
        next(collector)


def test_a_shutdown_ends_the_wait_of_another_thread(collect, service):
    gates = Gates()

    async def before(text):
        await gates.wait("never")

    service.before = before
    collector = collect(prompts(4), no_progress_s=60.0)
    ended = []
    waiting = threading.Thread(target=lambda: ended.append(next(collector, "over")))
    waiting.start()
    while service.num_running < 4:
        time.sleep(0.01)
    collector.shutdown()
    waiting.join(10)
    assert ended == ["over"]
    assert service.num_running == 0


@pytest.mark.parametrize("with_buffer", [True, False])
def test_nothing_runs_on_when_the_total_is_reached(collect, service, with_buffer):
    gates = Gates()

    async def before(text):
        if not any(f"q{number}<" in text for number in range(3)):
            await gates.wait("never")

    service.before = before
    settings = {"replay_buffer": ReplayBuffer(storage=LazyStackStorage(100))} if with_buffer else {}
    collector = collect(prompts(50), total_groups=3, groups_per_batch=3, max_in_flight=8, **settings)
    assert len(list(collector)) == 1
    assert service.num_running == 0
    assert collector.stats.groups_delivered == 3


def test_a_slow_source_holds_up_neither_the_state_nor_what_is_finished(collect):
    release = threading.Event()

    def rows():
        yield "q0"
        yield "q1"
        release.wait(30)
        yield "q2"

    collector = collect(rows, groups_per_batch=1)
    assert groups_of(next(collector)) == [0]
    assert groups_of(next(collector)) == [1]
    assert collector.state_dict()["ledger"] == {"next_position": 2, "open": []}
    release.set()
    assert groups_of(next(collector)) == [2]


def test_an_error_of_the_buffer_is_not_forgotten_when_the_prompts_end(collect, service):
    gates = Gates()

    async def before(text):
        if "q3" in text:
            await gates.wait("q3")

    class Full(ReplayBuffer):
        def extend(self, *_args, **_kwargs):
            raise RuntimeError("the disk is full")

    service.before = before
    collector = collect(prompts(4), replay_buffer=Full(storage=LazyStackStorage(10)), max_in_flight=8)
    collector.start()
    writing, pumping = collector._running
    # What the writer met ends the pump too, also while a group is in flight.
    assert not futures_wait([writing, pumping], timeout=20).not_done
    with pytest.raises(RuntimeError, match="the disk is full"):
        next(collector)


def test_iterating_after_start_does_not_let_more_groups_begin(collect, service):
    gates = Gates()

    async def before(text):
        if "q0" not in text and "q1" not in text:
            await gates.wait("never")

    service.before = before
    buffer = ReplayBuffer(storage=LazyStackStorage(100))
    collector = collect(prompts(40), replay_buffer=buffer, max_in_flight=3, no_progress_s=0.5)
    collector.start()
    assert next(collector) is None
    with pytest.raises(NoProgressError):
        next(collector)
    # Two are in the buffer, and three run.
    assert collector.stats.groups_begun == 5


def test_shutdown_ends_a_step_that_waits(collect, service):
    gates = Gates()

    async def before(text):
        await gates.wait("never")

    service.before = before
    collector = collect(prompts(10), no_progress_s=60.0)
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(list, collector)
        while not service.num_running:
            time.sleep(0.01)
        collector.shutdown()
        assert step.result(5) == []


def test_threads_that_iterate_together_get_every_group_once(collect):
    collector = collect(prompts(24), postproc=lambda rows: time.sleep(0.01) or rows)
    with ThreadPoolExecutor(3) as pool:
        parts = list(pool.map(lambda _: list(collector), range(3)))
    assert sorted(group for batches in parts for batch in batches for group in groups_of(batch)) == list(range(24))


def test_rejected_groups_leave_their_slots_when_too_many_were_rejected(collect):
    rejects = True
    collector = collect(
        prompts(100), postproc=lambda rows: None if rejects else rows, max_oversampling=1.0, max_in_flight=2,
        no_progress_s=2.0,
    )  # fmt: skip
    for _ in range(5):
        with pytest.raises(OverSamplingError, match="1 rejected by postproc"):
            next(collector)
    rejects = False
    assert len(groups_of(next(collector))) == 2


@pytest.mark.parametrize("returned", [{"reward": 1.0}, TensorDict({}), "rows"])
def test_a_postproc_that_returns_no_rows_is_named_and_no_group_is_lost(collect, returned):
    collector = collect(prompts(2), postproc=lambda rows: returned)
    with pytest.raises(BadInputError, match="postproc"):
        next(collector)
    assert [position for position, _ in collector.state_dict()["ledger"]["open"]] == [0, 1]


@pytest.mark.parametrize("buffered", [False, True])
def test_a_stop_iteration_of_postproc_is_not_taken_for_the_end(collect, buffered):
    buffer = {"replay_buffer": ReplayBuffer(storage=LazyStackStorage(100))} if buffered else {}
    collector = collect(prompts(4), postproc=lambda rows: next(iter([])), no_progress_s=5.0, **buffer)
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(collector)


def test_a_service_that_returns_too_few_samples_says_so(collect, service, monkeypatch):
    whole = type(service).agenerate_batch

    async def fewer(self, prompts, sampling, **options):
        return await whole(self, prompts, replace(sampling, n=1), **options)

    monkeypatch.setattr(type(service), "agenerate_batch", fewer)
    with pytest.raises(NoProgressError, match="1 of 2 samples"):
        list(collect(prompts(2), max_retries=0))


def test_a_turns_reward_that_is_not_finite_fails_its_rollout(collect):
    class Nan:
        def begin(self, messages):
            return messages

        def reply(self, answer, messages):
            return Reply((), reward=float("nan"), done=True)

        def close(self):
            pass

    with pytest.raises(NoProgressError):
        list(collect(prompts(2), interaction=lambda entry: Nan(), max_retries=0))


@pytest.mark.parametrize("weight", [1.0, 1e39])
def test_a_reward_that_float32_cannot_hold_fails_its_rollout(collect, weight):
    # 3.4e38 is the largest.
    value = 1e39 / weight
    with pytest.raises(NoProgressError, match="RewardError"):
        list(collect(prompts(2), Rewards([(lambda r, e: value, weight)]), max_retries=0))


@pytest.mark.parametrize("end", [SystemExit(3), asyncio.CancelledError()])
def test_an_interaction_that_exits_or_cancels_itself_costs_its_group_only(collect, end):
    class Ends:
        def __init__(self, entry):
            self.is_bad = entry["question"] == "q0"

        def begin(self, messages):
            return messages

        def reply(self, answer, messages):
            if self.is_bad:
                raise end
            return Reply((), done=True)

        def close(self):
            pass

    collector = collect(prompts(3), interaction=Ends, max_retries=0, no_progress_s=5.0)
    assert sorted(group for batch in collector for group in groups_of(batch)) == [1, 2]
    assert collector.state_dict()["ledger"]["open"] == []
    assert collector.stats.groups_failed == 1

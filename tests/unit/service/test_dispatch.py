"""The request table: each request is answered exactly once, whatever becomes of its replica."""

import asyncio
from contextlib import aclosing

import numpy as np
import pytest

from rl_vllm.errors import ConfigError, EngineDiedError, NoReplicaServesError
from rl_vllm.service.dispatch import Dispatcher
from rl_vllm.service.replicas import ReplicaSet
from rl_vllm.testing import FakeEngine, FakeEngineScript, FakeScript, Gate
from rl_vllm.types import CompletionBatch, ReplicaState, SamplingConfig

from .conftest import answering, engines, prompts

FOUR = prompts([5], [6], [7], [8])
TWO_TOKENS = SamplingConfig(max_tokens=2, ignore_eos=True)


class Service:
    """The dispatcher over some engines, without a loop of its own."""

    def __init__(self, *fakes: FakeEngine):
        self.replicas = ReplicaSet(list(fakes))
        self.dispatcher = Dispatcher(self.replicas)

    async def generate(self, batch, rows=None, sampling=TWO_TOKENS) -> CompletionBatch:
        rows = range(len(batch)) if rows is None else rows
        stream = self.dispatcher.stream(batch, list(rows), [sampling] * len(rows))
        async with aclosing(stream):
            return CompletionBatch.concatenate([chunk async for chunk in stream])

    def start(self, *args, **kwargs) -> "asyncio.Task[CompletionBatch]":
        return asyncio.create_task(self.generate(*args, **kwargs))

    @property
    def counters(self) -> list[tuple[int, int]]:
        return [(replica.outstanding_requests, replica.outstanding_tokens) for replica in self.replicas.all]

    @property
    def states(self) -> list[ReplicaState]:
        return [replica.state for replica in self.replicas.all]


async def held(gate: Gate, count: int) -> None:
    await asyncio.to_thread(gate.wait_until_held, count)


def sent(fake: FakeEngine) -> list[list[int]]:
    """First tokens of the prompts of each batch that an engine was given."""
    return [[int(batch.prompts.row(row)[0]) for row in range(len(batch))] for batch in fake.batches]


def assert_answers(batch: CompletionBatch, rows: list[int]) -> None:
    """The stated answer to each row, once: token t of prompt [p] is 3 + p + t."""
    assert sorted(batch.numbers_N.tolist()) == rows
    assert batch.failures == ()
    for index, row in enumerate(batch.numbers_N.tolist()):
        first = 3 + int(FOUR.row(row)[0])
        assert batch.tokens(index).tolist() == [first, first + 1]


async def test_every_row_is_answered_once_and_the_counters_return_to_zero():
    one, two = engines(2)
    service = Service(one, two)
    assert_answers(await service.generate(FOUR), [0, 1, 2, 3])
    assert sent(one) == [[5, 7]]
    assert sent(two) == [[6, 8]]
    assert service.counters == [(0, 0), (0, 0)]


async def test_only_the_rows_asked_for_are_sent():
    (one,) = engines(1)
    assert_answers(await Service(one).generate(FOUR, rows=[1, 3]), [1, 3])
    assert sent(one) == [[6, 8]]


async def test_an_empty_batch_is_answered_without_asking_an_engine():
    (one,) = engines(1)
    assert len(await Service(one).generate(prompts())) == 0
    assert one.batches == []


async def test_answers_arrive_as_they_finish():
    gate = Gate()
    (one,) = engines(1, gate=lambda request: gate if request.prompt_T[0] == 5 else None)
    stream = Service(one).dispatcher.stream(FOUR, [0, 1], [TWO_TOKENS] * 2)
    async with aclosing(stream):
        assert (await anext(stream)).numbers_N.tolist() == [1]
        gate.open()
        assert (await anext(stream)).numbers_N.tolist() == [0]


async def test_counters_hold_what_outstanding_requests_may_cost():
    gate = Gate()
    one, two = engines(2, gate=lambda _: gate)
    service = Service(one, two)
    # Prompts of 1 and 3 tokens, two samples of at most 10: 21 and 23.
    work = service.start(prompts([5], [6, 6, 6]), sampling=SamplingConfig(n=2, max_tokens=10))
    await held(gate, 2)
    assert service.counters == [(1, 21), (1, 23)]
    gate.open()
    await work
    assert service.counters == [(0, 0), (0, 0)]


async def test_a_replica_with_outstanding_work_is_passed_over():
    gate = Gate()
    busy, idle = FakeEngine(0, script=FakeEngineScript(gate=lambda _: gate)), FakeEngine(1)
    service = Service(busy, idle)
    long = service.start(prompts([5]), sampling=SamplingConfig(max_tokens=50))
    await held(gate, 1)
    for _ in range(6):
        await service.generate(prompts([6]))
    assert sent(busy) == [[5]]
    assert sent(idle) == [[6]] * 6
    gate.open()
    await long


async def test_numbers_are_never_used_twice():
    one, two = engines(2)
    service = Service(one, two)
    await asyncio.gather(*(service.generate(FOUR) for _ in range(5)))
    numbers = [number for fake in (one, two) for batch in fake.batches for number in batch.numbers_B.tolist()]
    assert len(numbers) == 20
    assert len(set(numbers)) == 20


async def test_batches_at_the_same_time_keep_their_answers_apart():
    service = Service(*engines(2))
    batches = [prompts([5 + i], [15 + i]) for i in range(8)]
    results = await asyncio.gather(*(service.generate(batch) for batch in batches))
    for i, result in enumerate(results):
        ordered = result.sorted_rows()
        assert [int(ordered.tokens(row)[0]) for row in (0, 1)] == [8 + i, 18 + i]


async def test_a_request_that_fails_is_alone_and_named_by_its_row():
    # Rows 1 and 3 are the first two requests, numbered 0 and 1.
    one = FakeEngine(script=answering(failures={1: "the engine refused it"}))
    service = Service(one)
    batch = await service.generate(FOUR, rows=[1, 3])
    assert batch.numbers_N.tolist() == [1]
    assert [(failure.number, failure.reason) for failure in batch.failures] == [(3, "the engine refused it")]
    assert service.counters == [(0, 0)]


async def test_an_answer_that_comes_twice_counts_once():
    service = Service(*engines(2, repeats=True))
    assert_answers(await service.generate(FOUR), [0, 1, 2, 3])
    assert service.counters == [(0, 0), (0, 0)]


async def test_a_request_the_engine_never_answers_becomes_a_failure():
    service = Service(FakeEngine(script=FakeEngineScript(lost=frozenset({2}))))
    batch = await service.generate(FOUR)
    assert sorted(batch.numbers_N.tolist()) == [0, 1, 3]
    assert [(failure.number, failure.reason) for failure in batch.failures] == [
        (2, "the engine ended without an answer")
    ]
    assert service.counters == [(0, 0)]


async def test_unfinished_requests_of_a_replica_that_dies_move_to_the_others():
    dying, well = FakeEngine(0, script=FakeEngineScript(dies_after=1)), FakeEngine(1)
    service = Service(dying, well)
    assert_answers(await service.generate(FOUR), [0, 1, 2, 3])
    assert sent(dying) == [[5, 7]]
    # Its first answer was kept; only the second request moved.
    assert sent(well) == [[6, 8], [7]]
    assert service.states == [ReplicaState.DEAD, ReplicaState.SERVING]
    assert service.counters == [(0, 0), (0, 0)]


async def test_a_moved_request_keeps_its_settings_and_gets_a_new_number():
    dying, well = FakeEngine(0, script=FakeEngineScript(dies_after=0)), FakeEngine(1)
    service = Service(dying, well)
    settings = [SamplingConfig(max_tokens=2 + row, seed=row, ignore_eos=True) for row in range(4)]
    stream = service.dispatcher.stream(FOUR, [0, 1, 2, 3], settings)
    batch = CompletionBatch.concatenate([chunk async for chunk in stream]).sorted_rows()
    assert batch.lengths_N.tolist() == [2, 3, 4, 5]
    moved = well.batches[-1]
    assert moved.sampling_B == (settings[0], settings[2])
    assert set(moved.numbers_B.tolist()).isdisjoint(range(4))


async def test_a_dead_replica_is_given_nothing_more():
    dying, well = FakeEngine(0, script=FakeEngineScript(dies_after=0)), FakeEngine(1)
    service = Service(dying, well)
    for _ in range(3):
        assert_answers(await service.generate(FOUR), [0, 1, 2, 3])
    assert len(dying.batches) == 1


async def test_a_replica_killed_while_it_works_loses_nothing():
    gate = Gate()
    dying, well = FakeEngine(0, script=FakeEngineScript(gate=lambda _: gate)), FakeEngine(1)
    service = Service(dying, well)
    work = service.start(FOUR)
    await held(gate, 2)
    dying.kill("out of memory")
    assert_answers(await work, [0, 1, 2, 3])
    assert service.counters == [(0, 0), (0, 0)]


async def test_requests_of_every_batch_move_when_a_replica_dies():
    gate = Gate()
    dying, well = FakeEngine(0, script=FakeEngineScript(gate=lambda _: gate)), FakeEngine(1)
    service = Service(dying, well)
    batches = [service.start(FOUR) for _ in range(3)]
    await held(gate, 6)
    dying.kill("out of memory")
    for work in batches:
        assert_answers(await work, [0, 1, 2, 3])
    assert service.counters == [(0, 0), (0, 0)]


async def test_a_replica_that_goes_stale_is_told_at_once_to_stop_working_on_what_has_moved():
    gate = Gate()
    well, stale = (
        FakeEngine(0, script=FakeEngineScript(gate=lambda _: gate)),
        FakeEngine(1, script=FakeEngineScript(gate=lambda _: Gate())),
    )
    service = Service(well, stale)
    work = service.start(FOUR)
    await held(gate, 2)
    service.replicas.set_state(service.replicas.all[1], ReplicaState.STALE, "a commit failed")
    # Its two requests wait at the other replica now, and the batch is not done.
    await held(gate, 4)
    assert stale.aborted == [1, 3]
    assert (await stale.metrics()).num_running == 0
    assert [requests for requests, _ in service.counters] == [4, 0]
    assert not work.done()
    gate.open()
    assert_answers(await work, [0, 1, 2, 3])
    assert service.counters == [(0, 0), (0, 0)]


async def test_replicas_may_die_one_after_the_other():
    service = Service(*engines(3, dies_after=1), FakeEngine(3))
    rows = prompts(*([row] for row in range(5, 29)))
    batch = (await service.generate(rows)).sorted_rows()
    assert batch.numbers_N.tolist() == list(range(24))
    assert [int(batch.tokens(row)[0]) for row in range(24)] == [3 + row for row in range(5, 29)]
    assert service.states == [ReplicaState.DEAD] * 3 + [ReplicaState.SERVING]


async def test_when_no_replica_is_left_the_error_says_what_became_of_each():
    service = Service(*engines(2, dies_after=1))
    with pytest.raises(NoReplicaServesError, match=r"replica 0 is dead \(.+\), replica 1 is dead \(.+\); launch a new"):
        await service.generate(FOUR)
    assert service.counters == [(0, 0), (0, 0)]
    with pytest.raises(EngineDiedError):
        await service.generate(FOUR)


async def test_an_error_that_is_no_death_reaches_the_caller_and_leaves_the_replica_serving():
    def respond(request):
        return [9]

    class Refusing(FakeEngine):
        async def stream(self, batch):
            raise ConfigError("no such sampling field")
            yield

    service = Service(Refusing(0), FakeEngine(1, script=answering(respond=respond)))
    with pytest.raises(ConfigError, match="no such sampling field"):
        await service.generate(FOUR)
    assert service.states == [ReplicaState.SERVING] * 2
    assert service.counters == [(0, 0), (0, 0)]


async def test_cancelling_aborts_what_is_pending_in_the_engines():
    gate = Gate()
    one, two = engines(2, gate=lambda request: gate if request.prompt_T[0] > 6 else None)
    service = Service(one, two)
    work = service.start(FOUR)
    await held(gate, 2)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert (one.aborted, two.aborted) == ([2], [3])
    assert service.counters == [(0, 0), (0, 0)]


async def test_a_reader_that_stops_early_aborts_the_rest():
    gate = Gate()
    (one,) = engines(1, gate=lambda request: gate if request.prompt_T[0] > 5 else None)
    service = Service(one)
    async with aclosing(service.dispatcher.stream(FOUR, [0, 1], [TWO_TOKENS] * 2)) as stream:
        assert (await anext(stream)).numbers_N.tolist() == [0]
    assert one.aborted == [1]
    assert service.counters == [(0, 0)]


async def test_samples_alternatives_and_versions_pass_unchanged():
    fake = FakeEngine(script=FakeEngineScript(answers=FakeScript(next_version=(1, 7))))
    batch = await Service(fake).generate(
        prompts([5]), sampling=SamplingConfig(n=2, max_tokens=2, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    )
    assert batch.samples_N.tolist() == [0, 1]
    # Sample 0: ids 8 and 9; sample 1 starts 5 later. Logprobs are -(1 + id % 7) / 8.
    assert batch.tokens_T.tolist() == [8, 9, 13, 14]
    assert batch.logprobs_T.tolist() == [-0.25, -0.375, -0.875, -0.125]
    assert batch.versions_T.tolist() == [0, 7, 0, 7]
    assert batch.top_logprobs == (({8: -0.25}, {9: -0.375}), ({13: -0.875}, {14: -0.125}))
    assert [np.isnan(row).tolist() for row in batch.prompt_logprobs] == [[True], [True]]

"""The request table: each request is answered exactly once, whatever becomes of its replica."""

import asyncio
import gc
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest

from rl_vllm.errors import (
    ConfigError,
    EngineDiedError,
    NoReplicaServesError,
    ReplicaIndexError,
    UnsupportedByEngineError,
)
from rl_vllm.service.dispatch import Dispatcher
from rl_vllm.service.observe.counters import ServiceCounters
from rl_vllm.service.replicas import ReplicaSet
from rl_vllm.service.router import Router
from rl_vllm.testing import FakeEngine, FakeEngineScript, FakeScript, Gate
from rl_vllm.testing.answers import FAKE_MODEL
from rl_vllm.types import (
    CompletionBatch,
    EmbeddingBatch,
    EngineMetrics,
    FinishReason,
    LoRAAdapter,
    PoolingConfig,
    ReplicaState,
    SamplingConfig,
)

from .conftest import answering, engines, prompts, service_config
from .fleet import until

FOUR = prompts([5], [6], [7], [8])
TWO_TOKENS = SamplingConfig(max_tokens=2, ignore_eos=True)


class Service:
    """The dispatcher over some engines, without a loop of its own."""

    def __init__(self, *fakes: FakeEngine, **settings: object):
        self.replicas = ReplicaSet(list(fakes))
        self.counters = ServiceCounters()
        self.config = service_config(len(fakes), **settings)
        router = Router(self.config.routing, block_size=16)
        self.dispatcher = Dispatcher(self.replicas, router, self.counters, self.config)

    async def generate(self, batch, rows=None, sampling=TWO_TOKENS, only=None) -> CompletionBatch:
        rows = range(len(batch)) if rows is None else rows
        stream = self.dispatcher.stream(batch, list(rows), [sampling] * len(rows), only=only)
        async with aclosing(stream):
            return CompletionBatch.concatenate([chunk async for chunk in stream])

    async def pieces(self, batch, rows=None, sampling=TWO_TOKENS) -> CompletionBatch:
        rows = range(len(batch)) if rows is None else rows
        async with aclosing(self.dispatcher.stream_pieces(batch, list(rows), [sampling] * len(rows))) as stream:
            return CompletionBatch.concatenate([chunk async for chunk in stream])

    async def embed(self, batch, rows=None) -> EmbeddingBatch:
        rows = range(len(batch)) if rows is None else rows
        async with aclosing(self.dispatcher.embed(batch, list(rows), PoolingConfig())) as stream:
            return EmbeddingBatch.concatenate([chunk async for chunk in stream]).sorted_rows()

    def start(self, *args, **kwargs) -> "asyncio.Task[CompletionBatch]":
        return asyncio.create_task(self.generate(*args, **kwargs))

    @property
    def outstanding(self) -> list[tuple[int, int]]:
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
    assert service.outstanding == [(0, 0), (0, 0)]


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
    assert service.outstanding == [(1, 21), (1, 23)]
    gate.open()
    await work
    assert service.outstanding == [(0, 0), (0, 0)]


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
    assert service.outstanding == [(0, 0)]


async def test_an_answer_that_comes_twice_counts_once():
    service = Service(*engines(2, repeats=True))
    assert_answers(await service.generate(FOUR), [0, 1, 2, 3])
    assert service.outstanding == [(0, 0), (0, 0)]


async def test_a_request_the_engine_never_answers_becomes_a_failure():
    service = Service(FakeEngine(script=FakeEngineScript(lost=frozenset({2}))))
    batch = await service.generate(FOUR)
    assert sorted(batch.numbers_N.tolist()) == [0, 1, 3]
    assert [(failure.number, failure.reason) for failure in batch.failures] == [
        (2, "the engine ended without an answer")
    ]
    assert service.outstanding == [(0, 0)]


async def test_unfinished_requests_of_a_replica_that_dies_move_to_the_others():
    dying, well = FakeEngine(0, script=FakeEngineScript(dies_after=1)), FakeEngine(1)
    service = Service(dying, well)
    assert_answers(await service.generate(FOUR), [0, 1, 2, 3])
    assert sent(dying) == [[5, 7]]
    # Its first answer was kept; only the second request moved.
    assert sent(well) == [[6, 8], [7]]
    assert service.states == [ReplicaState.DEAD, ReplicaState.HEALTHY]
    assert service.outstanding == [(0, 0), (0, 0)]


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
    assert service.outstanding == [(0, 0), (0, 0)]


async def test_requests_of_every_batch_move_when_a_replica_dies():
    gate = Gate()
    dying, well = FakeEngine(0, script=FakeEngineScript(gate=lambda _: gate)), FakeEngine(1)
    service = Service(dying, well)
    batches = [service.start(FOUR) for _ in range(3)]
    await held(gate, 6)
    dying.kill("out of memory")
    for work in batches:
        assert_answers(await work, [0, 1, 2, 3])
    assert service.outstanding == [(0, 0), (0, 0)]


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
    assert [requests for requests, _ in service.outstanding] == [4, 0]
    assert not work.done()
    gate.open()
    assert_answers(await work, [0, 1, 2, 3])
    assert service.outstanding == [(0, 0), (0, 0)]


async def test_replicas_may_die_one_after_the_other():
    service = Service(*engines(3, dies_after=1), FakeEngine(3))
    rows = prompts(*([row] for row in range(5, 29)))
    batch = (await service.generate(rows)).sorted_rows()
    assert batch.numbers_N.tolist() == list(range(24))
    assert [int(batch.tokens(row)[0]) for row in range(24)] == [3 + row for row in range(5, 29)]
    assert service.states == [ReplicaState.DEAD] * 3 + [ReplicaState.HEALTHY]


async def test_when_no_replica_is_left_the_error_says_what_became_of_each():
    service = Service(*engines(2, dies_after=1))
    with pytest.raises(NoReplicaServesError, match=r"replica 0 is dead \(.+\), replica 1 is dead \(.+\); launch a new"):
        await service.generate(FOUR)
    assert service.outstanding == [(0, 0), (0, 0)]
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
    assert service.states == [ReplicaState.HEALTHY] * 2
    assert service.outstanding == [(0, 0), (0, 0)]


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
    assert service.outstanding == [(0, 0), (0, 0)]
    assert service.dispatcher.admission.outstanding == 0
    assert (service.counters.completed, service.counters.cancelled) == (2, 2)


async def test_a_reader_that_stops_early_aborts_the_rest():
    gate = Gate()
    (one,) = engines(1, gate=lambda request: gate if request.prompt_T[0] > 5 else None)
    service = Service(one)
    async with aclosing(service.dispatcher.stream(FOUR, [0, 1], [TWO_TOKENS] * 2)) as stream:
        assert (await anext(stream)).numbers_N.tolist() == [0]
    assert one.aborted == [1]
    assert service.outstanding == [(0, 0)]


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


async def test_an_answer_under_an_old_number_is_no_answer_any_more():
    late = asyncio.Event()

    class Late(FakeEngine):
        """Answers a request after it was told to stop: the answer was on its way already."""

        async def stream(self, batch):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                answered = CompletionBatch.concatenate([chunk async for chunk in super().stream(batch)])
                late.set()
                yield answered
                raise

    gate = Gate()
    stale, well = Late(0), FakeEngine(1, script=FakeEngineScript(gate=lambda _: gate))
    service = Service(stale, well)
    work = service.start(FOUR)
    await held(gate, 2)
    service.replicas.set_state(service.replicas.all[0], ReplicaState.STALE, "a commit failed")
    await late.wait()
    await held(gate, 4)
    gate.open()
    assert_answers(await work, [0, 1, 2, 3])
    assert service.outstanding == [(0, 0), (0, 0)]


async def test_sessions_and_adapters_travel_with_their_prompts_also_when_they_move():
    dying, well = FakeEngine(0, script=FakeEngineScript(dies_after=0)), FakeEngine(1)
    for fake in (dying, well):
        fake.adapters["poet"] = LoRAAdapter(name="poet", number=1, path="/poet")
    batch = replace(FOUR, session_ids=("a", "b", "c", None), loras=("poet", None, "poet", None))
    answer = (await Service(dying, well).generate(batch)).sorted_rows()
    # An adapter's name of four letters moves the stated answer by 17 * 4 = 68, which is 7 modulo 61.
    assert [int(answer.tokens(row)[0]) for row in range(4)] == [15, 9, 17, 11]
    sessions = {
        int(sent.prompts.row(i)[0]): sent.prompts.session_ids[i] for sent in well.batches for i in range(len(sent))
    }
    assert sessions == {5: "a", 6: "b", 7: "c", 8: None}


async def test_the_router_forgets_a_replica_that_has_left():
    forgotten = []

    class Remembering(Router):
        def forget(self, index):
            forgotten.append(index)

    service = Service(*engines(2))
    service.dispatcher.router = Remembering(service.config.routing, block_size=16)
    service.replicas.set_state(service.replicas.all[0], ReplicaState.SUSPECT, "slow")
    assert forgotten == []
    service.replicas.set_state(service.replicas.all[0], ReplicaState.DEAD, "gone")
    assert forgotten == [0]


async def test_the_router_sees_loads_and_sampled_kv_usage():
    seen = []

    class Watching(Router):
        def assign(self, prompts, rows, costs_B, snapshot):
            seen.append(snapshot)
            return np.zeros(len(rows), np.int64)

    service = Service(*engines(2))
    service.dispatcher.router = Watching(service.config.routing, block_size=16)
    one, two = service.replicas.all
    one.acquire(70)
    two.metrics = EngineMetrics(num_running=1, num_waiting=0, kv_cache_usage=0.25, generated_tokens=9)
    await service.generate(FOUR)
    (snapshot,) = seen
    assert snapshot.indices_R.tolist() == [0, 1]
    assert (snapshot.requests_R.tolist(), snapshot.tokens_R.tolist()) == ([1, 0], [70, 0])
    assert np.isnan(snapshot.kv_usage_R[0])
    assert snapshot.kv_usage_R[1] == 0.25


# One replica alone


async def test_a_pinned_call_goes_to_its_replica_alone():
    one, two = engines(2)
    assert_answers(await Service(one, two).generate(FOUR, only=1), [0, 1, 2, 3])
    assert (sent(one), sent(two)) == ([], [[5, 6, 7, 8]])


async def test_a_pinned_call_ends_with_its_replica():
    gate = Gate()
    dying, well = FakeEngine(0, script=FakeEngineScript(gate=lambda _: gate)), FakeEngine(1)
    service = Service(dying, well)
    work = service.start(FOUR, only=0)
    await held(gate, 4)
    dying.kill("out of memory")
    with pytest.raises(EngineDiedError, match="out of memory") as raised:
        await work
    assert raised.value.replica == 0
    assert well.batches == []
    assert service.outstanding == [(0, 0), (0, 0)]
    with pytest.raises(EngineDiedError, match=r"it is dead \(out of memory\)"):
        await service.generate(FOUR, only=0)


async def test_a_pinned_call_to_a_replica_that_is_not_there_says_which_are():
    with pytest.raises(ReplicaIndexError, match=r"no replica has the index 2: give one of \[0, 1\]"):
        await Service(*engines(2)).generate(FOUR, only=2)


# Pieces


def text(batch: CompletionBatch) -> dict[tuple[int, int], list[int]]:
    """All tokens of each sample, by row and sample."""
    found: dict[tuple[int, int], list[int]] = {}
    for index, (row, sample) in enumerate(zip(batch.numbers_N.tolist(), batch.samples_N.tolist(), strict=True)):
        found.setdefault((row, sample), []).extend(batch.tokens(index).tolist())
    return found


def ends(batch: CompletionBatch) -> dict[tuple[int, int], list[int]]:
    """How each sample ended: the finish reasons of its pieces that are last ones."""
    found: dict[tuple[int, int], list[int]] = {}
    for row, sample, finish in zip(
        batch.numbers_N.tolist(), batch.samples_N.tolist(), batch.finish_N.tolist(), strict=True
    ):
        if finish != FinishReason.UNFINISHED:
            found.setdefault((row, sample), []).append(finish)
    return found


async def test_pieces_of_every_sample_join_to_the_whole_and_end_once():
    service = Service(*engines(2))
    pieces = await service.pieces(FOUR, sampling=SamplingConfig(n=2, max_tokens=3, ignore_eos=True))
    # A sample is sent alone, so that it can be continued alone: a fake gives both the same answer.
    assert text(pieces) == {(row, sample): [8 + row, 9 + row, 10 + row] for row in range(4) for sample in range(2)}
    assert ends(pieces) == {(row, sample): [FinishReason.LENGTH] for row in range(4) for sample in range(2)}
    assert service.outstanding == [(0, 0), (0, 0)]
    assert (service.counters.requests, service.counters.completed, service.counters.tokens) == (4, 4, 24)


async def test_samples_sent_alone_get_the_seeds_that_the_engine_would_give_them():
    (one,) = engines(1)
    await Service(one).pieces(prompts([5]), sampling=SamplingConfig(n=3, seed=40, max_tokens=2))
    assert [(setting.n, setting.seed) for batch in one.batches for setting in batch.sampling_B] == [
        (1, 40),
        (1, 41),
        (1, 42),
    ]


async def test_a_moved_stream_goes_on_from_what_was_delivered():
    pieces_gate = Gate()
    dying = FakeEngine(0, script=FakeEngineScript(piece_gate=pieces_gate))
    well = FakeEngine(1)
    service = Service(dying, well)
    sampling = SamplingConfig(max_tokens=5, min_tokens=3, ignore_eos=True, seed=11)
    stream = service.dispatcher.stream_pieces(prompts([5]), [0], [sampling])
    async with aclosing(stream):
        first = await anext(stream)
        await held(pieces_gate, 1)
        dying.kill("out of memory")
        rest = CompletionBatch.concatenate([chunk async for chunk in stream])
    # 3 + 5 + 11 * 11 = 129, and 129 - 2 * 61 = 7: the first token is 3 + (5 + 121) % 61 = 7.
    assert first.tokens_T.tolist() == [7]
    (continued,) = well.batches
    assert continued.prompts.row(0).tolist() == [5, 7]
    (setting,) = continued.sampling_B
    assert (setting.max_tokens, setting.min_tokens) == (4, 2)
    # Drawn with other numbers than the beginning was.
    assert setting.seed not in (None, 11)
    assert rest.lengths_N.sum() == 4
    assert ends(rest) == {(0, 0): [FinishReason.LENGTH]}
    assert service.outstanding == [(0, 0), (0, 0)]


async def test_a_stream_whose_last_token_was_delivered_before_the_death_is_ended_and_not_sent_again():
    class DiesBeforeTheEnd(FakeEngine):
        """Delivers every token, and dies instead of saying that it was the last."""

        async def stream_pieces(self, batch):
            async for chunk in super().stream_pieces(batch):
                if chunk.finish_N[0] != FinishReason.UNFINISHED:
                    yield replace(chunk, finish_N=np.array([FinishReason.UNFINISHED], np.int8))
                    raise EngineDiedError(0, "at the last moment")
                yield chunk

    well = FakeEngine(1)
    service = Service(DiesBeforeTheEnd(0), well)
    pieces = await service.pieces(prompts([5]), sampling=SamplingConfig(max_tokens=2, ignore_eos=True))
    assert text(pieces) == {(0, 0): [8, 9]}
    assert ends(pieces) == {(0, 0): [FinishReason.LENGTH]}
    assert well.batches == []


async def test_pieces_lost_and_failed_are_failures_of_their_rows_once():
    # Two samples of each prompt: numbers 0 and 1 are row 0, 2 and 3 row 1.
    fake = FakeEngine(script=FakeEngineScript(answers=FakeScript(failures={0: "refused", 1: "refused"}), lost={3}))
    service = Service(fake)
    pieces = await service.pieces(FOUR, rows=[0, 1, 2], sampling=SamplingConfig(n=2, max_tokens=2, ignore_eos=True))
    assert [(failure.number, failure.reason) for failure in pieces.failures] == [
        (0, "refused"),
        (1, "the engine ended without an answer"),
    ]
    assert text(pieces) == {(1, 0): [9, 10], (2, 0): [10, 11], (2, 1): [10, 11]}
    assert (service.counters.completed, service.counters.failed) == (1, 2)
    assert service.outstanding == [(0, 0)]


# Aborting


async def test_aborting_a_stream_ends_it_with_what_the_engines_had_made():
    gate = Gate()
    one, two = engines(2, gate=lambda request: gate if request.prompt_T[0] > 6 else None)
    service = Service(one, two)
    stream = service.dispatcher.stream(FOUR, [0, 1, 2, 3], [TWO_TOKENS] * 4)
    async with aclosing(stream):
        done = [await anext(stream), await anext(stream)]
        await held(gate, 2)
        await service.dispatcher.abort(stream)
        rest = CompletionBatch.concatenate([chunk async for chunk in stream])
    assert sorted(row for chunk in done for row in chunk.numbers_N.tolist()) == [0, 1]
    assert sorted(rest.numbers_N.tolist()) == [2, 3]
    assert rest.finish_N.tolist() == [FinishReason.ABORT] * 2
    assert sorted(one.aborted + two.aborted) == [2, 3]
    assert service.outstanding == [(0, 0), (0, 0)]


async def test_aborting_reaches_what_was_not_sent_yet():
    gate = Gate()
    (one,) = engines(1, gate=lambda _: gate)
    service = Service(one, max_outstanding_requests=1)
    stream = service.dispatcher.stream(FOUR, [0, 1, 2], [replace(TWO_TOKENS, n=2)] * 3)
    async with aclosing(stream):
        work = asyncio.create_task(anext(stream))
        await held(gate, 1)
        await service.dispatcher.abort(stream)
        chunks = [await work, *[chunk async for chunk in stream]]
    answer = CompletionBatch.concatenate(chunks).sorted_rows()
    assert list(zip(answer.numbers_N.tolist(), answer.samples_N.tolist(), strict=True)) == [
        (row, sample) for row in range(3) for sample in range(2)
    ]
    assert set(answer.finish_N.tolist()) == {FinishReason.ABORT}
    assert len(one.batches) == 1
    assert service.dispatcher.admission.outstanding == 0


async def test_an_aborted_request_is_not_sent_again_when_its_replica_dies():
    gate = Gate()
    dying, well = FakeEngine(0, script=FakeEngineScript(gate=lambda _: gate)), FakeEngine(1)
    service = Service(dying, well)
    stream = service.dispatcher.stream(prompts([5]), [0], [TWO_TOKENS])
    async with aclosing(stream):
        work = asyncio.create_task(anext(stream))
        await held(gate, 1)
        dying.hang()
        aborting = asyncio.create_task(service.dispatcher.abort(stream))
        await asyncio.sleep(0)
        dying.kill("hung")
        await aborting
        assert (await work).finish_N.tolist() == [FinishReason.ABORT]
    assert well.batches == []


# Embeddings


EMBEDS = replace(FAKE_MODEL, tasks=("embed",))


async def test_embeddings_come_once_for_each_row_and_move_when_a_replica_dies():
    class Dying(FakeEngine):
        async def embed(self, request):
            self.kill("out of memory")
            await self.check_health()
            yield

    dying, well = Dying(0, info=EMBEDS), FakeEngine(1, info=EMBEDS)
    service = Service(dying, well)
    batch = await service.embed(prompts([5], [6, 6], [7], [8]), rows=[0, 1, 3])
    assert batch.numbers_N.tolist() == [0, 1, 3]
    # A fake's vector is the number of ids and their sum.
    assert batch.values_ND.tolist() == [[1, 5], [2, 12], [1, 8]]
    assert service.outstanding == [(0, 0), (0, 0)]
    assert service.states == [ReplicaState.DEAD, ReplicaState.HEALTHY]


async def test_a_model_that_does_not_embed_says_so_and_its_replica_is_well():
    service = Service(*engines(1))
    with pytest.raises(UnsupportedByEngineError):
        await service.embed(FOUR)
    assert service.states == [ReplicaState.HEALTHY]
    assert service.outstanding == [(0, 0)]


async def test_memory_does_not_grow_with_finished_requests():
    (one,) = engines(1)
    service = Service(one)
    for _ in range(3):
        await service.generate(FOUR)
    gc.collect()
    assert len(service.dispatcher._calls) == 0
    await until(lambda: not service.dispatcher._ending)

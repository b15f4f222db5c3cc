"""Back-pressure: a bound over all callers, in the order in which they came."""

import asyncio

import pytest

from rl_vllm.config import HealthConfig
from rl_vllm.errors import ServiceOverloadedError
from rl_vllm.service.admission import Admission
from rl_vllm.service.observe.counters import ServiceCounters
from rl_vllm.testing import FakeEngine, FakeEngineScript, Gate
from rl_vllm.types import Overload, SamplingConfig

from .conftest import TWO_TOKENS, engines, first_tokens, prompts
from .fleet import Fleet, until

FOUR = prompts([5], [6], [7], [8])
ANSWERS = [8, 9, 10, 11]


def admission(limit: int | None, policy: Overload = Overload.WAIT) -> Admission:
    return Admission(limit, policy, ServiceCounters())


async def held(gate: Gate, count: int = 1) -> None:
    await asyncio.to_thread(gate.wait_until_held, count, timeout_s=60.0)


async def test_places_are_given_in_the_order_of_asking_and_in_portions():
    places = admission(4)
    assert places.try_acquire(3) == 3
    first = asyncio.create_task(places.acquire(2))
    await asyncio.sleep(0)
    second = asyncio.create_task(places.acquire(3))
    await asyncio.sleep(0)
    # One was free: the first got it, although it wanted two.
    assert (await first, second.done()) == (1, False)
    # Nobody passes those who wait.
    assert places.try_acquire(1) == 0
    places.release(2)
    assert await second == 2
    assert places.outstanding == 4


async def test_a_large_bound_is_not_given_away_one_by_one():
    places = admission(64)
    places.try_acquire(64)
    many = asyncio.create_task(places.acquire(100))
    await asyncio.sleep(0)
    places.release(3)
    await asyncio.sleep(0)
    assert not many.done()
    # Nor to those who came later and want less.
    assert places.try_acquire(1) == 0
    places.release(1)
    # A sixteenth of the bound.
    assert await many == 4


async def test_who_gives_up_waiting_leaves_the_queue_and_takes_nothing():
    places = admission(2)
    places.try_acquire(2)
    first, second = (asyncio.create_task(places.acquire(1)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    places.release(1)
    await asyncio.gather(first, return_exceptions=True)
    assert await second == 1
    assert places.outstanding == 2


async def test_a_place_granted_in_the_moment_of_giving_up_goes_to_the_next():
    places = admission(1)
    places.try_acquire(1)
    first, second = (asyncio.create_task(places.acquire(1)) for _ in range(2))
    await asyncio.sleep(0)
    places.release(1)
    first.cancel()
    results = await asyncio.gather(first, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert await second == 1
    assert places.outstanding == 1


async def test_without_a_bound_there_is_room_for_all():
    assert admission(None).try_acquire(10**9) == 10**9
    assert admission(None, Overload.RAISE).try_acquire(10**9) == 10**9


async def test_refusing_says_what_there_is_and_takes_nothing():
    places = admission(4, Overload.RAISE)
    places.try_acquire(3)
    with pytest.raises(ServiceOverloadedError) as raised:
        places.try_acquire(2)
    assert (raised.value.outstanding, raised.value.limit, raised.value.asked) == (3, 4, 2)
    assert places.outstanding == 3
    assert places.try_acquire(1) == 1


async def test_a_batch_larger_than_the_bound_goes_in_portions_as_answers_come():
    gate = Gate()
    one = FakeEngine(0, script=FakeEngineScript(gate=lambda _: gate))
    async with Fleet(one, max_outstanding_requests=3) as fleet:
        rows = prompts(*([5 + row] for row in range(10)))
        work = asyncio.create_task(fleet.generate(rows))
        await held(gate, 3)
        assert [len(batch) for batch in one.batches] == [3]
        assert fleet.dispatcher.admission.outstanding == 3
        gate.open()
        assert first_tokens((await work).sorted_rows()) == [8 + row for row in range(10)]
        assert max(len(batch) for batch in one.batches) <= 3
        assert sum(len(batch) for batch in one.batches) == 10
        assert fleet.dispatcher.admission.outstanding == 0


async def test_a_second_caller_waits_its_turn_and_is_not_starved_by_a_large_batch():
    order = []
    gate = Gate()

    def gate_of(request):
        order.append(int(request.prompt_T[0]))
        return gate

    async with Fleet(FakeEngine(0, script=FakeEngineScript(gate=gate_of)), max_outstanding_requests=2) as fleet:
        large = asyncio.create_task(fleet.generate(prompts(*([row] for row in range(10, 30)))))
        await held(gate, 2)
        small = asyncio.create_task(fleet.generate(FOUR, rows=[0]))
        await asyncio.sleep(0)
        gate.open()
        assert first_tokens(await small) == [8]
        await large
        # The large one's third and fourth were waiting before it; the rest came behind it.
        assert order.index(5) <= 4


async def test_refused_callers_send_nothing_and_are_counted():
    gate = Gate()
    one = FakeEngine(0, script=FakeEngineScript(gate=lambda _: gate))
    async with Fleet(one, max_outstanding_requests=3, on_overload=Overload.RAISE) as fleet:
        work = asyncio.create_task(fleet.generate(FOUR, rows=[0, 1]))
        await held(gate, 2)
        with pytest.raises(ServiceOverloadedError, match="2 of at most 3 requests are outstanding and 2 more"):
            await fleet.generate(FOUR, rows=[2, 3])
        assert len(one.batches) == 1
        assert (fleet.counters.refused, fleet.counters.requests) == (2, 2)
        gate.open()
        await work
        assert first_tokens((await fleet.generate(FOUR, rows=[2, 3])).sorted_rows()) == [10, 11]


async def test_a_waiting_caller_that_is_cancelled_leaves_room_for_others():
    gate = Gate()
    one = FakeEngine(0, script=FakeEngineScript(gate=lambda _: gate))
    async with Fleet(one, max_outstanding_requests=2) as fleet:
        work = asyncio.create_task(fleet.generate(FOUR, rows=[0, 1]))
        await held(gate, 2)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(fleet.generate(FOUR, rows=[2]), 0.01)
        gate.open()
        await work
        assert first_tokens(await fleet.generate(FOUR, rows=[3])) == [11]
        assert fleet.dispatcher.admission.outstanding == 0


async def test_places_come_back_after_failures_and_deaths():
    async with Fleet(*engines(2, dies_after=1), max_outstanding_requests=4) as fleet:
        assert first_tokens((await fleet.generate(FOUR)).sorted_rows()) == ANSWERS
        assert fleet.dispatcher.admission.outstanding == 0
    failing = FakeEngine(0, script=FakeEngineScript(lost=frozenset({0, 1})))
    async with Fleet(failing, max_outstanding_requests=4) as fleet:
        assert len((await fleet.generate(FOUR)).failures) == 2
        assert fleet.dispatcher.admission.outstanding == 0
        assert (fleet.counters.completed, fleet.counters.failed) == (2, 2)


async def test_a_prompt_whose_samples_are_streamed_takes_one_place():
    gate = Gate()
    one = FakeEngine(0, script=FakeEngineScript(gate=lambda _: gate))
    async with Fleet(one, max_outstanding_requests=1, on_overload=Overload.RAISE) as fleet:
        sampling = SamplingConfig(n=3, max_tokens=2, ignore_eos=True)
        work = asyncio.create_task(fleet.pieces(prompts([5]), sampling))
        await held(gate, 3)
        assert fleet.dispatcher.admission.outstanding == 1
        gate.open()
        assert len(await work) == 6
        assert fleet.dispatcher.admission.outstanding == 0
        assert (fleet.counters.requests, fleet.counters.completed) == (1, 1)


async def test_portions_move_too_when_their_replica_dies():
    gate = Gate()
    dying = FakeEngine(0, script=FakeEngineScript(gate=lambda _: gate))
    health = HealthConfig(max_restarts=0, heartbeat_period_s=0.002)
    async with Fleet(dying, FakeEngine(1), health=health, max_outstanding_requests=4) as fleet:
        rows = prompts(*([5 + row] for row in range(20)))
        work = asyncio.create_task(fleet.generate(rows, sampling=TWO_TOKENS))
        await held(gate, 1)
        dying.kill("out of memory")
        assert first_tokens((await work).sorted_rows()) == [8 + row for row in range(20)]
        await until(lambda: fleet.dispatcher.admission.outstanding == 0)

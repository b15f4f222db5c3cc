"""However many ask for a replica's stop, it is stopped once, and all of them wait for that."""

import asyncio

import pytest

from rl_vllm.service.stopping import Stops
from rl_vllm.testing import Gate


async def test_all_who_ask_wait_for_the_one_stop():
    gate, calls, stops = Gate(), [], Stops()

    async def stop() -> None:
        calls.append("began")
        await gate.passed()
        calls.append("ended")

    tasks = [asyncio.create_task(stops.run(3, stop)) for _ in range(3)]
    await asyncio.to_thread(gate.wait_until_held)
    assert calls == ["began"]
    assert stops.under_way() == [3]
    assert not any(task.done() for task in tasks)
    gate.open()
    await asyncio.gather(*tasks)
    assert calls == ["began", "ended"]
    assert stops.under_way() == []


async def test_one_who_is_cancelled_does_not_cancel_the_stop():
    gate, calls, stops = Gate(), [], Stops()

    async def stop() -> None:
        await gate.passed()
        calls.append("ended")

    first, second = (asyncio.create_task(stops.run(0, stop)) for _ in range(2))
    await asyncio.to_thread(gate.wait_until_held)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    gate.open()
    await second
    assert calls == ["ended"]


async def test_an_error_reaches_everyone_and_the_next_stop_is_a_new_one():
    stops, calls = Stops(), []

    async def stop() -> None:
        calls.append("began")
        await asyncio.sleep(0)
        raise RuntimeError("no stop")

    results = await asyncio.gather(*(stops.run(1, stop) for _ in range(2)), return_exceptions=True)
    assert [str(error) for error in results] == ["no stop"] * 2
    assert len(calls) == 1
    with pytest.raises(RuntimeError, match="no stop"):
        await stops.run(1, stop)
    assert len(calls) == 2

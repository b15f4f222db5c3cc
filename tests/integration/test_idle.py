"""Whoever gives up waiting leaves the engines without work, whatever way it waited."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import psutil
import pytest

from rl_vllm import AsyncVLLM, SamplingConfig
from rl_vllm.errors import DeadlineError
from rl_vllm.types import PromptBatch

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

PROMPTS = [[7, 3, 300, 41, 9, 120, 77, 8][: 3 + row % 6] for row in range(8)]
LONG = SamplingConfig(max_tokens=400, ignore_eos=True)
LONG_GROUP = SamplingConfig(n=4, max_tokens=400, ignore_eos=True)
GIVE_UP_S = 0.3
GOAL_S = 2.0
ATTEMPTS = 3
HARD_LIMIT_S = 60.0
# vLLM's own way of waiting takes about half of one.
MOST_OF_A_CORE = 0.2


def num_unfinished(service: AsyncVLLM) -> int:
    """By the engines' own count."""
    counts = service.get_num_unfinished_requests()
    assert isinstance(counts, list)
    return sum(count for count in counts if count is not None)


def seconds_until_idle(service: AsyncVLLM) -> float:
    started = time.monotonic()
    while num_unfinished(service):
        assert time.monotonic() - started < HARD_LIMIT_S, f"still running after {HARD_LIMIT_S} s"
        time.sleep(0.02)
    return time.monotonic() - started


def until_running(service: AsyncVLLM) -> None:
    deadline = time.monotonic() + HARD_LIMIT_S
    while not num_unfinished(service):
        assert time.monotonic() < deadline, "nothing began"
        time.sleep(0.005)


def deadline_of_a_batch(service: AsyncVLLM, sampling: SamplingConfig) -> None:
    with pytest.raises(DeadlineError):
        service.generate_batch(PromptBatch.from_rows(PROMPTS), sampling, timeout_s=GIVE_UP_S)


def deadline_of_generate(service: AsyncVLLM, sampling: SamplingConfig) -> None:
    with pytest.raises(DeadlineError):
        service.generate(PROMPTS, sampling, use_tqdm=False, timeout_seconds=GIVE_UP_S)


def deadline_on_an_event_loop(service: AsyncVLLM, sampling: SamplingConfig) -> None:
    with pytest.raises(DeadlineError):
        asyncio.run(service.agenerate(PROMPTS, sampling, timeout_seconds=GIVE_UP_S))


def cancelled_task(service: AsyncVLLM, sampling: SamplingConfig) -> None:
    async def scenario() -> None:
        work = asyncio.create_task(service.agenerate(PROMPTS, sampling))
        await asyncio.to_thread(until_running, service)
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work

    asyncio.run(scenario())


def closed_stream(service: AsyncVLLM, sampling: SamplingConfig) -> None:
    with service.stream_generate(PROMPTS[0], sampling) as stream:
        next(stream)


def deadline_of_a_stream(service: AsyncVLLM, sampling: SamplingConfig) -> None:
    with pytest.raises(DeadlineError):
        for _ in service.stream_generate(PROMPTS[0], sampling, timeout_seconds=GIVE_UP_S):
            pass


def cancelled_reader(service: AsyncVLLM, sampling: SamplingConfig) -> None:
    async def read() -> None:
        async for _ in await service.astream_generate(PROMPTS[0], sampling):
            pass

    async def scenario() -> None:
        reader = asyncio.create_task(read())
        await asyncio.to_thread(until_running, service)
        reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reader

    asyncio.run(scenario())


def aborted_requests(service: AsyncVLLM, sampling: SamplingConfig) -> None:
    names = [service.add_request(prompt, sampling) for prompt in PROMPTS]
    until_running(service)
    service.abort(names)


@pytest.mark.parametrize("sampling", [LONG, LONG_GROUP], ids=["one sample", "a group"])
@pytest.mark.parametrize(
    "give_up",
    [
        deadline_of_a_batch,
        deadline_of_generate,
        deadline_on_an_event_loop,
        cancelled_task,
        closed_stream,
        deadline_of_a_stream,
        cancelled_reader,
        aborted_requests,
    ],
    ids=lambda scenario: scenario.__name__,
)
def test_the_engines_are_idle_soon_after(
    service: AsyncVLLM, give_up: Callable[[AsyncVLLM, SamplingConfig], None], sampling: SamplingConfig
) -> None:
    seconds = []
    for _ in range(ATTEMPTS):
        give_up(service, sampling)
        seconds.append(seconds_until_idle(service))
        # On a machine that is busy with something else one attempt says little.
        if seconds[-1] < GOAL_S:
            break
    assert min(seconds) < GOAL_S, f"seconds until idle: {seconds}"
    assert service.stats().outstanding_requests == 0
    answer = service.generate_batch(PromptBatch.from_rows([[5]]), SamplingConfig(max_tokens=2, ignore_eos=True))
    assert answer.lengths_N.tolist() == [2]


def test_engines_without_work_leave_the_cores_to_others(service: AsyncVLLM) -> None:
    service.check_health()
    workers = [process for process in psutil.Process().children(recursive=True) if process.name() == "VLLM::Worker"]
    assert len(workers) == service.num_replicas

    def spent_s() -> list[float]:
        return [sum(worker.cpu_times()[:2]) for worker in workers]

    before, began = spent_s(), time.monotonic()
    # Several heartbeats: each is a message to every worker.
    time.sleep(3 * service.config.health.heartbeat_period_s)
    shares = [(now - then) / (time.monotonic() - began) for now, then in zip(spent_s(), before, strict=True)]
    assert max(shares) < MOST_OF_A_CORE

"""One loop in its own thread: deadlines, interrupts and closing reach the work."""

import asyncio
import os
import signal
import sys
import threading
from concurrent.futures import CancelledError

import pytest

from rl_vllm.errors import DeadlineError, ServiceNotRunningError
from rl_vllm.service.loop import LoopThread
from rl_vllm.service.outbox import Outbox


@pytest.fixture
def loop():
    thread = LoopThread("test-loop")
    yield thread
    thread.close()


class Work:
    """Never ends by itself; notes that it started and that it was cancelled and cleaned up."""

    def __init__(self):
        self.started = threading.Event()
        self.cleaned_up = threading.Event()

    async def __call__(self):
        self.started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            self.cleaned_up.set()
            raise


def test_work_runs_on_the_loops_thread_and_its_result_and_error_come_back(loop):
    async def name():
        return threading.current_thread().name

    async def fail():
        raise KeyError("lost")

    assert loop.run(name, timeout_s=10, waited_for="a name") == "test-loop"
    with pytest.raises(KeyError, match="lost"):
        loop.run(fail, timeout_s=10, waited_for="nothing")


def test_a_deadline_names_what_was_waited_for_after_the_work_has_cleaned_up(loop):
    work = Work()
    with pytest.raises(DeadlineError, match=r"gave up after 0\.01 s waiting for 3 prompts"):
        loop.run(work, timeout_s=0.01, waited_for="3 prompts")
    assert work.cleaned_up.is_set()


def test_a_deadline_error_from_inside_is_the_one_that_is_seen(loop):
    async def inner():
        raise DeadlineError("replica 2", 1.5)

    async def plain():
        raise TimeoutError("the socket's")

    with pytest.raises(DeadlineError, match="replica 2"):
        loop.run(inner, timeout_s=10, waited_for="outer")
    with pytest.raises(TimeoutError, match="the socket's"):
        loop.run(plain, timeout_s=10, waited_for="outer")


def test_cancelling_the_future_cancels_the_work(loop):
    work = Work()
    future = loop.submit(work())
    assert work.started.wait(10)
    assert future.cancel()
    assert work.cleaned_up.wait(10)


def test_an_interrupt_of_the_caller_cancels_the_work(loop):
    work = Work()
    main = threading.get_ident()

    def interrupt():
        assert work.started.wait(10)
        # An interrupt counts once the caller stands in Condition.wait.
        while sys._current_frames()[main].f_code is not threading.Condition.wait.__code__:
            pass
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        loop.run(work, timeout_s=60, waited_for="an interrupt")
    thread.join()
    assert work.cleaned_up.wait(10)


def test_closing_cancels_what_runs_and_ends_the_thread(loop):
    work = Work()
    errors = []

    def call():
        try:
            loop.run(work, timeout_s=60, waited_for="ever")
        except CancelledError as error:
            errors.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    assert work.started.wait(10)
    loop.close()
    caller.join(10)
    assert len(errors) == 1
    assert work.cleaned_up.is_set()
    assert "test-loop" not in [thread.name for thread in threading.enumerate()]


def test_a_closed_loop_refuses_work_and_may_be_closed_again(loop):
    loop.close()
    loop.close()
    with pytest.raises(CancelledError):
        loop.run(Work(), timeout_s=10, waited_for="nothing")
    with pytest.raises(CancelledError):
        loop.submit(Work()())


def test_a_fork_is_refused_instead_of_waiting_for_ever(loop, monkeypatch):
    async def answer():
        return 1

    owner = os.getpid()
    monkeypatch.setattr("rl_vllm.service.loop.os.getpid", lambda: owner + 1)
    with pytest.raises(ServiceNotRunningError, match=f"running in process {owner}, of which this one is a fork"):
        loop.run(answer, timeout_s=10, waited_for="an answer")


# From other event loops


async def test_work_is_awaited_from_any_event_loop_and_runs_on_this_one(loop):
    async def name():
        return threading.current_thread().name

    async def nested():
        # Already there: no hop, and no deadlock.
        return await loop.await_from_anywhere(name, timeout_s=10, waited_for="a name")

    assert await loop.await_from_anywhere(name, timeout_s=10, waited_for="a name") == "test-loop"
    assert await loop.await_from_anywhere(nested, timeout_s=10, waited_for="a name") == "test-loop"


async def test_cancelling_whoever_awaits_cancels_the_work(loop):
    work = Work()
    task = asyncio.create_task(loop.await_from_anywhere(work, timeout_s=60, waited_for="nothing"))
    await asyncio.to_thread(work.started.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(work.cleaned_up.wait, 60)


async def test_a_deadline_passes_for_whoever_awaits_after_the_work_has_cleaned_up(loop):
    work = Work()
    with pytest.raises(DeadlineError, match=r"0\.01 s waiting for 3 prompts"):
        await loop.await_from_anywhere(work, timeout_s=0.01, waited_for="3 prompts")
    assert work.cleaned_up.is_set()


async def test_closing_the_loop_ends_the_wait_of_another_one():
    loop = LoopThread("test-loop")
    work = Work()
    task = asyncio.create_task(loop.await_from_anywhere(work, timeout_s=60, waited_for="nothing"))
    await asyncio.to_thread(work.started.wait, 60)
    await asyncio.to_thread(loop.close)
    with pytest.raises(CancelledError):
        await task
    with pytest.raises(CancelledError):
        await loop.await_from_anywhere(work, timeout_s=1, waited_for="nothing")


def test_a_blocking_call_on_the_loops_own_thread_is_refused(loop):
    async def fail():
        loop.run(Work(), timeout_s=1, waited_for="itself")

    with pytest.raises(RuntimeError, match="itself: a blocking call on the service's own loop would wait for itself"):
        loop.run(fail, timeout_s=10, waited_for="a refusal")


def test_a_finaliser_may_submit_in_the_middle_of_a_submit(loop):
    done = threading.Event()

    async def note():
        done.set()

    # As a garbage collection would, that starts while the lock is held.
    with loop._lock:
        loop.submit(note())
    assert done.wait(60)


def test_an_outbox_keeps_the_order_and_ends_with_its_error():
    box = Outbox()
    waiting = box.ready()
    assert not waiting.done()
    box.put(1)
    assert waiting.done()
    box.put(2)
    box.end(KeyError("lost"))
    assert box.ready().done()
    assert [box.take(), box.take()] == [1, 2]
    with pytest.raises(KeyError, match="lost"):
        box.take()
    # The error is told once; after it there is nothing.
    assert box.take() is None


def test_a_reader_that_gave_up_waiting_loses_nothing():
    box = Outbox()
    box.ready().cancel()
    box.put(1)
    assert box.ready().done()
    assert box.take() == 1

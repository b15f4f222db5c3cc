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

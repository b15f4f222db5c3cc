"""Sleep and waking over a stand-in for vLLM, which goes on with requests as soon as all memory is back."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from rl_vllm.engine.sleep import Sleep
from rl_vllm.errors import ConfigError, RefitError, UnsupportedByEngineError


class StandInLLM:
    """Knows what sleeps, and whether it generates."""

    def __init__(self, *, enable_sleep_mode: bool = True) -> None:
        self.model_config = SimpleNamespace(enable_sleep_mode=enable_sleep_mode)
        self.asleep: set[str] = set()
        self.calls: list[tuple[object, ...]] = []

    async def sleep(self, level: int, mode: str) -> None:
        self.calls.append(("sleep", level, mode))
        self.asleep = {"weights", "kv_cache"}

    async def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake_up", *tags))
        self.asleep -= set(tags)

    @property
    def generates(self) -> bool:
        return not self.asleep


async def answered(call):
    return await call


def on_gpu(**settings: bool) -> tuple[StandInLLM, Sleep]:
    llm = StandInLLM(**settings)
    return llm, Sleep(llm, answered, on_cpu=False)


async def test_level_1_wakes_with_everything_and_goes_on():
    llm, sleep = on_gpu()
    await sleep.sleep(1)
    assert sleep.is_sleeping
    assert not llm.generates
    await sleep.wake_up(None)
    assert not sleep.is_sleeping
    assert llm.generates


async def test_running_requests_are_kept():
    llm, sleep = on_gpu()
    await sleep.sleep(1)
    assert llm.calls == [("sleep", 1, "keep")]


async def test_weights_wake_before_the_cache_in_any_order_of_tags():
    llm, sleep = on_gpu()
    await sleep.sleep(1)
    await sleep.wake_up(("kv_cache", "weights"))
    assert llm.calls[1:] == [("wake_up", "weights"), ("wake_up", "kv_cache")]


async def test_what_is_awake_is_not_woken_again():
    llm, sleep = on_gpu()
    await sleep.wake_up(None)
    await sleep.sleep(1)
    await sleep.wake_up(("weights",))
    await sleep.wake_up(("weights",))
    assert llm.calls == [("sleep", 1, "keep"), ("wake_up", "weights")]
    assert sleep.is_sleeping


async def test_nothing_is_generated_after_level_2_before_a_refit_also_when_all_was_to_be_woken():
    llm, sleep = on_gpu()
    await sleep.sleep(2)
    await sleep.wake_up(None)
    assert not llm.generates
    assert sleep.is_sleeping
    # There is memory to load into.
    sleep.require_memory_for_weights(3)
    await sleep.weights_came()
    assert llm.generates
    assert not sleep.is_sleeping


async def test_the_cache_wakes_only_when_asked_if_weights_came_first():
    llm, sleep = on_gpu()
    await sleep.sleep(2)
    await sleep.wake_up(("weights",))
    await sleep.weights_came()
    assert not llm.generates
    await sleep.wake_up(("kv_cache",))
    assert llm.generates


async def test_weights_that_level_2_dropped_stay_missing_through_a_further_sleep():
    llm, sleep = on_gpu()
    await sleep.sleep(2)
    await sleep.wake_up(None)
    # The cache still sleeps, so a further sleep is refused rather than half done.
    with pytest.raises(ConfigError, match="sleeps at level 2 already"):
        await sleep.sleep(1)
    assert not llm.generates


async def test_no_weights_are_loaded_where_there_is_no_memory():
    _, sleep = on_gpu()
    await sleep.sleep(1)
    with pytest.raises(RefitError, match=r"refit to version 3 failed in commit.*wake_up\(\('weights',\)\) first"):
        sleep.require_memory_for_weights(3)


async def test_the_same_sleep_again_is_nothing_and_another_level_is_refused():
    llm, sleep = on_gpu()
    await sleep.sleep(1)
    await sleep.sleep(1)
    assert llm.calls == [("sleep", 1, "keep")]
    with pytest.raises(ConfigError, match="sleeps at level 1 already"):
        await sleep.sleep(2)


@pytest.mark.parametrize("level", [0, 3, True])
async def test_a_level_that_is_none_is_refused(level):
    _, sleep = on_gpu()
    with pytest.raises(ConfigError, match="level must be 1"):
        await sleep.sleep(level)


async def test_a_tag_that_is_none_is_refused():
    _, sleep = on_gpu()
    with pytest.raises(ConfigError, match="tags must be among weights, kv_cache"):
        await sleep.wake_up(("weight",))


async def test_a_gpu_engine_without_sleep_mode_says_how_to_have_it():
    llm, sleep = on_gpu(enable_sleep_mode=False)
    with pytest.raises(UnsupportedByEngineError, match="enable_sleep_mode"):
        await sleep.sleep(1)
    assert llm.calls == []


async def test_a_cpu_engine_sleeps_without_the_setting_and_says_once_that_no_memory_is_freed(caplog):
    llm = StandInLLM(enable_sleep_mode=False)
    sleep = Sleep(llm, answered, on_cpu=True)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            await sleep.sleep(1)
            await sleep.wake_up(None)
    assert [record.message for record in caplog.records if "no memory back" in record.message] == [
        "sleep pauses a CPU engine and gives no memory back: vLLM's CPU build has no sleep mode"
    ]


async def test_a_sleep_that_failed_is_none():
    llm, _ = on_gpu()

    async def failing(call):
        call.close()
        raise asyncio.CancelledError

    sleep = Sleep(llm, failing, on_cpu=False)
    with pytest.raises(asyncio.CancelledError):
        await sleep.sleep(1)
    assert not sleep.is_sleeping

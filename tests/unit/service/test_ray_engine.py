"""The driver's end of an engine, over a stand-in for Ray's actor handle; Ray is not started."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray")

from ray.exceptions import ActorDiedError, ActorUnavailableError, ObjectLostError, RayError, RayTaskError

from rl_vllm.engine.actor import EngineActor
from rl_vllm.errors import ConfigError, EngineDiedError, ReplicaCallError
from rl_vllm.protocols import Engine
from rl_vllm.service.ray_engine import RayEngine
from rl_vllm.testing import FakeEngine, Gate
from rl_vllm.types import (
    CompletionBatch,
    EmbeddingRequest,
    InFlight,
    KVCache,
    LoRAAdapter,
    PoolingConfig,
    PromptBatch,
    RequestBatch,
    SamplingConfig,
    WeightUpdate,
)

UPDATE = WeightUpdate(version=1, transport="shared_storage", payload={}, num_tensors=1, num_bytes=4)
ADAPTER = LoRAAdapter(name="poet", number=1, path="/poet")
BATCH = RequestBatch(np.array([5, 6]), PromptBatch.from_rows([[1], [2]]), (SamplingConfig(),) * 2)
EMBEDDING = EmbeddingRequest(np.array([5, 6]), PromptBatch.from_rows([[1], [2]]), PoolingConfig())

# Every method that is one call: its arguments.
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "model_info": ((), {}),
    "abort": (([5],), {}),
    "metrics": ((), {}),
    "prometheus": ((), {}),
    "check_health": ((), {}),
    "engine_config": ((), {}),
    "weight_specs": ((), {}),
    "stage_weights": ((UPDATE,), {"timeout_s": 1.0}),
    "commit_weights": ((UPDATE,), {"in_flight": InFlight.KEEP, "kv": KVCache.REUSE}),
    "reset_prefix_cache": ((), {}),
    "reset_mm_cache": ((), {}),
    "lora_limits": ((), {}),
    "add_lora": ((ADAPTER,), {}),
    "remove_lora": (("poet",), {}),
    "list_loras": ((), {}),
    "pin_lora": (("poet",), {}),
    "sleep": ((1,), {}),
    "wake_up": ((("weights",),), {}),
    "is_sleeping": ((), {}),
    "start_profile": ((), {}),
    "stop_profile": ((), {}),
    "collective_rpc": (("ping",), {"timeout_s": 1.0, "args": (1,), "kwargs": None}),
    "shutdown": ((), {}),
}
STREAMS = {"stream": BATCH, "stream_pieces": BATCH, "embed": EMBEDDING}


class Handle:
    """An actor whose methods answer with what ``answer`` makes of their name; remembers its calls."""

    def __init__(self, answer: Callable[[str], Any]) -> None:
        self.answer = answer
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.chunk_gate = Gate(is_open=True)

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)


class Method:
    def __init__(self, handle: Handle, name: str, *, streams: bool = False) -> None:
        self.handle = handle
        self.name = name
        self.streams = streams

    def options(self, *, num_returns: str) -> Method:
        assert num_returns == "streaming"
        return Method(self.handle, self.name, streams=True)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        self.handle.calls.append((self.name, args, kwargs))
        return self._chunks() if self.streams else self._answer()

    def _answer(self) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        answer = self.handle.answer(self.name)
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
        return future

    async def _chunks(self):
        while True:
            await self.handle.chunk_gate.passed()
            yield self._answer()


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("f", "Traceback: ...", cause, proctitle="actor", pid=1, ip="0.0.0.0")


async def call(engine: RayEngine, name: str) -> Any:
    args, kwargs = CALLS[name]
    return await getattr(engine, name)(*args, **kwargs)


def test_the_table_above_has_every_method_of_an_engine():
    methods = {name for name in vars(Engine) if not name.startswith("_")}
    assert methods == {*CALLS, *STREAMS}


def test_actor_and_proxy_have_every_method_of_an_engine():
    for kind in (RayEngine, EngineActor):
        assert issubclass(kind, Engine)


@pytest.mark.parametrize("name", [name for name in CALLS if name != "engine_config"])
async def test_a_call_reaches_the_actor_as_it_was_made(name):
    handle = Handle(lambda _name: None)
    await call(RayEngine(handle, 2), name)
    args, kwargs = CALLS[name]
    assert handle.calls == [(name, args, kwargs)]


async def test_the_engines_configuration_travels_as_bytes():
    import pickle

    engine = RayEngine(Handle(lambda name: pickle.dumps({"asked": name})), 2)
    assert await engine.engine_config() == {"asked": "pickled_engine_config"}


@pytest.mark.parametrize("name", CALLS)
async def test_a_dead_actor_is_asked_once_and_every_later_call_raises_without_it(name):
    handle = Handle(lambda _name: ActorDiedError())
    engine = RayEngine(handle, 2)
    with pytest.raises(EngineDiedError, match="replica 2 died: The actor died unexpectedly"):
        await call(engine, name)
    asked = len(handle.calls)
    for other in CALLS:
        with pytest.raises(EngineDiedError, match="The actor died unexpectedly"):
            await call(engine, other)
    for other, request in STREAMS.items():
        with pytest.raises(EngineDiedError, match="The actor died unexpectedly"):
            await anext(getattr(engine, other)(request))
    assert len(handle.calls) == asked


async def test_an_actor_that_cannot_be_reached_for_now_is_not_dead():
    answers: list[Any] = [ActorUnavailableError("no route", None), True]
    engine = RayEngine(Handle(lambda _name: answers.pop(0)), 2)
    with pytest.raises(ReplicaCallError, match=r"is_sleeping\(\) failed.*replica 2: ActorUnavailableError"):
        await engine.is_sleeping()
    assert await engine.is_sleeping() is True


@pytest.mark.parametrize("error", [ObjectLostError("00ff", None, "callsite"), RayError("something new")])
async def test_what_else_ray_runs_into_is_a_failed_call(error):
    engine = RayEngine(Handle(lambda _name: error), 2)
    with pytest.raises(ReplicaCallError, match=rf"metrics\(\) failed.*replica 2: {type(error).__name__}"):
        await engine.metrics()


async def test_an_error_arrives_as_the_engine_raised_it():
    raised = ConfigError("level must be 1")
    with pytest.raises(ConfigError) as caught:
        await RayEngine(Handle(lambda _name: task_error(raised)), 2).sleep(1)
    assert caught.value is raised


async def test_an_error_that_cannot_be_pickled_arrives_as_a_failed_call():
    with pytest.raises(ReplicaCallError, match="isn't serializable"):
        await RayEngine(Handle(lambda _name: task_error(RayError("Exception isn't serializable"))), 2).sleep(1)


@pytest.mark.parametrize("name", STREAMS)
async def test_a_stream_yields_what_the_actor_yields_and_closing_it_aborts(name):
    chunk = CompletionBatch.empty()
    handle = Handle(lambda _name: chunk)
    stream = getattr(RayEngine(handle, 2), name)(STREAMS[name])
    assert await anext(stream) is chunk
    assert await anext(stream) is chunk
    await stream.aclose()
    assert [(what, args) for what, args, _ in handle.calls] == [(name, (STREAMS[name],)), ("abort", ([5, 6],))]


@pytest.mark.parametrize("name", STREAMS)
async def test_a_stream_of_an_actor_that_died_ends_and_nothing_is_sent_to_it(name):
    handle = Handle(lambda _name: ActorDiedError())
    engine = RayEngine(handle, 2)
    with pytest.raises(EngineDiedError, match="replica 2 died: The actor died unexpectedly"):
        await anext(getattr(engine, name)(STREAMS[name]))
    assert [what for what, _, _ in handle.calls] == [name]
    with pytest.raises(EngineDiedError):
        await engine.metrics()


async def test_a_dead_engine_in_a_living_actor_ends_the_stream_and_later_calls_ask_again():
    died = EngineDiedError(2, "process EngineCore was killed by signal 9")
    handle = Handle(lambda name: task_error(died) if name == "stream" else True)
    engine = RayEngine(handle, 2)
    with pytest.raises(EngineDiedError, match="signal 9"):
        await anext(engine.stream(BATCH))
    assert await engine.is_sleeping() is True
    assert [what for what, _, _ in handle.calls] == ["stream", "is_sleeping"]


@pytest.mark.parametrize("error", [ObjectLostError("00ff", None, "callsite"), ActorUnavailableError("no route", None)])
async def test_a_stream_that_lost_an_answer_cannot_be_trusted_any_more_and_is_aborted(error):
    handle = Handle(lambda name: error if name == "stream" else None)
    with pytest.raises(EngineDiedError, match="replica 2 died: an answer was lost"):
        await anext(RayEngine(handle, 2).stream(BATCH))
    assert [what for what, _, _ in handle.calls] == ["stream", "abort"]


async def test_an_error_of_the_request_ends_the_stream_as_it_was_raised():
    handle = Handle(lambda name: task_error(ConfigError("vLLM refuses")) if name == "stream" else None)
    with pytest.raises(ConfigError, match="vLLM refuses"):
        await anext(RayEngine(handle, 2).stream(BATCH))


def test_the_fake_plays_the_same_engine():
    assert issubclass(FakeEngine, Engine)

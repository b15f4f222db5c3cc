"""An engine and an executor without vLLM and Ray: ``AsyncVLLM`` runs on them in one process, with faults by script."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from rl_vllm.config import ServiceConfig
from rl_vllm.errors import ConfigError, DeadlineError, EngineDiedError
from rl_vllm.protocols import Engine
from rl_vllm.testing.answers import FAKE_MODEL, FakeRequest, FakeScript, FakeWeights, answer, requests_of
from rl_vllm.types import (
    CommitReport,
    CompletionBatch,
    EngineMetrics,
    FinishReason,
    InFlight,
    KVCache,
    ModelInfo,
    RequestBatch,
    TensorSpec,
    WeightUpdate,
)


class Gate:
    """A door at which a fake waits until a test opens it; every method may be called from any thread.

    Args:
        is_open: Whether it lets everyone through from the start.
    """

    def __init__(self, *, is_open: bool = False) -> None:
        self._is_open = is_open
        self._changed = threading.Condition()
        self._held: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}

    def open(self) -> None:
        """Let through everyone who waits and everyone who comes."""
        with self._changed:
            self._is_open = True
            for future, loop in self._held.items():
                loop.call_soon_threadsafe(_release, future)
            self._held.clear()

    def close(self) -> None:
        """Hold everyone who comes from now on."""
        with self._changed:
            self._is_open = False

    async def passed(self) -> None:
        """Wait until the gate is open."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._changed:
            if self._is_open:
                return
            self._held[future] = loop
            self._changed.notify_all()
        try:
            await future
        finally:
            with self._changed:
                self._held.pop(future, None)

    def wait_until_held(self, count: int = 1, *, timeout_s: float = 10.0) -> None:
        """Block until ``count`` wait at the gate; inside an event loop use ``asyncio.to_thread``.

        Raises:
            DeadlineError: Fewer came within ``timeout_s`` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._held) >= count, timeout_s):
                raise DeadlineError(f"{count} to wait at a gate where {len(self._held)} do", timeout_s)


def _release(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _no_gate(_request: FakeRequest) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeEngineScript:
    """What a fake engine does beyond the default; every field changes one thing.

    Attributes:
        answers: Responses, failures and errors of stage and commit; where it says row, an engine takes the request's
            number. A service numbers its first requests 0, 1, ... in the order of their rows.
        gate: Where a request waits before it is answered (asked with its first sample), or None.
        stage_gate: Where ``stage_weights`` waits.
        commit_gate: Where ``commit_weights`` waits, already paused.
        dies_after: The engine dies when it has yielded this many chunks in its life; every request is one chunk.
        lost: Numbers of requests that a stream ends without answering.
        repeats: Every chunk is yielded twice.
    """

    answers: FakeScript = field(default_factory=FakeScript)
    gate: Callable[[FakeRequest], Gate | None] = _no_gate
    stage_gate: Gate | None = None
    commit_gate: Gate | None = None
    dies_after: int | None = None
    lost: frozenset[int] = frozenset()
    repeats: bool = False

    def __post_init__(self) -> None:
        if self.answers.columns is not None:
            raise ConfigError("an engine numbers its answers: FakeScript.columns is for FakeService alone")


@dataclass(slots=True)
class _Running:
    """A request that waits for its answer."""

    requests: list[FakeRequest]
    outbox: asyncio.Queue[CompletionBatch | EngineDiedError]
    task: asyncio.Task[None] | None = None


class FakeEngine:
    """Implements :class:`rl_vllm.protocols.Engine`; answers by the rules of :mod:`rl_vllm.testing.answers`.

    As with a real engine, requests wait while weights are committed, and go on waiting when a commit failed, until one
    succeeds. Tokens carry the version in force when they are made.

    Args:
        replica: Index of the replica it plays, named in its errors.
        info: The model it pretends to serve.
        script: Departures from the default behaviour; may be replaced between calls.
        specs: What ``weight_specs`` returns.

    Attributes:
        batches: Every batch it was given, in order.
        aborted: Numbers of the requests that were aborted or given up before their answer, in order.
        staged: Every update that was staged, in order.
        committed: Every update that was committed, in order.
        num_shutdowns: Calls of ``shutdown``.
    """

    def __init__(
        self,
        replica: int = 0,
        *,
        info: ModelInfo = FAKE_MODEL,
        script: FakeEngineScript | None = None,
        specs: tuple[TensorSpec, ...] = (),
    ) -> None:
        self.script = script if script is not None else FakeEngineScript()
        self.batches: list[RequestBatch] = []
        self.aborted: list[int] = []
        self.staged: list[WeightUpdate] = []
        self.committed: list[WeightUpdate] = []
        self.num_shutdowns = 0
        self._replica = replica
        self._info = info
        self._specs = specs
        self._weights = FakeWeights()
        self._unpaused = Gate(is_open=True)
        self._running: dict[int, _Running] = {}
        self._num_chunks = 0
        self._num_tokens = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._death: EngineDiedError | None = None

    def kill(self, reason: str) -> None:
        """Be dead from now on: streams break and every call raises :class:`EngineDiedError`. Safe from any thread."""
        self._death = EngineDiedError(self._replica, reason)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._break_streams)

    def _break_streams(self) -> None:
        assert self._death is not None
        for running in self._running.values():
            running.outbox.put_nowait(self._death)

    async def model_info(self) -> ModelInfo:
        await self.check_health()
        return self._info

    async def stream(self, batch: RequestBatch) -> AsyncGenerator[CompletionBatch, None]:
        await self.check_health()
        self._loop = asyncio.get_running_loop()
        self.batches.append(batch)
        outbox: asyncio.Queue[CompletionBatch | EngineDiedError] = asyncio.Queue()
        numbers = batch.numbers_B.tolist()
        for row, number in enumerate(numbers):
            requests = requests_of(number, batch.prompts.row(row), batch.sampling_B[row], self._info)
            running = self._running[number] = _Running(requests, outbox)
            running.task = asyncio.create_task(self._answer(running), name=f"fake-request-{number}")
        try:
            for _ in range(len(numbers) - len(self.script.lost.intersection(numbers))):
                if self._num_chunks == self.script.dies_after:
                    self._die("as the script says")
                chunk = await outbox.get()
                if isinstance(chunk, EngineDiedError):
                    raise chunk
                self._num_chunks += 1
                self._num_tokens += len(chunk.tokens_T)
                for _ in range(2 if self.script.repeats else 1):
                    yield chunk
        finally:
            unanswered = [number for number in numbers if number in self._running]
            if self._death is None:
                self.aborted += unanswered
            await self._cancel(unanswered)

    async def _answer(self, running: _Running) -> None:
        first = running.requests[0]
        gate = self.script.gate(first)
        if gate is not None:
            await gate.passed()
        await self._unpaused.passed()
        del self._running[first.row]
        script = self.script.answers
        if first.row in script.failures:
            failures = {first.row: script.failures[first.row]}
            running.outbox.put_nowait(answer([], script, self._weights.version, failures))
        elif first.row not in self.script.lost:
            running.outbox.put_nowait(answer(running.requests, script, self._weights.version, {}))

    def _die(self, reason: str) -> NoReturn:
        self.kill(reason)
        assert self._death is not None
        raise self._death

    async def _cancel(self, numbers: Sequence[int]) -> list[_Running]:
        """Stop the tasks of those that still run; the requests they were for."""
        stopped = [self._running.pop(number) for number in numbers if number in self._running]
        tasks = [running.task for running in stopped if running.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return stopped

    async def abort(self, numbers: Sequence[int]) -> None:
        """Answer the requests that still run with no token and the finish reason ``ABORT``."""
        await self.check_health()
        for running in await self._cancel(numbers):
            number = running.requests[0].row
            self.aborted.append(number)
            script = FakeScript(respond=lambda _request: (), finish={number: FinishReason.ABORT})
            running.outbox.put_nowait(answer(running.requests, script, self._weights.version, {}))

    async def metrics(self) -> EngineMetrics:
        """Every unanswered request counts as running; there is no KV cache to use."""
        await self.check_health()
        return EngineMetrics(
            num_running=len(self._running), num_waiting=0, kv_cache_usage=0.0, generated_tokens=self._num_tokens
        )

    async def check_health(self) -> None:
        if self._death is not None:
            raise self._death

    async def weight_specs(self) -> tuple[TensorSpec, ...]:
        await self.check_health()
        return self._specs

    async def stage_weights(self, update: WeightUpdate, *, timeout_s: float) -> None:
        await self.check_health()
        if self.script.stage_gate is not None:
            try:
                async with asyncio.timeout(timeout_s):
                    await self.script.stage_gate.passed()
            except TimeoutError:
                raise DeadlineError(f"version {update.version} to be staged", timeout_s) from None
        if self.script.answers.stage_error is not None:
            raise self.script.answers.stage_error
        self._weights.stage(update)
        self.staged.append(update)

    async def commit_weights(self, update: WeightUpdate, *, in_flight: InFlight, kv: KVCache) -> CommitReport:
        await self.check_health()
        self._weights.require_staged(update)
        if in_flight is InFlight.WAIT:
            await asyncio.gather(*(running.task for running in self._running.values() if running.task is not None))
        elif in_flight is InFlight.ABORT:
            await self.abort(list(self._running))
        self._unpaused.close()
        if self.script.commit_gate is not None:
            await self.script.commit_gate.passed()
        if self.script.answers.commit_error is not None:
            raise self.script.answers.commit_error
        report = self._weights.commit(update, kv)
        self.committed.append(update)
        self._unpaused.open()
        return report

    async def reset_prefix_cache(self) -> bool:
        await self.check_health()
        return not self._running

    async def collective_rpc(
        self, method: str, *, timeout_s: float, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> list[object]:
        """A fake has no workers.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(f"a fake engine has no workers to call {method!r} on")

    async def shutdown(self) -> None:
        self.num_shutdowns += 1
        await self._cancel(list(self._running))


class FakeExecutor:
    """Implements the service's executor on engines that exist already: ``AsyncVLLM(config, executor=...)``.

    Args:
        engines: One for each replica of the service.
        launch_gate: Where ``launch`` waits, or None.
        launch_error: Raised by ``launch``, or None.

    Attributes:
        events: "prepare", "launch", "close" and "release", in the order in which they were called.
    """

    def __init__(
        self, engines: Sequence[Engine], *, launch_gate: Gate | None = None, launch_error: Exception | None = None
    ) -> None:
        self.events: list[str] = []
        self._engines = list(engines)
        self._launch_gate = launch_gate
        self._launch_error = launch_error

    def prepare(self, config: ServiceConfig) -> None:
        """Check that there is an engine for every replica.

        Raises:
            ConfigError: There are more or fewer.
        """
        if len(self._engines) != config.num_replicas:
            raise ConfigError(f"num_replicas={config.num_replicas}, but the executor has {len(self._engines)} engines")
        self.events.append("prepare")

    async def launch(self, config: ServiceConfig) -> tuple[list[Engine], ModelInfo]:  # noqa: ARG002 (checked in prepare)
        self.events.append("launch")
        if self._launch_gate is not None:
            await self._launch_gate.passed()
        if self._launch_error is not None:
            raise self._launch_error
        return list(self._engines), await self._engines[0].model_info()

    async def close(self) -> None:
        self.events.append("close")
        for engine in self._engines:
            await engine.shutdown()

    def release(self) -> None:
        self.events.append("release")

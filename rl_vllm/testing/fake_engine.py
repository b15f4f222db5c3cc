"""An engine without vLLM, with faults by script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from rl_vllm.errors import ConfigError, DeadlineError, EngineDiedError, UnsupportedByEngineError
from rl_vllm.testing.answers import FAKE_MODEL, FakeRequest, FakeScript, FakeWeights, answer, pieces, requests_of
from rl_vllm.testing.engine_script import FakeEngineScript, require_idle, require_room
from rl_vllm.testing.gate import Gate
from rl_vllm.types import (
    CommitReport,
    CompletionBatch,
    EmbeddingBatch,
    EmbeddingRequest,
    EngineMetrics,
    FinishReason,
    InFlight,
    KVCache,
    LoRAAdapter,
    LoRALimits,
    ModelInfo,
    RequestBatch,
    TensorSpec,
    WeightUpdate,
)

_Chunk = CompletionBatch | EngineDiedError


@dataclass(slots=True)
class _Running:
    """A request that waits for its answer."""

    requests: list[FakeRequest]
    outbox: asyncio.Queue[_Chunk]
    task: asyncio.Task[None] | None = None


class FakeEngine:
    """Implements :class:`rl_vllm.protocols.Engine`; answers by the rules of :mod:`rl_vllm.testing.answers`.

    As with a real engine, requests wait while weights are committed, and go on waiting when a commit failed, until one
    succeeds; they also wait while the engine sleeps. Tokens carry the version in force when they are made.

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
        adapters: The loaded adapters by name.
        asleep: The level it sleeps at, or None.
        weights_dropped: Whether it slept at level 2 and no commit has brought weights since; requests wait for one.
        profiling: Whether a profile is being taken.
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
        self.adapters: dict[str, LoRAAdapter] = {}
        self.asleep: int | None = None
        self.weights_dropped = False
        self.profiling = False
        self.num_shutdowns = 0
        self._replica = replica
        self._info = info
        self._specs = specs
        self._weights = FakeWeights()
        self._unpaused = Gate(is_open=True)
        self._responsive = Gate(is_open=True)
        self._running: dict[int, _Running] = {}
        self._num_chunks = 0
        self._num_tokens = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._death: EngineDiedError | None = None

    def kill(self, reason: str) -> None:
        """Be dead from now on: streams break and every call raises :class:`EngineDiedError`. Safe from any thread."""
        self._death = EngineDiedError(self._replica, reason)
        self._responsive.open()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._break_streams)

    def hang(self) -> None:
        """Stop answering, without a word: requests, health checks and every other call wait. Safe from any thread."""
        self._responsive.close()

    def go_on(self) -> None:
        """End a hang. Safe from any thread."""
        self._responsive.open()

    def _break_streams(self) -> None:
        assert self._death is not None
        for running in self._running.values():
            running.outbox.put_nowait(self._death)

    async def model_info(self) -> ModelInfo:
        await self.check_health()
        return self._info

    def stream(self, batch: RequestBatch) -> AsyncGenerator[CompletionBatch, None]:
        return self._stream(batch, lambda whole: iter([whole]))

    def stream_pieces(self, batch: RequestBatch) -> AsyncGenerator[CompletionBatch, None]:
        """One token of every sample at a time."""
        return self._stream(batch, pieces)

    async def _stream(
        self, batch: RequestBatch, split: Callable[[CompletionBatch], Iterator[CompletionBatch]]
    ) -> AsyncGenerator[CompletionBatch, None]:
        await self.check_health()
        self._loop = asyncio.get_running_loop()
        self.batches.append(batch)
        outbox: asyncio.Queue[_Chunk] = asyncio.Queue()
        numbers = batch.numbers_B.tolist()
        for row, number in enumerate(numbers):
            lora = None if batch.prompts.loras is None else batch.prompts.loras[row]
            requests = requests_of(number, batch.prompts.row(row), batch.sampling_B[row], self._info, lora=lora)
            running = self._running[number] = _Running(requests, outbox)
            running.task = asyncio.create_task(self._answer(running, split), name=f"fake-request-{number}")
        waiting = set(numbers) - self.script.lost
        try:
            while waiting:
                if self._num_chunks == self.script.dies_after:
                    self._die("as the script says")
                chunk = await outbox.get()
                if isinstance(chunk, EngineDiedError):
                    raise chunk
                self._num_tokens += len(chunk.tokens_T)
                waiting -= _ended(chunk)
                self._num_chunks += bool(_ended(chunk))
                for _ in range(2 if self.script.repeats else 1):
                    yield chunk
        finally:
            unanswered = [number for number in numbers if number in self._running]
            if self._death is None:
                self.aborted += unanswered
            await self._cancel(unanswered)

    async def _answer(self, running: _Running, split: Callable[[CompletionBatch], Iterator[CompletionBatch]]) -> None:
        first = running.requests[0]
        gate = self.script.gate(first)
        if gate is not None:
            await gate.passed()
        delay_s = self.script.delay_s(first)
        if delay_s:
            await asyncio.sleep(delay_s)
        await self._unpaused.passed()
        await self._responsive.passed()
        script = self.script.answers
        if first.row in self.script.lost:
            del self._running[first.row]
        elif first.row in script.failures or self._lacks_adapter(first):
            del self._running[first.row]
            reason = script.failures.get(first.row, f"no adapter is called {first.lora!r}")
            running.outbox.put_nowait(answer([], script, self._weights.version, {first.row: reason}))
        else:
            await self._deliver(running, split(answer(running.requests, script, self._weights.version, {})))

    async def _deliver(self, running: _Running, chunks: Iterator[CompletionBatch]) -> None:
        number = running.requests[0].row
        for index, chunk in enumerate(chunks):
            if index and self.script.piece_gate is not None:
                await self.script.piece_gate.passed()
            if number in _ended(chunk):
                del self._running[number]
            running.outbox.put_nowait(chunk)

    def _lacks_adapter(self, request: FakeRequest) -> bool:
        return request.lora is not None and request.lora not in self.adapters

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

    async def embed(self, request: EmbeddingRequest) -> AsyncGenerator[EmbeddingBatch, None]:
        """Every vector is ``[number of ids, sum of ids]``, float32; all come at once."""
        await self.check_health()
        if request.pooling.task not in self._info.tasks:
            raise UnsupportedByEngineError(f"this model's tasks are {self._info.tasks}, not {request.pooling.task!r}")
        rows = [request.prompts.row(row) for row in range(len(request.prompts))]
        values = np.array([[len(ids), ids.sum()] for ids in rows], np.float32).reshape(-1, 2)
        yield EmbeddingBatch(request.numbers_B, values)

    async def abort(self, numbers: Sequence[int]) -> None:
        """Answer the requests that still run with no further token and the finish reason ``ABORT``."""
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

    async def prometheus(self) -> str:
        """One metric: the tokens it made."""
        await self.check_health()
        return f"# TYPE vllm:generation_tokens_total counter\nvllm:generation_tokens_total {self._num_tokens}.0\n"

    async def check_health(self) -> None:
        await self._responsive.passed()
        if self._death is not None:
            raise self._death

    async def engine_config(self) -> object:
        """The facts of its model."""
        await self.check_health()
        return self._info

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
        self.weights_dropped = False
        if self.asleep is None:
            self._unpaused.open()
        return report

    async def reset_prefix_cache(self) -> bool:
        await self.check_health()
        return not self._running

    async def reset_mm_cache(self) -> None:
        await self.check_health()

    async def lora_limits(self) -> LoRALimits | None:
        await self.check_health()
        return self.script.lora_limits

    async def add_lora(self, adapter: LoRAAdapter) -> None:
        """Any path will do."""
        await self.check_health()
        if self.script.adapter_gate is not None:
            await self.script.adapter_gate.passed()
        if self.script.adapter_error is not None:
            raise self.script.adapter_error
        if self.adapters.get(adapter.name) != adapter:
            require_room(adapter, self.adapters, self.script.lora_limits)
            self.adapters[adapter.name] = adapter

    async def remove_lora(self, name: str) -> bool:
        await self.check_health()
        require_idle(name, (running.requests[0] for running in self._running.values()))
        return self.adapters.pop(name, None) is not None

    async def list_loras(self) -> tuple[LoRAAdapter, ...]:
        await self.check_health()
        return tuple(sorted(self.adapters.values(), key=lambda adapter: adapter.number))

    async def pin_lora(self, name: str) -> None:
        await self.check_health()
        if name not in self.adapters:
            raise ConfigError(f"no adapter is called {name!r}: there are {sorted(self.adapters)}")

    async def sleep(self, level: int) -> None:
        await self.check_health()
        self.asleep = level
        self.weights_dropped |= level == 2
        self._unpaused.close()

    async def wake_up(self, tags: tuple[str, ...] | None) -> None:
        """Waking the weights alone leaves it asleep."""
        await self.check_health()
        if tags is None or "kv_cache" in tags:
            self.asleep = None
            if not self.weights_dropped:
                self._unpaused.open()

    async def is_sleeping(self) -> bool:
        await self.check_health()
        return self.asleep is not None

    async def start_profile(self) -> None:
        await self.check_health()
        self.profiling = True

    async def stop_profile(self) -> None:
        await self.check_health()
        self.profiling = False

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


def _ended(chunk: CompletionBatch) -> set[int]:
    """Requests that a chunk answers to the end: its failures, and those whose last sample has finished in it."""
    numbers = chunk.numbers_N[chunk.finish_N != FinishReason.UNFINISHED].tolist()
    going_on = set(chunk.numbers_N[chunk.finish_N == FinishReason.UNFINISHED].tolist())
    return ({*numbers} - going_on) | {failure.number for failure in chunk.failures}

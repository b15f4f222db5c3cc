"""A service of another process."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import answer_challenge, deliver_challenge
from typing import Any, Self, TypeVar

from rl_vllm.errors import DeadlineError, ServiceNotRunningError
from rl_vllm.service.calls import GRACE_S
from rl_vllm.service.line import BATCH, HANDSHAKE_TIMEOUT_S, NEXT, STREAM, Hello, Pipe, Ticket, pipe_over, readable
from rl_vllm.types import (
    BadPrompt,
    CommitReport,
    CompletionBatch,
    InFlight,
    KVCache,
    ModelInfo,
    PromptBatch,
    SamplingConfig,
    TensorSpec,
    WeightReceiver,
    WeightUpdate,
)

T = TypeVar("T")

# The owner's own deadlines, which say more, come first.
_GRACE_S = 2 * GRACE_S


class RemoteService:
    """Implements :class:`rl_vllm.protocols.AsyncGenerationService` by asking the process that owns the service.

    It is what a running service becomes when it is unpickled elsewhere. Every thread has a connection of its own, and
    so has every call that is awaited. A call whose caller goes away is stopped at the owner.

    Args:
        ticket: Whom to ask.
        attach: Makes a service of a ticket: what copies of this one are unpickled with.
    """

    def __init__(self, ticket: Ticket, attach: Callable[[Ticket], object]) -> None:
        self._ticket = ticket
        self._attach = attach
        self._mine = threading.local()

    @property
    def name(self) -> str:
        """The service's name."""
        return self._ticket.name

    @property
    def num_replicas(self) -> int:
        count: int = self._ask("num_replicas")
        return count

    @property
    def weight_version(self) -> int:
        version: int = self._ask("weight_version")
        return version

    def model_info(self) -> ModelInfo:
        info: ModelInfo = self._ask("model_info")
        return info

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        specs: tuple[TensorSpec, ...] = self._ask("weight_specs")
        return specs

    def weight_receivers(self) -> tuple[WeightReceiver, ...]:
        receivers: tuple[WeightReceiver, ...] = self._ask("weight_receivers")
        return receivers

    def stage_weights(self, update: WeightUpdate, *, timeout_s: float) -> None:
        """As :meth:`rl_vllm.protocols.GenerationService.stage_weights`."""
        self._ask("stage_weights", update, limit_s=timeout_s + _GRACE_S, timeout_s=timeout_s)

    def commit_weights(
        self, update: WeightUpdate, *, in_flight: InFlight, kv: KVCache, timeout_s: float
    ) -> tuple[CommitReport, ...]:
        """As :meth:`rl_vllm.protocols.GenerationService.commit_weights`."""
        options = {"in_flight": in_flight, "kv": kv, "timeout_s": timeout_s}
        reports: tuple[CommitReport, ...] = self._ask("commit_weights", update, limit_s=timeout_s + _GRACE_S, **options)
        return reports

    def generate_batch(
        self,
        prompts: PromptBatch,
        sampling: SamplingConfig | Sequence[SamplingConfig],
        *,
        timeout_s: float | None = None,
        on_bad_prompt: BadPrompt = BadPrompt.RAISE,
        actor_index: int | None = None,
    ) -> CompletionBatch:
        """As :meth:`rl_vllm.protocols.GenerationService.generate_batch`."""
        options = {"timeout_s": timeout_s, "on_bad_prompt": on_bad_prompt, "actor_index": actor_index}
        limit_s = None if timeout_s is None else timeout_s + _GRACE_S
        batch: CompletionBatch = self._ask(BATCH, prompts, sampling, limit_s=limit_s, **options)
        return batch

    async def agenerate_batch(
        self,
        prompts: PromptBatch,
        sampling: SamplingConfig | Sequence[SamplingConfig],
        *,
        timeout_s: float | None = None,
        on_bad_prompt: BadPrompt = BadPrompt.RAISE,
        actor_index: int | None = None,
    ) -> CompletionBatch:
        """As :meth:`rl_vllm.protocols.AsyncGenerationService.agenerate_batch`."""
        options = {"timeout_s": timeout_s, "on_bad_prompt": on_bad_prompt, "actor_index": actor_index}
        with await asyncio.to_thread(Line, self._ticket, BATCH) as line:
            limit_s = (line.hello.request_timeout_s if timeout_s is None else timeout_s) + _GRACE_S
            batch: CompletionBatch = await line.aask(BATCH, (prompts, sampling), options, limit_s)
            return batch

    async def stream_batch(
        self,
        prompts: PromptBatch,
        sampling: SamplingConfig | Sequence[SamplingConfig],
        *,
        timeout_s: float | None = None,
        on_bad_prompt: BadPrompt = BadPrompt.RAISE,
        actor_index: int | None = None,
    ) -> AsyncGenerator[CompletionBatch, None]:
        """As :meth:`rl_vllm.protocols.AsyncGenerationService.stream_batch`; what is unread waits at the owner."""
        options = {"timeout_s": timeout_s, "on_bad_prompt": on_bad_prompt, "actor_index": actor_index}
        with await asyncio.to_thread(Line, self._ticket, STREAM) as line:
            limit_s = (line.hello.request_timeout_s if timeout_s is None else timeout_s) + _GRACE_S
            await line.aask(STREAM, (prompts, sampling), options, limit_s)
            while (chunk := await line.aask(NEXT, (), {}, limit_s)) is not None:
                yield chunk

    def _ask(self, call: str, *args: object, limit_s: float | None = None, **options: object) -> Any:
        """Ask over this thread's connection."""
        line: Line | None = self._mine.__dict__.get("line")
        # A fork must not speak on its parent's connection.
        if line is None or line.pid != os.getpid() or line.is_closed:
            line = self._mine.line = Line(self._ticket, call)
        if limit_s is None:
            limit_s = (line.hello.request_timeout_s if call == BATCH else line.hello.call_timeout_s) + _GRACE_S
        return line.ask(call, args, options, limit_s)

    def __reduce__(self) -> tuple[Callable[[Ticket], object], tuple[Ticket]]:
        return self._attach, (self._ticket,)

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self

    def __repr__(self) -> str:
        return f"RemoteService({self._ticket.name!r} at {self._ticket.host}:{self._ticket.port})"


class Line:
    """One connection to the owner of a service, for one question at a time; broken off when a question is.

    Args:
        ticket: Whom to ask.
        call: What for; errors name it.

    Raises:
        ServiceNotRunningError: Nobody answers there, or somebody else.
    """

    def __init__(self, ticket: Ticket, call: str) -> None:
        self.pid = os.getpid()
        self._in_use = threading.Lock()
        self._closing = False
        self._where = f"service {ticket.name!r} at {ticket.host}:{ticket.port}"
        try:
            end = socket.create_connection((ticket.host, ticket.port), timeout=HANDSHAKE_TIMEOUT_S)
            self._pipe: Pipe = pipe_over(end)
        except OSError as error:
            raise self._gone(call, error) from error
        try:
            self._require_word()
            answer_challenge(self._pipe, ticket.authkey)
            deliver_challenge(self._pipe, ticket.authkey)
            self._require_word()
            self.hello: Hello = self._pipe.recv()
        except (OSError, EOFError, AuthenticationError) as error:
            self.close()
            raise self._gone(call, error) from error

    @property
    def is_closed(self) -> bool:
        return self._pipe.closed

    def ask(self, call: str, args: tuple[Any, ...], options: dict[str, Any], limit_s: float) -> Any:
        """Ask, and block for the answer; an error of the owner is raised as itself.

        Raises:
            DeadlineError: None came within ``limit_s`` seconds.
            ServiceNotRunningError: The owner has gone.
        """
        try:
            self._pipe.send((call, args, options))
            if not self._pipe.poll(limit_s):
                raise DeadlineError(f"{call}() of {self._where}", limit_s)
            done, value = self._pipe.recv()
        except BaseException as error:
            # Also when the caller is interrupted: the answer would be taken for the next question's.
            self.close()
            if isinstance(error, EOFError | OSError) and not isinstance(error, DeadlineError):
                raise self._gone(call, error) from error
            raise
        if not done:
            raise value
        return value

    async def aask(self, call: str, args: tuple[Any, ...], options: dict[str, Any], limit_s: float) -> Any:
        """As :meth:`ask`, awaited; its user closes the connection whatever happens."""
        deadline = asyncio.timeout(limit_s)
        try:
            async with deadline:
                await asyncio.to_thread(self._use, lambda: self._pipe.send((call, args, options)))
                await readable(self._pipe)
                done, value = await asyncio.to_thread(self._use, self._pipe.recv)
        except (EOFError, OSError) as error:
            # A machine that has gone is told of by a TimeoutError, too.
            if deadline.expired():
                raise DeadlineError(f"{call}() of {self._where}", limit_s) from None
            raise self._gone(call, error) from error
        if not done:
            raise value
        return value

    def close(self) -> None:
        """The owner stops what it does for this connection. Idempotent."""
        self._closing = True
        # A thread that is left alone with it by a caller that was cancelled closes it itself.
        if self._in_use.acquire(blocking=False):
            self._pipe.close()
            self._in_use.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _use(self, work: Callable[[], T]) -> T:
        with self._in_use:
            try:
                return work()
            finally:
                if self._closing:
                    self._pipe.close()

    def _require_word(self) -> None:
        if not self._pipe.poll(HANDSHAKE_TIMEOUT_S):
            raise TimeoutError(f"no word within {HANDSHAKE_TIMEOUT_S:g} s")

    def _gone(self, call: str, error: BaseException) -> ServiceNotRunningError:
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return ServiceNotRunningError(f"gone: {self._where} does not answer ({reason})", f"{call}()")

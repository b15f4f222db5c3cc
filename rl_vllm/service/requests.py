"""Single requests by their id: added, streamed, aborted, looked up."""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, Unpack

from rl_vllm.errors import ConfigError, GenerationError, ServiceNotRunningError, UnknownRequestError
from rl_vllm.service.core import Core
from rl_vllm.service.inputs import Prompts
from rl_vllm.service.jobs import GenerateJob, RequestOptions
from rl_vllm.service.loop import with_deadline
from rl_vllm.service.outbox import Outbox
from rl_vllm.service.outputs import end_samples, join_pieces
from rl_vllm.types import CompletionBatch, FinishReason, RequestStatus, SamplingConfig

if TYPE_CHECKING:
    from rl_vllm.engine.params import SamplingParams

logger = logging.getLogger(__name__)

Spawn = Callable[[Coroutine[Any, Any, None]], object]


def new_id() -> str:
    """An id that no request had before."""
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingRequest:
    """One request as it was given.

    Attributes:
        request_id: Unique among those under way.
        prompt: Its text, or its token ids where no text was given.
        params: Sampling settings.
        arrival_time: When it came, in seconds since the epoch of ``time.time``.
        lora_request: Its adapter as the caller named it, or None.
    """

    request_id: str
    prompt: str | tuple[int, ...]
    params: SamplingConfig
    arrival_time: float
    lora_request: object = None

    def describe(self, max_log_len: int | None) -> str:
        """One line for a log; of the prompt at most ``max_log_len`` characters or ids, None means all."""
        shown = self.prompt if max_log_len is None else self.prompt[:max_log_len]
        more = "..." if len(shown) < len(self.prompt) else ""
        adapter = "" if self.lora_request is None else f" lora={self.lora_request}"
        return f"request {self.request_id}: prompt={shown!r}{more} params={self.params}{adapter}"


class LiveRequest:
    """A request and what has become of it; changed on the service's loop only.

    Args:
        record: The request as it was given.
        work: What is to be done for it.
        is_read: Somebody reads its pieces as they come; otherwise its outbox stays empty.
    """

    def __init__(self, record: StreamingRequest, work: GenerateJob, *, is_read: bool = True) -> None:
        self.record = record
        self.work = work
        self.status = RequestStatus.WAITING
        self.pieces: list[CompletionBatch] = []
        self.outbox: Outbox[CompletionBatch] = Outbox()
        self.done: Future[CompletionBatch] = Future()
        self.stream: AsyncGenerator[CompletionBatch, None] | None = None
        self.task: asyncio.Task[None] | None = None
        self.is_read = is_read
        self.is_aborted = False
        self.is_given_up = False

    def take(self, chunk: CompletionBatch) -> None:
        """Note new tokens; the request runs from the first one on."""
        if chunk.failures:
            raise GenerationError(tuple((failure.number, failure.reason) for failure in chunk.failures))
        self.pieces.append(chunk)
        if len(chunk.tokens_T):
            self.status = RequestStatus.RUNNING
        if self.is_read:
            self.outbox.put(chunk)

    def finish(self) -> None:
        """Everything came."""
        whole = join_pieces(self.pieces)
        aborted = self.is_aborted and bool((whole.finish_N == FinishReason.ABORT).any())
        self.status = RequestStatus.CANCELLED if aborted else RequestStatus.COMPLETED
        self.outbox.end()
        self.done.set_result(whole)

    def cut_short(self) -> None:
        """It was cancelled: an aborted one ends with what came, one that nobody wants or a closed service without."""
        self.status = RequestStatus.CANCELLED
        if self.is_aborted:
            rest = end_samples(join_pieces(self.pieces), self.record.params.n, FinishReason.ABORT)
            self.pieces.append(rest)
            if self.is_read:
                self.outbox.put(rest)
            self.outbox.end()
            self.done.set_result(join_pieces(self.pieces))
            return
        name = f"request {self.record.request_id}"
        error = (
            GenerationError(((0, "its stream was closed before its end"),))
            if self.is_given_up
            else ServiceNotRunningError("shut down", name)
        )
        self.outbox.end(error)
        self.done.set_exception(error)

    def fail(self, error: BaseException, status: RequestStatus) -> None:
        """It ended otherwise; whoever waits gets the error."""
        self.status = status
        self.outbox.end(error)
        self.done.set_exception(error)

    def remembered(self) -> Self:
        """What to keep of one that has ended: its status and, in ``done``, one joined batch or the error.

        Whoever reads its stream has this one, with all that came.
        """
        self.pieces = []
        kept = copy.copy(self)
        kept.outbox = Outbox()
        kept.stream = kept.task = None
        return kept

    def ended(self) -> Future[None]:
        """Done when the request is; each caller gets one of its own, to cancel as it likes."""
        mine: Future[None] = Future()

        def tell(_done: Future[CompletionBatch]) -> None:
            if mine.set_running_or_notify_cancel():
                mine.set_result(None)

        self.done.add_done_callback(tell)
        return mine


class RequestManager:
    """The requests of one service that have an id.

    The coroutines run on the service's loop only. The other methods may be called from any thread, but
    :meth:`abort_request` waits for that loop, so not from the loop's own. Ended requests are remembered, the latest
    ``keep_finished`` of them.

    Args:
        core: The running service's parts, or the error that says why there are none; given the name of the call.
        spawn: Starts a coroutine on the service's loop.
        add: The service's ``add_request``, which reads a prompt and calls :meth:`start`.
        abort: The service's ``abort``, which runs the coroutine :meth:`abort` on its loop and waits for it.
        keep_finished: How many that have ended are remembered.

    Attributes:
        max_log_len: Characters or ids of a prompt that are logged; None means all.
        disable_log_requests: Log no requests.
    """

    def __init__(
        self,
        core: Callable[[str], Core],
        spawn: Spawn,
        *,
        add: Callable[..., str],
        abort: Callable[[str], int],
        keep_finished: int = 1024,
    ) -> None:
        self.max_log_len: int | None = None
        self.disable_log_requests = True
        self._core = core
        self._spawn = spawn
        self._add = add
        self._abort = abort
        self._lock = threading.Lock()
        self._live: dict[str, LiveRequest] = {}
        self._ended: OrderedDict[str, LiveRequest] = OrderedDict()
        self._keep_finished = keep_finished

    def add_request(
        self,
        prompt: Prompts | None = None,
        sampling_params: SamplingParams | SamplingConfig | None = None,
        *,
        prompt_token_ids: object = None,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> str:
        """Start one prompt's request and return its id at once, as the service's ``add_request`` does.

        Arguments and errors are those of that method.
        """
        return self._add(prompt, sampling_params, prompt_token_ids=prompt_token_ids, request_id=request_id, **options)

    def abort_request(self, request_id: str) -> bool:
        """Stop a request in its engine, as the service's ``abort`` does; who waits for it gets what was made.

        Returns:
            Whether it was still under way.

        Raises:
            UnknownRequestError: None of this id was added, or it ended too long ago.
        """
        return self._abort(request_id) > 0

    def start(self, work: GenerateJob, request_id: str, *, is_read: bool = True) -> LiveRequest:
        """Start one prompt's request; ``is_read`` says whether somebody reads its pieces as they come.

        Raises:
            ConfigError: There are several prompts, or a request of this id is under way.
        """
        if len(work.job.prompts) != 1:
            raise ConfigError(f"a request is one prompt, got {len(work.job.prompts)}: use generate() for many")
        if not work.job.rows:
            raise ConfigError("on_bad_prompt='mark' is for batches: a single request raises")
        name = request_id
        text = work.job.parsed.texts[0]
        record = StreamingRequest(
            request_id=name,
            prompt=tuple(work.job.prompts.row(0).tolist()) if text is None else text,
            params=work.settings[0],
            arrival_time=time.time(),
            lora_request=work.job.adapters[0],
        )
        live = LiveRequest(record, work, is_read=is_read)
        with self._lock:
            if name in self._live:
                raise ConfigError(f"request {name!r} is under way already: give another id")
            self._ended.pop(name, None)
            self._live[name] = live
        if not self.disable_log_requests:
            logger.info("%s", record.describe(self.max_log_len))
        try:
            self._spawn(self._run(live))
        except BaseException as error:
            live.fail(error, RequestStatus.FAILED)
            self._retire(live)
            raise
        return live

    def get(self, request_id: str) -> LiveRequest:
        """What is known of a request.

        Raises:
            UnknownRequestError: None of this id was added, or it ended too long ago.
        """
        with self._lock:
            found = self._live.get(request_id) or self._ended.get(request_id)
        if found is None:
            raise UnknownRequestError(request_id)
        return found

    def get_request_status(self, request_id: str) -> RequestStatus:
        """Where a request is now: it waits until the engine has made its first token.

        Raises:
            UnknownRequestError: None of this id was added, or it ended too long ago.
        """
        return self.get(request_id).status

    def __len__(self) -> int:
        """Requests under way."""
        return len(self._live)

    async def abort(self, request_id: str) -> bool:
        """Stop a request in its engine; who waits for it gets what was made. On the service's loop.

        Returns:
            Whether it was still under way.

        Raises:
            UnknownRequestError: None of this id was added, or it ended too long ago.
        """
        live = self.get(request_id)
        if live.status.is_final:
            return False
        live.is_aborted = True
        if live.task is None:
            # Not begun: its task looks at the mark first.
            return True
        dispatcher = self._core("abort()").dispatcher
        if live.stream is None:
            live.task.cancel()
        else:
            # An engine that does not answer leaves what was delivered.
            with suppress(TimeoutError):
                await dispatcher.abort(live.stream)
                await asyncio.wait([live.task], timeout=dispatcher.give_up_timeout_s)
            live.task.cancel()
        await asyncio.wait([live.task])
        return True

    async def give_up(self, live: LiveRequest) -> None:
        """Stop a request for whose answer nobody waits; return when its engine has been told. On the service's loop."""
        live.is_given_up = True
        if live.task is not None:
            live.task.cancel()
            await asyncio.wait([live.task])

    async def close(self) -> None:
        """End everything because the service ends. On the service's loop."""
        tasks = [live.task for live in list(self._live.values()) if live.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, live: LiveRequest) -> None:
        live.task = asyncio.current_task()
        job, name = live.work.job, live.record.request_id
        try:
            if live.is_aborted or live.is_given_up:
                raise asyncio.CancelledError
            await with_deadline(lambda: self._stream(live), job.limit_s, f"request {name}")
            live.finish()
        except asyncio.CancelledError:
            live.cut_short()
            raise
        except Exception as error:  # noqa: BLE001 (handed to everyone who waits)
            live.status = RequestStatus.FAILED
            live.outbox.end(error)
            live.done.set_exception(error)
        finally:
            self._retire(live)

    async def _stream(self, live: LiveRequest) -> None:
        core, job = self._core("add_request()"), live.work.job
        with core.sleep.awake("add_request()", job.only):
            async with core.policies.lease(job.prompts, job.adapters) as lease:
                live.stream = core.dispatcher.stream_pieces(lease.prompts, job.rows, live.work.settings, only=job.only)
                async with aclosing(live.stream):
                    async for chunk in live.stream:
                        live.take(lease.label(chunk))

    def _retire(self, live: LiveRequest) -> None:
        name = live.record.request_id
        with self._lock:
            if self._live.get(name) is live:
                del self._live[name]
            self._ended[name] = live.remembered()
            while len(self._ended) > self._keep_finished:
                self._ended.popitem(last=False)

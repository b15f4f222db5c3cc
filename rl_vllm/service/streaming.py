"""Responses while they are made, and single requests by their id."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as WaitTimeoutError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Unpack

from rl_vllm.config import ServiceConfig, require_choice
from rl_vllm.errors import DeadlineError, ServiceNotRunningError
from rl_vllm.service import jobs, results
from rl_vllm.service.calls import blocking, on_loop, own_limit
from rl_vllm.service.generation import GenerationCalls
from rl_vllm.service.inputs import Prompts
from rl_vllm.service.jobs import RequestOptions
from rl_vllm.service.loop import across
from rl_vllm.service.outputs import RequestOutput
from rl_vllm.service.pieces import MODES, PieceReader
from rl_vllm.service.requests import LiveRequest, RequestManager, new_id
from rl_vllm.service.streams import AsyncOutputStream, GiveUp, OutputStream, Start
from rl_vllm.types import RequestStatus, SamplingConfig

if TYPE_CHECKING:
    from rl_vllm.engine.params import SamplingParams

Mode = Literal["delta", "cumulative"]


@dataclass(frozen=True, slots=True)
class _Asked:
    """One prompt's request as the caller gave it."""

    prompt: Prompts | None
    sampling_params: SamplingParams | SamplingConfig | None
    prompt_token_ids: object
    request_id: str


class StreamingCalls(GenerationCalls):
    """Streams, and requests that are added now and asked for later."""

    def __init__(self, config: ServiceConfig) -> None:
        super().__init__(config)
        self.requests = RequestManager(self._running, self._spawn, add=self.add_request, abort=self.abort)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> object:
        assert self._loop is not None
        return self._loop.submit(work)

    def stream_generate(
        self,
        prompt: Prompts | None = None,
        sampling_params: SamplingParams | SamplingConfig | None = None,
        *,
        prompt_token_ids: object = None,
        mode: Mode = "delta",
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> OutputStream:
        """Answer one prompt, yielding what is new as it is made.

        Args:
            prompt: As for :meth:`generate`, but one.
            sampling_params: vLLM's or ours; with ``n`` > 1 an output holds the samples that went on.
            prompt_token_ids: Its ids, in place of ``prompt``.
            mode: "delta" yields new text, ids, logprobs and versions; "cumulative" all so far. The texts of all deltas,
                joined, are the text that :meth:`generate` gives.
            request_id: For :meth:`abort` and :meth:`get_request_status`; None means one is made.
            **options: :class:`RequestOptions`.

        Returns:
            An iterator of :class:`RequestOutput`, a context manager; the request begins at once. Closing or dropping it
            aborts the request.

        Raises:
            ConfigError: The mode is not one, or a request of this id is under way; and what :meth:`generate` raises.
        """
        asked = _Asked(prompt, sampling_params, prompt_token_ids, request_id or new_id())
        stream = OutputStream(*self._parts("stream_generate()", asked, mode, options))
        stream.begin()
        return stream

    def astream_generate(
        self,
        prompt: Prompts | None = None,
        sampling_params: SamplingParams | SamplingConfig | None = None,
        *,
        prompt_token_ids: object = None,
        mode: Mode = "delta",
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncOutputStream:
        """As :meth:`stream_generate`, for a reader on any event loop.

        ``async for output in service.astream_generate(...)`` begins with the first output that is asked for, which
        raises what is wrong with the request; ``stream = await service.astream_generate(...)`` begins at once.
        """
        asked = _Asked(prompt, sampling_params, prompt_token_ids, request_id or new_id())
        return AsyncOutputStream(*self._parts("astream_generate()", asked, mode, options))

    def add_request(
        self,
        prompt: Prompts | None = None,
        sampling_params: SamplingParams | SamplingConfig | None = None,
        *,
        prompt_token_ids: object = None,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> str:
        """Start one prompt's request and return its id at once; :meth:`get_request_output` waits for the answer.

        Arguments and errors as for :meth:`stream_generate`.
        """
        asked = _Asked(prompt, sampling_params, prompt_token_ids, request_id or new_id())
        return self._start("add_request()", asked, options, is_read=False).record.request_id

    async def aadd_request(
        self,
        prompt: Prompts | None = None,
        sampling_params: SamplingParams | SamplingConfig | None = None,
        *,
        prompt_token_ids: object = None,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> str:
        """As :meth:`add_request`, on any event loop."""
        asked = _Asked(prompt, sampling_params, prompt_token_ids, request_id or new_id())
        await asyncio.to_thread(self._start, "aadd_request()", asked, options, is_read=False)
        return asked.request_id

    def get_request_output(self, request_id: str, timeout_seconds: float | None = None) -> RequestOutput:
        """Wait for a request's end; an aborted one gives what was made, with the finish reason ``abort``.

        Args:
            request_id: From :meth:`add_request`, or given to :meth:`stream_generate`.
            timeout_seconds: Limit for this wait, which does not end the request; None means the configured one.

        Raises:
            UnknownRequestError: None of this id was added, or it ended too long ago.
            DeadlineError: It has not ended, or ended because its own limit had passed.
            GenerationError: The engine refused it.
        """
        live = self.requests.get(request_id)
        limit_s = jobs.limit_of(timeout_seconds, self.config)
        try:
            live.ended().result(limit_s)
        except WaitTimeoutError:
            raise DeadlineError(f"request {request_id}", limit_s) from None
        return self._whole(live)

    async def aget_request_output(self, request_id: str, timeout_seconds: float | None = None) -> RequestOutput:
        """As :meth:`get_request_output`, awaited on any event loop; cancelling the caller leaves the request alone."""
        live = self.requests.get(request_id)
        limit_s = jobs.limit_of(timeout_seconds, self.config)
        try:
            async with asyncio.timeout(limit_s):
                await across(live.ended())
        except TimeoutError:
            raise DeadlineError(f"request {request_id}", limit_s) from None
        return await asyncio.to_thread(self._whole, live)

    def get_request_status(self, request_id: str) -> RequestStatus:
        """Where a request is now; see :meth:`RequestManager.get_request_status`."""
        return self.requests.get_request_status(request_id)

    @on_loop(own_limit)
    async def aabort(self, request_id: str | Iterable[str]) -> int:
        """Stop one request or several in their engines; who waits for one gets what was made.

        Returns:
            How many were still under way.

        Raises:
            UnknownRequestError: None of this id was added, or it ended too long ago.
        """
        names = [request_id] if isinstance(request_id, str) else list(request_id)
        return sum(await asyncio.gather(*(self.requests.abort(name) for name in names)))

    abort = blocking(aabort)

    def set_log_limits(self, *, max_log_len: int | None = None, disable_log_requests: bool = False) -> None:
        """Log every request that is added from now on, with at most ``max_log_len`` of its prompt; or none."""
        self.requests.max_log_len = max_log_len
        self.requests.disable_log_requests = disable_log_requests

    def _start(self, call: str, asked: _Asked, options: RequestOptions, *, is_read: bool) -> LiveRequest:
        work = self._read(call, asked.prompt, asked.sampling_params, asked.prompt_token_ids, options)
        try:
            return self.requests.start(work, asked.request_id, is_read=is_read)
        except CancelledError:
            raise ServiceNotRunningError("shut down", call) from None

    def _parts(self, call: str, asked: _Asked, mode: Mode, options: RequestOptions) -> tuple[str, Start, GiveUp]:
        """What a stream is built from; checks what can be checked before the prompt is read."""
        require_choice("mode", mode, MODES)
        self._running(call)

        def start() -> tuple[LiveRequest, PieceReader]:
            live = self._start(call, asked, options, is_read=True)
            cumulative = mode == "cumulative"
            return live, PieceReader(live, self._own_tokenizer, self.model_info(), cumulative=cumulative)

        return asked.request_id, start, self._give_up

    def _give_up(self, live: LiveRequest) -> Future[None]:
        assert self._loop is not None
        return self._loop.submit(self.requests.give_up(live))

    def _whole(self, live: LiveRequest) -> RequestOutput:
        output = results.present(live.work, [[live.done.result(0)]], self._own_tokenizer)
        if isinstance(output, list):
            (output,) = output
        output.request_id = live.record.request_id
        return output

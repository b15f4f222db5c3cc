"""The requests an engine works on: sent in batches, gathered as they become ready, aborted by number.

vLLM's front end gives every request a collector of its own, and its ``generate`` a task to wait on it. Here one stream
listens to all its collectors at once. The requests of one batch are sent one after the other without giving the loop
away, so an abort finds each request in one of three states: not known yet, known and not sent, or sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, PoolingOutput, PoolingRequestOutput, RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector

from rl_vllm.engine.death import reason_of, why_it_died
from rl_vllm.engine.pieces import cut_piece
from rl_vllm.errors import EngineDiedError
from rl_vllm.types import FinishReason, RequestFailure

# Results that become ready within this time of each other travel together: on a busy engine several do in one step.
_COALESCE_S = 0.004
# The loop gets a turn after this many requests were sent.
_SENT_PER_TURN = 32
# Aborts that came before their request, which a message queue may cause, are remembered for this many requests.
_MAX_EARLY_ABORTS = 65_536

Output: TypeAlias = RequestOutput | PoolingRequestOutput


@dataclass(frozen=True, slots=True)
class Order:
    """One request before it is sent, or the reason why it cannot be."""

    number: int
    prompt: list[int]
    params: SamplingParams | PoolingParams
    lora: LoRARequest | None = None
    refusal: str | None = None


@dataclass(slots=True)
class Ready:
    """What became ready together.

    Attributes:
        outputs: Request numbers with vLLM's final outputs, or with what it made since the last time.
        begins: Of pieces: number of tokens each sample, by request and index, had before its piece.
        failures: Requests that get no further output.
    """

    outputs: list[tuple[int, Output]] = field(default_factory=list)
    begins: dict[tuple[int, int], int] = field(default_factory=dict)
    failures: list[RequestFailure] = field(default_factory=list)


class _Inbox:
    """Where the requests of one stream ring when they have something."""

    def __init__(self) -> None:
        self.rung: list[_Ticket] = []
        self.arrived = asyncio.Event()


@dataclass(slots=True, eq=False)
class _Ticket:
    """One request's place in its stream; stands in for the event of its collector.

    Attributes:
        sent: Number of tokens delivered of each sample, when pieces are.
    """

    order: Order
    inbox: _Inbox
    queue: RequestOutputCollector | None = None
    failure: RequestFailure | None = None
    is_aborted: bool = False
    is_done: bool = False
    has_rung: bool = False
    sent: dict[int, int] = field(default_factory=dict)

    def set(self) -> None:
        """Called by the collector when it has something new."""
        if not self.has_rung:
            self.has_rung = True
            self.inbox.rung.append(self)
            self.inbox.arrived.set()

    def clear(self) -> None:
        """Called by the collector when it was emptied, and by whoever empties it."""
        self.has_rung = False


class Requests:
    """All unfinished requests of one engine.

    Args:
        llm: The engine.
        replica: Index of the replica it serves.
    """

    def __init__(self, llm: AsyncLLM, replica: int) -> None:
        self._llm = llm
        self._replica = replica
        self._open: dict[int, _Ticket] = {}
        self._early: dict[int, None] = {}

    async def run(self, orders: Sequence[Order], *, pieces: bool = False) -> AsyncGenerator[Ready, None]:
        """Send requests and yield what they become; closing the iterator aborts what is unfinished.

        Raises:
            EngineDiedError: The engine is gone; what was not yielded is lost.
        """
        inbox = _Inbox()
        tickets = [_Ticket(order, inbox) for order in orders]
        self._open |= {ticket.order.number: ticket for ticket in tickets}
        try:
            await self._send(tickets)
            while not all(ticket.is_done for ticket in tickets):
                await inbox.arrived.wait()
                await asyncio.sleep(_COALESCE_S)
                inbox.arrived.clear()
                rung, inbox.rung = inbox.rung, []
                ready = Ready()
                for ticket in rung:
                    ticket.has_rung = False
                    if not ticket.is_done:
                        self._take(ticket, ready, pieces=pieces)
                if ready.outputs or ready.failures:
                    yield ready
        finally:
            await self._forget(tickets)

    async def abort(self, numbers: Sequence[int]) -> None:
        """Stop work at once; whoever runs them gets what was made, with the finish reason ``abort``."""
        sent: list[str] = []
        for number in numbers:
            ticket = self._open.get(number)
            if ticket is None:
                self._early[number] = None
            elif ticket.queue is None:
                ticket.is_aborted = True
            else:
                sent.append(ticket.queue.request_id)
        while len(self._early) > _MAX_EARLY_ABORTS:
            del self._early[next(iter(self._early))]
        await self._stop(sent)

    async def give_up(self, number: int) -> None:
        """Stop a request whose stream has reported it as failed; nothing more is yielded of it."""
        ticket = self._open.pop(number, None)
        if ticket is not None and not ticket.is_done:
            ticket.is_done = True
            if ticket.queue is not None:
                await self._stop([ticket.queue.request_id])

    async def _send(self, tickets: Sequence[_Ticket]) -> None:
        for index, ticket in enumerate(tickets):
            if index and index % _SENT_PER_TURN == 0:
                await asyncio.sleep(0)
            if ticket.order.number in self._early:
                del self._early[ticket.order.number]
                ticket.is_aborted = True
            if ticket.order.refusal is not None:
                ticket.failure = RequestFailure(ticket.order.number, ticket.order.refusal)
            if ticket.is_aborted or ticket.failure is not None:
                ticket.set()
            else:
                await self._send_one(ticket)

    async def _send_one(self, ticket: _Ticket) -> None:
        order = ticket.order
        name = str(order.number)
        try:
            queue = await self._llm.add_request(name, tokens_input(order.prompt), order.params, lora_request=order.lora)
        except Exception as error:
            if self._llm.errored:
                raise EngineDiedError(self._replica, why_it_died(self._llm)) from error
            # vLLM knows it already when it is refused late.
            await self._llm.abort(name)
            ticket.failure = RequestFailure(order.number, reason_of(error))
            ticket.set()
            return
        except BaseException:
            await self._llm.abort(name)
            raise
        ticket.queue = queue
        queue.ready = ticket
        if queue.output is not None:
            ticket.set()
        if ticket.is_aborted:
            await self._stop([queue.request_id])

    def _take(self, ticket: _Ticket, ready: Ready, *, pieces: bool) -> None:
        number = ticket.order.number
        if ticket.failure is not None:
            ready.failures.append(ticket.failure)
            ticket.is_done = True
        elif ticket.queue is None:
            ready.outputs.append((number, _aborted_before_it_began(ticket.order)))
            ticket.is_done = True
        else:
            try:
                output = ticket.queue.get_nowait()
            except Exception as error:
                # vLLM hands an error to a collector only when its front end cannot go on.
                reason = why_it_died(self._llm) if isinstance(error, EngineDeadError) else reason_of(error)
                raise EngineDiedError(self._replica, reason) from error
            if output is None:
                return
            if pieces:
                assert isinstance(output, RequestOutput), "only generation comes in pieces"
                begins = cut_piece(output, ticket.queue.request_id, self._llm.output_processor, ticket.sent)
                ready.begins |= {(number, index): begin for index, begin in begins.items()}
            if not pieces or output.outputs:
                ready.outputs.append((number, output))
            ticket.is_done = output.finished
        if ticket.is_done:
            self._open.pop(number, None)

    async def _forget(self, tickets: Sequence[_Ticket]) -> None:
        unfinished = [ticket for ticket in tickets if not ticket.is_done]
        for ticket in unfinished:
            ticket.is_done = True
            self._open.pop(ticket.order.number, None)
        await self._stop([ticket.queue.request_id for ticket in unfinished if ticket.queue is not None])

    async def _stop(self, names: Sequence[str]) -> None:
        if names:
            # What has died needs no abort.
            with suppress(EngineDeadError):
                # By vLLM's own names: by ours it would keep the parents of aborted samples for ever.
                await self._llm.abort(names, internal=True)


def _aborted_before_it_began(order: Order) -> Output:
    """What vLLM says of a request that is aborted before its first token."""
    if isinstance(order.params, PoolingParams):
        return PoolingRequestOutput(str(order.number), PoolingOutput(torch.empty(0)), order.prompt, 0, finished=True)
    samples = [
        CompletionOutput(
            index=index,
            text="",
            token_ids=[],
            cumulative_logprob=None,
            logprobs=None,
            finish_reason=FinishReason.ABORT.label,
            weight_versions=[],
        )
        for index in range(order.params.n)
    ]
    return RequestOutput(str(order.number), None, order.prompt, None, samples, finished=True)

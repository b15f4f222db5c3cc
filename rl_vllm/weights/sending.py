"""The trainer's thread sends while another one makes the engines' call: both end before either's error is raised."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from rl_vllm.errors import RefitError
from rl_vllm.protocols import SendingTransport, WeightSource, WeightTransport
from rl_vllm.types import Sending, WeightUpdate

T = TypeVar("T")

# The trainer gives up before the engines' call does: it knows who did not come, and they know only that they waited.
SENDING_SHARE = 0.9


class Sender:
    """Sends one update when it is time to.

    Args:
        transport: What was staged by one that does not send needs nothing here.
        source: The weights, as announced.
        update: What the engines are told.
    """

    def __init__(
        self, transport: WeightTransport | SendingTransport, source: WeightSource, update: WeightUpdate
    ) -> None:
        self._transport = transport if isinstance(transport, SendingTransport) else None
        self._source = source
        self._update = update

    def during(self, sending: Sending, call: Callable[[], T], timeout_s: float) -> T:
        """What ``call`` returns; the bytes are sent meanwhile when the transport sends during such calls.

        Raises:
            RefitError: The trainer's side failed, whatever the call made of it.
            Exception: The call's own.
        """
        if self._transport is None or self._transport.sending is not sending:
            return call()
        stop = threading.Event()
        lost: ConnectionError | None = None
        # Left when the call has ended: it has a limit of its own, and who waits for bytes is told that none will come.
        with ThreadPoolExecutor(1, thread_name_prefix=f"rl_vllm-refit-{self._update.version}") as pool:
            answer = pool.submit(call)
            answer.add_done_callback(lambda ended: stop.set() if ended.exception() is not None else None)
            try:
                limit_s = SENDING_SHARE * timeout_s
                self._transport.send(self._source, self._update, stop=stop, timeout_s=limit_s)
            except ConnectionError as error:
                lost = error
        result = answer.result()
        if lost is not None:
            phase = "stage" if sending is Sending.WHILE_STAGING else "commit"
            raise RefitError(self._update.version, phase, (), f"receivers went away: {lost}") from lost
        return result

"""What the two ends of a connection between processes share: who a service is, what may be asked, how one waits."""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

# No end trusts the other to go on: a part of a message that does not come, or is not taken, within this time breaks it.
STALL_TIMEOUT_S = 60
HANDSHAKE_TIMEOUT_S = 10.0

ATTRIBUTES = frozenset({"num_replicas", "weight_version"})
METHODS = frozenset({"model_info", "weight_specs", "weight_receivers", "stage_weights", "commit_weights"})
BATCH, STREAM, NEXT = "generate_batch", "stream_batch", "next"
CALLS = ATTRIBUTES | METHODS | {BATCH, STREAM, NEXT}

Pipe = Connection


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a service is pickled as.

    Attributes:
        name: The service's.
        host, port: Where it is asked from other processes.
        authkey: 32 random bytes that both ends must know.
    """

    name: str
    host: str
    port: int
    authkey: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Hello:
    """What a service says first.

    Attributes:
        request_timeout_s: Its limit for a generating call that sets none.
        call_timeout_s: Its limit for any other call.
    """

    request_timeout_s: float
    call_timeout_s: float


def pipe_over(end: socket.socket) -> Pipe:
    """A connection for messages, which breaks when its other end stalls, or is on a machine that has gone."""
    end.settimeout(None)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        # Linux's names.
        if option in vars(socket):
            end.setsockopt(socket.IPPROTO_TCP, vars(socket)[option], seconds)
    for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        end.setsockopt(socket.SOL_SOCKET, direction, struct.pack("ll", STALL_TIMEOUT_S, 0))
    return Connection(end.detach())


async def readable(pipe: Pipe) -> None:
    """Wait on the running loop until there is something to receive, or the other end has gone."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pipe.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(pipe.fileno())

"""An address and a port of this process that other hosts can reach."""

from __future__ import annotations

import socket

_LOOPBACK = "127.0.0.1"
# Never sent to: connecting a datagram socket only asks the routing table. TEST-NET-1 and a documentation prefix.
_ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


def routable_address() -> str:
    """The address that packets of this host leave from; the loopback address when it has no other."""
    for family, elsewhere in _ELSEWHERE:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((elsewhere, 1))
                address: str = probe.getsockname()[0]
        except OSError:
            address = ""
        if address and not address.startswith("127.") and address != "::1":
            return address
    try:
        named = socket.gethostbyname(socket.gethostname())
    except OSError:
        return _LOOPBACK
    return named


class HeldPort:
    """A free port of this host, bound until :meth:`release`: nobody else can be given it meanwhile."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    @property
    def number(self) -> int:
        """The port; chosen by the first call."""
        if self._socket is None:
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            self._socket.bind(("", 0))
        port: int = self._socket.getsockname()[1]
        return port

    def release(self) -> None:
        """Let it go, for the one who will listen there. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

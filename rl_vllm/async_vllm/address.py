"""An address and a port of this process that other hosts can reach."""

from __future__ import annotations

import socket

from rl_vllm.protocols.address import routable_address

__all__ = ["HeldPort", "routable_address"]


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

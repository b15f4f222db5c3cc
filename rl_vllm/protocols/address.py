"""The address of this process that other hosts can reach."""

from __future__ import annotations

import socket

_LOOPBACK = "127.0.0.1"
# Never sent to: connecting a datagram socket only asks the routing table. TEST-NET-1 and a documentation prefix.
_ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


def routable_address() -> str:
    """The address that packets of this host leave from; the loopback address when it has no other."""
    for family, elsewhere in _ELSEWHERE:
        try:
            address = _source_address(family, elsewhere)
        except OSError:
            address = ""
        if address and not address.startswith("127.") and address != "::1":
            return address
    try:
        named = socket.gethostbyname(socket.gethostname())
    except OSError:
        return _LOOPBACK
    return named


def address_towards(host: str) -> str:
    """The address that this host's packets to ``host`` leave from.

    Raises:
        OSError: There is no way to it.
    """
    family = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0][0]
    return _source_address(family, host)


def _source_address(family: int, host: str) -> str:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))
        address: str = probe.getsockname()[0]
    return address

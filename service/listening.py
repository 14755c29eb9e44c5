"""Addresses that the server listens on and is called by, and why one cannot be bound."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterator

from workers.common.addresses import why_not_listening


class CannotListen(Exception):
    """An address that cannot be bound, and why."""

    def __init__(self, listen: str) -> None:
        self.listen = listen
        self.why = why_not_listening(listen)
        super().__init__(f"{listen}: {self.why}")


@contextlib.contextmanager
def binding(listen: str) -> Iterator[None]:
    """Converts what sockets and gRPC raise where they cannot bind this address. Raises CannotListen."""
    try:
        yield
    except (OSError, RuntimeError):
        raise CannotListen(listen) from None


def actual_address(address: str, port: int) -> str:
    """Replaces port 0 by the chosen port. The address of a Unix socket stays as it is."""
    return f"{address.rpartition(':')[0]}:{port}" if port > 1 else address


def listening_socket(address: str, backlog: int | None = None, *, is_shared: bool = False) -> socket.socket:
    """Binds an address that is not of a Unix socket; clients can connect from now on. Raises CannotListen.

    `backlog`: see `socket.create_server`. `is_shared`: other gateways listen there, too.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # As gRPC's port: [::] also accepts IPv4.
    is_dual = family is socket.AF_INET6 and socket.has_dualstack_ipv6()
    with binding(address):
        return socket.create_server(
            (host, int(port)), family=family, backlog=backlog, dualstack_ipv6=is_dual, reuse_port=is_shared
        )


@contextlib.contextmanager
def reserved(address: str) -> Iterator[str]:
    """An address for several gateways, with the chosen port for port 0. Raises CannotListen."""
    host, _, port = address.rpartition(":")
    with binding(address):
        family, *_, found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Without listen(), it gets no connections.
        with binding(address):
            held.bind(found)
        yield actual_address(address, held.getsockname()[1])


def is_address(host: str) -> bool:
    """Whether a Host header is an IP address or localhost. A port that only this machine reaches requires it.

    Any other name may be DNS rebinding: a page of a browser could read all responses if the host name that
    it comes from resolves to this machine. A page that comes from an address cannot do so.
    """
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if name.lower() == "localhost":
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True

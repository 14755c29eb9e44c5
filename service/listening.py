"""Addresses that the server listens on, and why one cannot be bound."""

from __future__ import annotations

import contextlib
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

"""A proxy for HTTP that notes what it is asked for, and refuses it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

_MAX_BYTES = 1 << 16


@dataclass
class HttpProxy:
    """`requests`: what its clients have sent first."""

    address: str
    requests: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        """For a variable of the environment, with credentials."""
        return f"http://user:secret@{self.address}"


@contextlib.contextmanager
def http_proxy(answer: int | None = 502) -> Iterator[HttpProxy]:
    """Answers each request with this status; None: closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy = HttpProxy(f"127.0.0.1:{listener.getsockname()[1]}")

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(OSError):
                        request = connection.recv(_MAX_BYTES)
                        proxy.requests.append(request.decode(errors="replace"))
                        if answer is not None:
                            connection.sendall(f"HTTP/1.1 {answer} No\r\nContent-Length: 0\r\n\r\n".encode())

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        try:
            yield proxy
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            server.join()

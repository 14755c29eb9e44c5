"""A network between two processes, which can be slow, stop to carry anything, or break its connections."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Self


class TcpProxy:
    """Use as a context manager. While `is_cut` nothing arrives, in either direction; it arrives late."""

    def __init__(self, target: str, delay_s: float = 0.0) -> None:
        """`delay_s`: how late everything arrives at least, in each direction."""
        self._delay_s = delay_s
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._carries = threading.Event()
        self._carries.set()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Closing it would not wake the thread.
        _shut(self._listener)
        self._accepting.join()
        self._listener.close()
        self._carries.set()
        self.break_connections()
        for thread in self._threads:
            thread.join()
        for end in self._sockets:
            end.close()

    def cut(self) -> None:
        """Nothing arrives any more, and nobody is told."""
        self._carries.clear()

    def heal(self) -> None:
        """All that was sent meanwhile arrives."""
        self._carries.set()

    def break_connections(self) -> None:
        """Resets all that are open."""
        for end in self._sockets:
            _shut(end)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.socket()
                try:
                    far.connect(self._target)
                except OSError:
                    near.close()
                    far.close()
                    continue
                self._sockets += [near, far]
                for source, sink in ((near, far), (far, near)):
                    carrying = threading.Thread(target=self._carry, args=(source, sink), daemon=True)
                    self._threads.append(carrying)
                    carrying.start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                time.sleep(self._delay_s)
                self._carries.wait()
                sink.sendall(data)
        _shut(source)
        _shut(sink)


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)

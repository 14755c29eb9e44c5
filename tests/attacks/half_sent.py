"""A connection to a gRPC server with a request of which the last bytes never come."""

from __future__ import annotations

import functools
import struct

from tests import http2
from tests.raw_messages import packed

_RESET, _WINDOW_UPDATE, _PING, _ACK = 3, 8, 6, 1
_MESSAGE_BYTES = 15 << 20
# How a request that does not arrive is answered, as its text on the wire says.
_REFUSALS = ("did not arrive within", "slow to arrive")


@functools.cache
def _half_a_message() -> memoryview:
    return memoryview(http2.message(packed(2, b"\x01" * _MESSAGE_BYTES))[:-100])


class HalfSent:
    """A connection with a message of 15 MiB of which the last bytes never come."""

    def __init__(self, address: str) -> None:
        self._socket = http2.connect(address, timeout_s=0.5)
        self._socket.sendall(http2.headers())
        self._body = _half_a_message()
        self._unread = b""
        # What may be sent: on the connection, and on the stream.
        self._room = {0: 65_535, 1: 65_535}
        self._announced = 65_535
        self.answer = ""

    def send(self) -> bool:
        """Sends as much as the server takes. Whether it still waits for the rest."""
        try:
            self._read()
            while self._body and (size := min(16_384, len(self._body), *self._room.values())) > 0:
                self._socket.sendall(http2.frame(http2.DATA, 0, bytes(self._body[:size])))
                self._body = self._body[size:]
                self._room = {stream: room - size for stream, room in self._room.items()}
        except TimeoutError:
            return True
        except OSError:
            self.answer = self.answer or "hung up on"
        return not self.answer

    def close(self) -> None:
        self._socket.close()

    def _read(self) -> None:
        self._socket.settimeout(0.01)
        try:
            received = self._socket.recv(65_536)
        except TimeoutError:
            return
        finally:
            self._socket.settimeout(0.5)
        if not received:
            raise ConnectionError
        self._unread += received
        while len(self._unread) >= 9:
            size = int.from_bytes(self._unread[:3], "big")
            if len(self._unread) < 9 + size:
                return
            kind, flags, stream = struct.unpack(">BBI", self._unread[3:9])
            payload, self._unread = self._unread[9 : 9 + size], self._unread[9 + size :]
            self._take(kind, flags, stream, payload)

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if stream == 1 and (kind == _RESET or (kind == http2.HEADERS and flags & http2.END_STREAM)):
            refused = next((f"refused: {why}" for why in _REFUSALS if why.encode() in payload), "refused")
            self.answer = self.answer or refused
            self._body = self._body[:0]
        elif kind == _WINDOW_UPDATE:
            if stream in self._room:
                self._room[stream] += int.from_bytes(payload, "big")
        elif kind == _PING and not flags & _ACK:
            self._socket.sendall(http2.frame(_PING, _ACK, payload, stream=0))
        elif kind == http2.SETTINGS and not flags & _ACK:
            for at in range(0, len(payload), 6):
                name, value = struct.unpack(">HI", payload[at : at + 6])
                if name == 4:  # SETTINGS_INITIAL_WINDOW_SIZE
                    self._room[1] += value - self._announced
                    self._announced = value
            self._socket.sendall(http2.frame(http2.SETTINGS, _ACK, b"", stream=0))

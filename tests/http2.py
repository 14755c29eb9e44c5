"""Just enough of HTTP/2 and of gRPC's framing to speak it badly."""

from __future__ import annotations

import socket
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS = 0, 1, 4
END_STREAM, END_HEADERS = 1, 4
PREFILL = "/quire.v1.ModelExecutorService/Prefill"


def frame(kind: int, flags: int, payload: bytes, stream: int = 1) -> bytes:
    """A frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def headers(**changed: str) -> bytes:
    """The opening of a connection and of a Prefill on it. Underscores of names stand for dashes."""
    return PREFACE + frame(SETTINGS, 0, b"", stream=0) + opening(1, **changed)


def opening(stream: int, /, **changed: str) -> bytes:
    """The opening of a Prefill."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": PREFILL,
        ":authority": "quire",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    fields.update({name.replace("_", "-"): value for name, value in changed.items()})
    # Literal fields without indexing, as HPACK calls the simplest form.
    block = b"".join(
        b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )
    return frame(HEADERS, END_HEADERS, block, stream)


def message(data: bytes, *, compressed: int = 0, length: int | None = None) -> bytes:
    """A message as gRPC frames it."""
    return struct.pack(">BI", compressed, len(data) if length is None else length) + data


def connect(address: str, timeout_s: float = 30.0) -> socket.socket:
    """A connection to a server's HOST:PORT, on which nothing was sent."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=timeout_s)

"""Messages on a connection, each with its length before it: between a gateway and its workers.

A message costs a seventh of what it costs on a gRPC stream (docs/adr/0041-socket-to-local-workers.md).
"""

from __future__ import annotations

import asyncio
import struct
from typing import Generic, Self, TypeVar, cast

from google.protobuf.message import Message

_LENGTH = struct.Struct("<I")
# Received bytes beyond which nothing more is read until somebody takes a message.
_BUFFER_BYTES = 1 << 20

Received = TypeVar("Received", bound=Message)


class MessageTooLong(Exception):
    """The other side has announced a message beyond the limit."""


class MessageStream(asyncio.Protocol, Generic[Received]):
    """Owner of a connection. Iterating receives its messages, until it ends. One task may receive, one write.

    A read that is cancelled may lose a message.

    Attributes:
        max_bytes: The limit of the next message.
        has_ended: Whether the connection has.
    """

    def __init__(self, received: type[Received], max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._received = received
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self.has_ended = False
        # What the tasks wait for: more bytes; room for more messages, if there is none.
        self._arrived: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._is_paused = False

    def close(self) -> None:
        """Ends the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    async def write(self, message: Message) -> None:
        """Returns when there is room for more. Raises ConnectionError."""
        if self.has_ended or self._transport is None:
            raise ConnectionResetError("the connection has ended")
        data = message.SerializeToString()
        self._transport.write(_LENGTH.pack(len(data)) + data)
        if self._room is not None:
            # The next task waits for it, too, if this one is cancelled.
            await asyncio.shield(self._room)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Received:
        """Raises MessageTooLong or DecodeError, after which the connection is of no use."""
        message = self._take()
        if message is not None:
            # It came with the one before. Other tasks have their turn between the two.
            await asyncio.sleep(0)
        while message is None:
            if self.has_ended:
                raise StopAsyncIteration
            if self._is_paused and self._transport is not None:
                self._is_paused = False
                self._transport.resume_reading()
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
            message = self._take()
        return message

    def _take(self) -> Received | None:
        """The next message, if all of it has arrived."""
        buffer = self._buffer
        if len(buffer) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(buffer)
        if size > self.max_bytes:
            raise MessageTooLong(f"{size} bytes, and the limit is {self.max_bytes}")
        end = _LENGTH.size + size
        if len(buffer) < end:
            return None
        if size <= _BUFFER_BYTES:
            message = self._received.FromString(bytes(buffer[_LENGTH.size : end]))
        else:
            # Without two copies of what may be 64 MiB. It takes any bytes, which its stub does not say.
            with memoryview(buffer) as whole, whole[_LENGTH.size : end] as data:
                message = self._received.FromString(data)  # type: ignore[arg-type]
        del buffer[:end]
        return message

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's is no subclass of it.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)
        elif len(self._buffer) > _BUFFER_BYTES and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def eof_received(self) -> None:
        """Closes the stream. Otherwise it would last until everything is written, which nobody may read."""
        self.close()

    def pause_writing(self) -> None:
        self._room = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the reason does not matter
        self.has_ended = True
        self.resume_writing()
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

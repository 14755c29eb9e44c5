"""Callers who make the server hold things: copies, answers that nobody reads, messages that never end."""

from __future__ import annotations

import socket
import struct
import time
from typing import Any

from quire.v1 import executor_pb2 as pb
from quire.v1 import types_pb2 as types

from tests import http2
from tests.attacks.frame import MIB, SERVICE, TIMEOUT_S, Attack, Scene, said
from tests.raw_messages import packed

_LOGITS = types.OutputOptions(logits=types.LOGITS_FORMAT_F32)
# How long answers are left unread, and messages unfinished.
_HELD_S = 4.0
_WINDOW_UPDATE, _PING, _ACK = 8, 6, 1


def long_cache(scene: Scene) -> None:
    answer = scene.gateway.stub.Prefill(
        pb.PrefillRequest(token_ids=[i % 1000 for i in range(30_000)]), timeout=TIMEOUT_S
    )
    scene.held["cache_id"] = answer.kv_cache.cache_id
    scene.answers.clear()


def fork(scene: Scene) -> None:
    scene.send("ForkCache", pb.ForkCacheRequest(cache_id=scene.held["cache_id"], count=1024))


def fork_and_append(scene: Scene) -> None:
    """Each child diverges, so that nothing is shared any more but the pages before."""
    request = pb.ForkCacheRequest(cache_id=scene.held["cache_id"], count=64)
    data = scene.send("ForkCache", request)
    if data is None:
        return
    children = [handle.cache_id for handle in pb.ForkCacheResponse.FromString(data).kv_caches]
    scene.send(
        "BatchDecode",
        pb.BatchDecodeRequest(items=[pb.DecodeRequest(cache_id=c, token_id=1) for c in children]),
    )
    scene.send("ForkCache", pb.ForkCacheRequest(cache_id=scene.held["cache_id"], release=children))


def unread_unary(scene: Scene) -> None:
    """48 answers of 48 MB each. A call that is made as a stream receives nothing until it is read."""
    assert scene.gateway.channel is not None
    request = pb.ForwardRequest(token_ids=[3] * 12_000, output=_LOGITS).SerializeToString()
    channels = [scene.gateway.connect() for _ in range(48)]
    calls: list[Any] = []
    for channel in channels:
        method: Any = channel.unary_stream(SERVICE + "Forward")
        calls.append(method(request, timeout=TIMEOUT_S))
    time.sleep(_HELD_S)
    for call, channel in zip(calls, channels, strict=True):
        scene.answers["not read" if call.is_active() else said(call)] += 1
        call.cancel()
        channel.close()


def unread_sessions(scene: Scene) -> None:
    """16 Sessions with 64 calls each, whose answers are of 4 MB."""
    call = pb.ForwardRequest(token_ids=[3] * 1000, output=_LOGITS)
    data = pb.SessionRequest(
        calls=[pb.SessionCall(tag=tag, forward=call) for tag in range(64)]
    ).SerializeToString()
    channels = [scene.gateway.connect() for _ in range(16)]
    calls: list[Any] = []
    for channel in channels:
        method: Any = channel.stream_stream(SERVICE + "Session")
        calls.append(method(iter([data]), timeout=TIMEOUT_S))
    time.sleep(_HELD_S)
    for stream, channel in zip(calls, channels, strict=True):
        scene.answers["not read" if stream.is_active() else said(stream)] += 1
        stream.cancel()
        channel.close()


class HalfSent:
    """A connection with a message of 15 MiB of which the last bytes never come."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=0.5)
        self._socket.sendall(http2.headers())
        self._body = memoryview(http2.message(packed(2, b"\x01" * (15 * MIB)))[:-100])
        self._unread = b""
        # What may be sent: on the connection, and on the stream.
        self._room = {0: 65_535, 1: 65_535}
        self._announced = 65_535

    def send(self) -> bool:
        """Sends as much as the server takes. Whether the connection still stands."""
        try:
            self._read()
            while self._body and (size := min(16_384, len(self._body), *self._room.values())) > 0:
                self._socket.sendall(http2.frame(http2.DATA, 0, bytes(self._body[:size])))
                self._body = self._body[size:]
                self._room = {stream: room - size for stream, room in self._room.items()}
        except TimeoutError:
            return True
        except OSError:
            return False
        return True

    @property
    def left_bytes(self) -> int:
        """Of what it wants to send."""
        return len(self._body)

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
        if kind == _WINDOW_UPDATE:
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


def half_sent(scene: Scene) -> None:
    """32 of them: 480 MiB."""
    connections = [HalfSent(scene.gateway.address) for _ in range(32)]
    standing = list(connections)
    give_up_s = time.monotonic() + 20
    while any(one.left_bytes for one in standing) and time.monotonic() < give_up_s:
        standing = [one for one in standing if one.send()]
    time.sleep(_HELD_S)
    standing = [one for one in standing if one.send()]
    scene.answers["connection stands, message held"] += len(standing)
    scene.answers["hung up on"] += len(connections) - len(standing)
    for connection in connections:
        connection.close()


ATTACKS = (
    Attack(
        "forks", "ForkCache of 1,024 copies of a cache of 30,000 tokens", fork, tries=200, prepare=long_cache
    ),
    Attack(
        "forks that part",
        "64 copies of it, a token on each, all released",
        fork_and_append,
        tries=40,
        prepare=long_cache,
    ),
    # The settings: 512 MiB of answers, held once by the gateway, and once more while gRPC sends them.
    Attack(
        "unread answers",
        "48 calls with 48 MB of logits each, not read",
        unread_unary,
        tries=2,
        budget_mib=1280,
    ),
    Attack(
        "unread sessions",
        "16 Sessions with 256 MB of logits each, not read",
        unread_sessions,
        tries=2,
        budget_mib=1280,
    ),
    Attack("half-sent", "32 messages of 15 MiB that never end", half_sent, tries=1, budget_mib=600),
)

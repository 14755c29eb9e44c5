"""Callers who make the server hold things: copies, answers that nobody reads, messages that never end."""

from __future__ import annotations

import contextlib
import functools
import resource
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from quire.v1 import executor_pb2 as pb
from quire.v1 import types_pb2 as types

from tests import http2
from tests.attacks.frame import MIB, SERVICE, TIMEOUT_S, Attack, Scene, said
from tests.raw_messages import packed

_LOGITS = types.OutputOptions(logits=types.DATA_TYPE_F32)
# How long messages are left unfinished, if nothing is said to it.
_UNFINISHED_S = 40.0
_RESET, _WINDOW_UPDATE, _PING, _ACK = 3, 8, 6, 1
_HALF_SENT = 96
_CONNECTIONS = 5000


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
    request = pb.ForwardRequest(token_ids=[3] * 12_000, output=_LOGITS).SerializeToString()
    _unread(
        scene,
        round(48 * scene.share),
        lambda channel: channel.unary_stream(SERVICE + "Forward"),
        lambda: request,
    )


def unread_sessions(scene: Scene) -> None:
    """16 Sessions with 64 calls each, whose answers are of 4 MB."""
    call = pb.ForwardRequest(token_ids=[3] * 1000, output=_LOGITS)
    calls = [pb.SessionCall(tag=tag, forward=call) for tag in range(64)]
    data = pb.SessionRequest(calls=calls).SerializeToString()
    _unread(scene, 16, lambda channel: channel.stream_stream(SERVICE + "Session"), lambda: iter([data]))


def _unread(scene: Scene, count: int, method: Callable[[Any], Any], request: Callable[[], Any]) -> None:
    channels = [scene.gateway.connect() for _ in range(count)]
    calls = [method(channel)(request(), timeout=TIMEOUT_S) for channel in channels]
    time.sleep(scene.held_s)
    for call, channel in zip(calls, channels, strict=True):
        scene.answers["not read" if call.is_active() else said(call)] += 1
        call.cancel()
        channel.close()


# How a request that does not arrive is answered, as its text on the wire says.
_REFUSALS = ("did not arrive within", "slow to arrive")


@functools.cache
def _half_a_message() -> memoryview:
    return memoryview(http2.message(packed(2, b"\x01" * (15 * MIB)))[:-100])


class HalfSent:
    """A connection with a message of 15 MiB of which the last bytes never come."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=0.5)
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


def half_sent(scene: Scene) -> None:
    """96 of them: 1,440 MiB."""
    connections = [HalfSent(scene.gateway.address) for _ in range(round(_HALF_SENT * scene.share))]
    standing = list(connections)
    give_up_s = time.monotonic() + _UNFINISHED_S
    while standing and time.monotonic() < give_up_s:
        standing = [one for one in standing if one.send()]
    for one in connections:
        scene.answers[one.answer or "connection stands, message held"] += 1
    for connection in connections:
        connection.close()


def connections(scene: Scene) -> None:
    """They are opened, say nothing, and are read once at the end."""
    host, _, port = scene.gateway.address.rpartition(":")
    count = round(_CONNECTIONS * scene.share)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, count + 500)), hard))
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(count):
            # Some are not even accepted.
            with contextlib.suppress(OSError):
                connection = socket.create_connection((host, int(port)), timeout=5)
                opened.append(stack.enter_context(connection))
        time.sleep(scene.held_s)
        scene.notes["connections"] = scene.gateway.status().connections
        standing = sum(map(_stands, opened))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    scene.answers["stands"] += standing
    scene.answers["hung up on"] += count - standing


def _stands(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(65_536):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


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
    Attack(
        "unread answers",
        "48 calls with 48 MB of logits each, not read",
        unread_unary,
        tries=2,
    ),
    Attack(
        "unread sessions",
        "16 Sessions with 256 MB of logits each, not read",
        unread_sessions,
        tries=2,
    ),
    Attack(
        "half-sent",
        f"{_HALF_SENT} messages of 15 MiB that never end",
        half_sent,
        tries=1,
    ),
    Attack(
        "connections",
        f"{_CONNECTIONS:,} connections that say nothing",
        connections,
        tries=1,
        flags=("--max-connections", "1000"),
    ),
)

"""Every HTTP port refuses requests that a proxy before it could divide in another way, and closes."""

from __future__ import annotations

import gzip
import json
import runpy
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import h11
import pytest

from service.extensions.http import framing
from tests.service import metrics_server
from tests.service.extensions.openai.served_front import FakeRuntime, generate_yes, raw_chat, serving
from tests.service.served import HttpPort

HOST = b"Host: localhost\r\n"
# A request for a chat, and what stands before other bodies of one.
CHAT = b"POST /v1/chat/completions HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"
BODY = raw_chat().partition(b"\r\n\r\n")[2]
LAST = b"Connection: close\r\n"
# A request that must never be seen: it stands in the body of another.
HIDDEN = b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n"


@pytest.fixture
async def openai() -> AsyncIterator[HttpPort]:
    async with serving(FakeRuntime(generate_yes)) as served:
        yield served


@pytest.fixture(params=["openai", "metrics"])
async def port(request: Any, openai: HttpPort, tmp_path: Path) -> AsyncIterator[HttpPort]:
    """Each HTTP port."""
    if request.param == "openai":
        yield openai
    else:
        async with metrics_server.serving(tmp_path) as metrics:
            yield metrics


# Cases of a test share a server, whose end takes a fifth of a second.
AMBIGUOUS = (
    b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n",
    b"Content-Length: 4\r\nContent-Length: 5\r\n\r\n",
    b"Content-Length: 4\r\ncontent-length: 4\r\n\r\n",
    b"Content-Length: 4, 4\r\n\r\n",
    b"Content-Length: 4,\r\n\r\n",
    b"Content-Length: +4\r\n\r\n",
    b"Content-Length: 0x4\r\n\r\n",
    b"Content-Length: -4\r\n\r\n",
    b"Content-Length:\r\n\r\n",
    b"Content-Length : 4\r\n\r\n",
    b" Content-Length: 4\r\n\r\n",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"Transfer-Encoding: chunked, identity\r\n\r\n",
    b"Transfer-Encoding: xchunked\r\n\r\n",
    b"Transfer-Encoding : chunked\r\n\r\n",
    b"Transfer-Encoding:\r\n chunked\r\n\r\n",
    b"X: a\r\n b\r\n\r\n",
    b"X: a\r\n\tb\r\n\r\n",
    b"X: a\nContent-Length: 4\r\n\r\n",
    b"X: a\rContent-Length: 4\r\n\r\n",
    b"X: a\r\n\n",
    b"X: a\n\n",
    b"X: a\x00b\r\n\r\n",
    b"X\r\n\r\n",
    b"Host: other\r\n\r\n",
)


async def test_an_ambiguous_request_is_refused_and_its_connection_closed(port: HttpPort) -> None:
    for head in AMBIGUOUS:
        answer = await port.send(b"GET /healthz HTTP/1.1\r\n" + HOST + head + b"0\r\n\r\n" + HIDDEN)
        assert answer.count(b"HTTP/1.1 ") == 1, head
        assert answer.split()[1] in (b"400", b"501"), head
        assert b"connection: close" in answer.lower(), head


BAD_LINES = (
    b"POST / HTTP/1.0\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"GET /healthz HTTP/1.1\n" + HOST + b"\r\n",
    b"GET  /healthz HTTP/1.1\r\n" + HOST + b"\r\n",
    b"GET /healthz HTTP/1.1 \r\n" + HOST + b"\r\n",
    b"GET healthz HTTP/1.1\r\n" + HOST + b"\r\n",
    b"GET http:///healthz HTTP/1.1\r\n" + HOST + b"\r\n",
    b"GET http://user@localhost/healthz HTTP/1.1\r\n" + HOST + b"\r\n",
    b"GET ftp://localhost/healthz HTTP/1.1\r\n" + HOST + b"\r\n",
    b"GET /healthz HTTP/1.1\r\n\r\n",
)


async def test_a_bad_request_line_is_refused(port: HttpPort) -> None:
    for request_bytes in BAD_LINES:
        answer = await port.send(request_bytes + HIDDEN)
        assert answer.count(b"HTTP/1.1 ") == 1, request_bytes
        assert answer.split()[1] == b"400", request_bytes


BAD_CHUNKS = (
    b"x\r\n\r\n", b"-1\r\n\r\n", b"0x2\r\nab\r\n0\r\n\r\n", b"2 \nab\r\n0\r\n\r\n", b"2\nab\n0\n\n",
    b"2\r\nabc\r\n0\r\n\r\n", b"2\r\nab0\r\n\r\n", b"ffffffffffffffffffffffff\r\nab", b"\r\n0\r\n\r\n",
    b"2;\r\r\nab\r\n0\r\n\r\n",
)  # fmt: skip


async def test_a_body_of_bad_chunks_is_refused(openai: HttpPort) -> None:
    for chunks in BAD_CHUNKS:
        answer = await openai.send(CHAT + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + HIDDEN)
        assert answer.count(b"HTTP/1.1 ") == answer.count(b"HTTP/1.1 400 ") == 1, chunks


SPACES = b" \t" * 30_000
WITH_MANY_SPACES = (
    b"X:" + SPACES + b"\x00\r\n\r\n",
    b"X:\r\n" + b" \r\n" * 20_000 + b" \x00\r\n\r\n",
    b"Transfer-Encoding: chunked\r\n\r\n1;" + SPACES + b"\n\r\n",
    b"Transfer-Encoding: chunked\r\n\r\n0\r\nX:" + SPACES + b"\x00\r\n\r\n",
)


async def test_many_spaces_are_refused_as_soon_as_few(openai: HttpPort) -> None:
    """Before, a single request, from anybody, stopped the gateway for two minutes."""
    for rest in WITH_MANY_SPACES:
        assert (await openai.send(CHAT + rest)).startswith(b"HTTP/1.1 400 "), rest[:40]


@pytest.mark.parametrize("name", ["header_field_re", "chunk_header_re"])
def test_a_version_of_h11_with_other_patterns_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Its own would be slow for many spaces."""
    monkeypatch.delattr(h11._readers, name)
    with pytest.raises(ImportError, match=r"install h11 0\.16"):
        runpy.run_path(framing.__file__)


@pytest.mark.parametrize(("spaces", "status"), [(0, b"200"), (2000, b"400")])
async def test_chunks_may_be_small_but_not_many(openai: HttpPort, spaces: int, status: bytes) -> None:
    """Before, a megabyte of chunks of a byte, from anybody, stopped the gateway for seconds."""
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY + b" " * spaces)
    answer = await openai.send(CHAT + LAST + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
    assert answer.split()[1] == status
    assert status == b"200" or b"the chunks of the body are too small" in answer


async def test_whole_requests_on_one_connection_are_answered_in_turn(openai: HttpPort) -> None:
    chunked = CHAT + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    last = b"GET /health HTTP/1.1\r\n" + LAST + HOST + b"\r\n"
    assert (await openai.send(chunked + raw_chat() + last)).count(b"HTTP/1.1 200 ") == 3


@pytest.mark.parametrize("split_bytes", [1 << 30, 1000])
@pytest.mark.parametrize(("size_bytes", "is_refused"), [(60_000, False), (66_000, True)])
async def test_headers_are_limited_however_they_arrive(
    openai: HttpPort, size_bytes: int, is_refused: bool, split_bytes: int
) -> None:
    data = b"GET /v1/models HTTP/1.1\r\n" + LAST + HOST + b"X: " + b"x" * size_bytes + b"\r\n\r\n"
    parts = (data[begin : begin + split_bytes] for begin in range(0, len(data), split_bytes))
    # What is sent after a refusal can reset the connection before that was read.
    answer = await openai.send(*parts)
    assert (b" 200 " not in answer) if is_refused else answer.startswith(b"HTTP/1.1 200 ")


async def test_a_whole_url_for_probes_and_metrics(tmp_path: Path) -> None:
    async with metrics_server.serving(tmp_path) as server:
        assert (await server.get("http://127.0.0.1/healthz")).status == 200
        assert (await server.get("http://evil.example/healthz")).status == 403


@pytest.mark.parametrize(
    ("coding", "status"), [("gzip", 415), ("GZIP, gzip", 415), ("br", 415), ("identity", 200)]
)
async def test_a_compressed_body_is_refused_by_its_header(openai: HttpPort, coding: str, status: int) -> None:
    body = BODY if status == 200 else gzip.compress(BODY)
    head = f"Content-Length: {len(body)}\r\nContent-Encoding: {coding}\r\n\r\n".encode()
    answer = await openai.send(CHAT + LAST + head + body)
    assert answer.split()[1] == str(status).encode()
    if status == 415:
        assert b"accept-encoding: identity" in answer
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert error["code"] == "bad_content_encoding"

"""The framing of HTTP/1.1 requests, for every HTTP port: h11's, but stricter.

A proxy and a server that disagree about where a request ends let one caller send requests in the name of
another. So a request is refused if any other server could read its head in another way.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Any

import h11
from h11 import _abnf, _readers

# h11's patterns, but possessive: its own backtrack over a run of spaces, which takes minutes for 64 KiB.
_PATTERNS = {
    "header_field_re": (
        rf"(?P<field_name>{_abnf.field_name}):[ \t]*+(?P<field_value>{_abnf.field_value})[ \t]*+"
    ),
    "chunk_header_re": rf"(?P<chunk_size>{_abnf.chunk_size})(?P<chunk_ext>;[^\r\n]*+)?[ \t]*+\r\n",
}
for _name, _pattern in _PATTERNS.items():
    if not hasattr(_readers, _name):
        # With h11's own patterns one request could block the gateway.
        raise ImportError(f"this version of h11 has no {_name}, which the server replaces: install h11 0.16")
    setattr(_readers, _name, re.compile(_pattern.encode()))
# Any authority, but no user name, which RFC 9110 forbids here.
_ABSOLUTE = re.compile(rb"https?://(?P<host>[^/?#@]+)(?P<rest>/[^#]*|\?[^#]*)?", re.IGNORECASE)
_LENGTH = re.compile(rb"^content-length:(.*)$", re.IGNORECASE | re.MULTILINE)
# After the first chunks of a body, the chunks must have this average size. Parsing a chunk takes some 10 us,
# whatever its size, and up to 256 KiB are parsed before other tasks run.
_FREE_CHUNKS, _LEAST_CHUNK_BYTES = 1024, 256


class BadRequest(h11.RemoteProtocolError):
    """An error that this module found. Its text is for the client."""


class RequestConnection(h11.Connection):
    """A server's side of a connection. `next_event` also raises BadRequest for ambiguous requests.

    After any error the connection has to be closed. A request whose target is a whole URL, as sent to a
    proxy, becomes one for the URL's path and host.
    """

    def __init__(self, max_head_bytes: int) -> None:
        """`max_head_bytes`: the limit for a request line with its headers, and for a body's trailers."""
        super().__init__(h11.SERVER, max_head_bytes)
        self._max_head_bytes = max_head_bytes
        # The numbers of chunks and bytes of the body so far.
        self._chunks = self._body_bytes = 0

    def next_event(self) -> Any:
        if self.their_state is not h11.IDLE:
            event = super().next_event()
            if isinstance(event, h11.Data):
                self._chunks += event.chunk_start
                self._body_bytes += len(event.data)
                if self._chunks > _FREE_CHUNKS + self._body_bytes // _LEAST_CHUNK_BYTES:
                    raise BadRequest("the chunks of the body are too small")
            elif isinstance(event, h11.EndOfMessage):
                self._check_size(sum(len(name) + len(value) for name, value in event.headers))
            return event
        self._chunks = self._body_bytes = 0
        received, _ = self.trailing_data
        event = super().next_event()
        if not isinstance(event, h11.Request):
            return event
        rest, _ = self.trailing_data
        head = received[: len(received) - len(rest)]
        # h11 limits only incomplete heads.
        self._check_size(len(head))
        _check_framing(head, event)
        return event if event.target[:1] in (b"/", b"*") else _in_origin_form(event)

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > self._max_head_bytes:
            raise BadRequest("the headers are too large")


def _check_framing(head: bytes, request: h11.Request) -> None:
    """Raises BadRequest if the end of the head or of the body is ambiguous."""
    lines = head.count(b"\r\n")
    if not lines == head.count(b"\n") == head.count(b"\r"):
        raise BadRequest("a line does not end with CR LF")
    if b"\n " in head or b"\n\t" in head:
        raise BadRequest("a header has several lines")
    lengths = _LENGTH.findall(head)
    if len(lengths) > 1 or any(b"," in length for length in lengths):
        raise BadRequest("there are several lengths")
    if any(name == b"transfer-encoding" for name, _ in request.headers):
        if lengths:
            raise BadRequest("there are a length and a transfer coding")
        if request.http_version < b"1.1":
            raise BadRequest("HTTP/1.0 has no transfer codings")


def _in_origin_form(request: h11.Request) -> h11.Request:
    """The request with only a path as its target. Raises BadRequest."""
    if request.method == b"CONNECT":
        # Its target is a host. No route serves it.
        return request
    target = _ABSOLUTE.fullmatch(request.target)
    if target is None:
        raise BadRequest("the target is neither a path nor a URL")
    rest = target["rest"] or b"/"
    # The URL's host replaces that of the header.
    headers = [(name, value) for name, value in request.headers if name != b"host"]
    return h11.Request(
        method=request.method,
        target=rest if rest.startswith(b"/") else b"/" + rest,
        headers=[*headers, (b"host", target["host"])],
        http_version=request.http_version,
    )


def is_address(host: str) -> bool:
    """Whether a Host header is an IP address or localhost, as ports that only this machine reaches require.

    Any other name may be DNS rebinding: a web page could read all responses if the host name of its origin
    resolves to this machine. A page whose origin is an address cannot do so.
    """
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if name.lower() == "localhost":
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True

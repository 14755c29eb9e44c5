"""The HTTP server with TLS: whose certificates it accepts, and for which requests."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest

from service.auth.tokens import Role, new_token
from tests.certificates import Authority, Pair
from tests.service.extensions.openai.served_front import FakeRuntime, generate_yes, raw_chat, serving
from tests.service.served import HttpPort


def tls_settings(pair: Pair, authority: Authority) -> dict[str, Any]:
    return {"tls_cert": str(pair.cert), "tls_key": str(pair.key), "tls_client_ca": str(authority.cert)}


async def statuses(port: int, trusted: Authority, certificate: Pair | None, requests: bytes) -> list[bytes]:
    """The status of each response; empty: the connection is refused."""
    context = ssl.create_default_context(cafile=str(trusted.cert))
    if certificate is not None:
        context.load_cert_chain(certificate.cert, certificate.key)
    try:
        found = await HttpPort(port, context).send(requests)
    except (OSError, ssl.SSLError):
        return []
    return [part[:3] for part in found.split(b"HTTP/1.1 ")[1:]]


LAST_REQUEST = raw_chat().replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1)


async def test_tls_settings_are_the_gateways(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path / "ca"), Authority(tmp_path / "other")
    pair, alice = Pair(tmp_path / "cert", tmp_path / "key"), authority.issue("alice")

    def install(server: Pair) -> None:
        pair.cert.write_bytes(server.cert.read_bytes())
        pair.key.write_bytes(server.key.read_bytes())

    install(authority.server())
    runtime = FakeRuntime(generate_yes)
    async with serving(runtime, **tls_settings(pair, authority)) as served:
        assert await statuses(served.port, authority, alice, LAST_REQUEST) == [b"200"]
        assert runtime.tenants == ["alice"]
        # As OpenAI's clients send it, who have no other way to leave it out.
        with_bearer = LAST_REQUEST.replace(b"connection:", b"authorization: Bearer unused\r\nconnection:", 1)
        assert await statuses(served.port, authority, alice, with_bearer) == [b"200"]
        assert runtime.tenants.pop() == "alice"
        assert await statuses(served.port, authority, None, LAST_REQUEST) == []
        assert await statuses(served.port, other, alice, LAST_REQUEST) == []
        install(other.server())
        assert await statuses(served.port, other, alice, LAST_REQUEST) == [b"200"]


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_resumed_session_does_not_outlive_its_ca(tmp_path: Path, version: ssl.TLSVersion) -> None:
    ours, theirs, used = Authority(tmp_path / "ca"), Authority(tmp_path / "other"), tmp_path / "used"
    server, alice = ours.server(), ours.issue("alice")
    used.write_bytes(ours.cert.read_bytes())
    context = ssl.create_default_context(cafile=str(ours.cert))
    context.load_cert_chain(alice.cert, alice.key)
    context.maximum_version = version

    def call(port: int, session: ssl.SSLSession | None) -> tuple[bytes, ssl.SSLSession | None]:
        with (
            socket.create_connection(("127.0.0.1", port)) as plain,
            context.wrap_socket(plain, server_hostname="localhost", session=session) as connection,
        ):
            connection.sendall(LAST_REQUEST)
            return connection.recv(12), connection.session

    settings = {**tls_settings(server, ours), "tls_client_ca": str(used)}
    async with serving(FakeRuntime(generate_yes), **settings) as served:
        answer, session = await asyncio.to_thread(call, served.port, None)
        assert answer == b"HTTP/1.1 200"
        assert (await asyncio.to_thread(call, served.port, session))[0] == answer
        used.write_bytes(theirs.cert.read_bytes())
        with contextlib.suppress(OSError):
            answer, _ = await asyncio.to_thread(call, served.port, session)
            assert answer == b"", "its certificate is verified again"


async def test_a_pipelined_request_does_not_inherit_authentication(tmp_path: Path) -> None:
    """A request for the models with a token for observers, and then a request for text without a token."""
    authority = Authority(tmp_path / "ca")
    pair, alice, anonymous = authority.server(), authority.issue("alice"), authority.issue("")
    token, line = new_token("ops", [Role.OBSERVE])
    (tmp_path / "tokens").write_text(f"[tokens]\n{line}\n")
    runtime = FakeRuntime(generate_yes)
    both = f"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\n\r\n".encode()
    both += LAST_REQUEST
    settings = tls_settings(pair, authority)
    async with serving(runtime, tokens=str(tmp_path / "tokens"), **settings) as served:
        assert await statuses(served.port, authority, anonymous, both) == [b"200", b"401"]
        assert runtime.tenants == []
        assert await statuses(served.port, authority, alice, both) == [b"200", b"200"]
        assert runtime.tenants == ["alice"]

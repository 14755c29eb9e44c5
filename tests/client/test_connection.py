"""How the clients connect: TLS against real servers, and tokens that do not go out in plain view."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from quire import AsyncClient, Client, Tls, Unavailable
from quire.v1 import executor_pb2_grpc

from tests.certificates import Authority, Pair
from tests.fake_executor import FakeExecutor

PATIENCE_S = 20.0


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


@contextmanager
def serving(executor: FakeExecutor, own: Pair, clients_of: Authority | None = None) -> Iterator[int]:
    """A server with TLS. Yields its port."""
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    executor_pb2_grpc.add_ModelExecutorServiceServicer_to_server(executor, server)
    credentials = grpc.ssl_server_credentials(
        [(own.key.read_bytes(), own.cert.read_bytes())],
        clients_of.cert.read_bytes() if clients_of else None,
        clients_of is not None,
    )
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        yield port
    finally:
        server.stop(0).wait()


def refuses(target: str, tls: Tls | bool) -> bool:
    with Client(target, tls=tls, timeout_s=PATIENCE_S) as client:
        try:
            client.status()
        except Unavailable:
            return True
    return False


@pytest.mark.parametrize("given", [lambda path: path, str, Path.read_bytes])
async def test_a_ca_is_a_path_or_bytes(
    given: Callable[[Path], Any], authority: Authority, executor: FakeExecutor
) -> None:
    with serving(executor, authority.server()) as port:
        tls = Tls(ca=given(authority.cert))
        with Client(f"localhost:{port}", tls=tls, token="secret", timeout_s=PATIENCE_S) as client:
            client.status()
        async with AsyncClient(f"localhost:{port}", tls=tls, timeout_s=PATIENCE_S) as awaiting:
            await awaiting.status()
    assert executor.authorizations == {"Bearer secret", ""}


def test_others_are_not_trusted(authority: Authority, executor: FakeExecutor, tmp_path: Path) -> None:
    with serving(executor, authority.server()) as port:
        target = f"localhost:{port}"
        assert refuses(target, Tls(ca=Authority(tmp_path / "theirs").cert))
        assert refuses(target, tls=True), "public authorities did not sign it"
        assert refuses(target, tls=False)
    assert not executor.calls


def test_a_server_of_another_name(authority: Authority, executor: FakeExecutor) -> None:
    with serving(executor, authority.issue("executor.example", "DNS:executor.example")) as port:
        target = f"127.0.0.1:{port}"
        assert refuses(target, Tls(ca=authority.cert))
        assert not refuses(target, Tls(ca=authority.cert, server_name="executor.example"))


def test_a_certificate_of_the_client(authority: Authority, executor: FakeExecutor) -> None:
    alice = authority.issue("alice")
    with serving(executor, authority.server(), clients_of=authority) as port:
        target = f"localhost:{port}"
        assert refuses(target, Tls(ca=authority.cert))
        assert not refuses(target, Tls(ca=authority.cert, cert=alice.cert, key=alice.key))


@pytest.mark.parametrize(
    "target",
    [
        "127.0.0.1:50051", "127.9.9.9:1", "localhost:50051", "localhost", "[::1]:50051", "::1",
        "ipv4:127.0.0.1:1", "ipv4:127.0.0.1:1,127.0.0.2:1", "ipv6:[::1]:1", "dns:localhost:1", "dns:///localhost:1",
        "dns://9.9.9.9/localhost:1", "unix:/run/quire.sock", "unix:///run/quire.sock", "unix-abstract:quire",
    ],
)  # fmt: skip
def test_a_token_goes_to_this_machine_without_tls(target: str) -> None:
    Client(target, token="secret").close()


@pytest.mark.parametrize(
    "target",
    [
        "10.0.0.1:50051", "quire.example:50051", "localhost.example:1", "[2001:db8::1]:50051", "0.0.0.0:1",
        "unix", "ipv4:127.0.0.1:1,10.0.0.1:1", "ipv6:[::2]:1", "dns:quire.example:1", "dns:///quire.example",
        "xds:///unix:/x",
    ],
)  # fmt: skip
async def test_it_goes_to_no_other_unless_that_is_asked_for(target: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ValueError, match="in plain view") as caught:
            kind(target, token="secret")
        assert "secret" not in str(caught.value)
    Client(target, token="secret", token_in_plain_view=True).close()
    Client(target, token="secret", tls=True).close()
    Client(target).close()


async def test_a_url_is_no_target() -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ValueError, match="a target is HOST:PORT"):
            kind("http://127.0.0.1:50051")


def test_settings_that_contradict_themselves(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="go together"):
        Client(tls=Tls(cert=b"-----BEGIN "))
    empty = tmp_path / "empty.crt"
    empty.touch()
    for no_pem in (b"der", empty):
        with pytest.raises(ValueError, match="ca is not in PEM"):
            Client(tls=Tls(ca=no_pem))
    with pytest.raises(FileNotFoundError):
        Client(tls=Tls(ca="nowhere.crt"))

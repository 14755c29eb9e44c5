"""How the clients connect: TLS against real servers, and tokens that do not go out in plain view."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import grpc
import pytest
from quire import AsyncClient, Client, QuireError, Tls, Unavailable
from quire._connection import connection
from quire._proxies import proxy_of

from tests.certificates import Authority, Pair
from tests.fake_executor import FakeExecutor, serving
from tests.gateway_process import GatewayProcess
from tests.http_proxy import http_proxy

PATIENCE_S = 20.0


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


def serving_tls(
    executor: FakeExecutor, own: Pair, clients_of: Authority | None = None
) -> AbstractContextManager[str]:
    credentials = grpc.ssl_server_credentials(
        [(own.key.read_bytes(), own.cert.read_bytes())],
        clients_of.cert.read_bytes() if clients_of else None,
        clients_of is not None,
    )
    return serving(executor, credentials=credentials)


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
    with serving_tls(executor, authority.server()) as target:
        tls = Tls(ca=given(authority.cert))
        with Client(target, tls=tls, token="secret", timeout_s=PATIENCE_S) as client:
            client.status()
        async with AsyncClient(target, tls=tls, timeout_s=PATIENCE_S) as awaiting:
            await awaiting.status()
    assert executor.authorizations == {"Bearer secret", ""}


def test_others_are_not_trusted(authority: Authority, executor: FakeExecutor, tmp_path: Path) -> None:
    with serving_tls(executor, authority.server()) as target:
        assert refuses(target, Tls(ca=Authority(tmp_path / "theirs").cert))
        assert refuses(target, tls=True), "public authorities did not sign it"
        assert refuses(target, tls=False)
    assert not executor.calls


def test_a_server_of_another_name(authority: Authority, executor: FakeExecutor) -> None:
    with serving_tls(executor, authority.issue("executor.example", "DNS:executor.example")) as target:
        assert refuses(target, Tls(ca=authority.cert))
        assert not refuses(target, Tls(ca=authority.cert, server_name="executor.example"))


def test_a_certificate_of_the_client(authority: Authority, executor: FakeExecutor) -> None:
    alice = authority.issue("alice")
    with serving_tls(executor, authority.server(), clients_of=authority) as target:
        assert refuses(target, Tls(ca=authority.cert))
        assert not refuses(target, Tls(ca=authority.cert, cert=alice.cert, key=alice.key))


@pytest.mark.parametrize(("targets", "ping_ms", "answer_ms"), [
    (["here:1"], 20_000, 20_000),
    (["here:1", "here:2"], 2_000, 3_000),
])  # fmt: skip
def test_one_of_several_gateways_is_left_sooner_than_a_single_server(
    targets: list[str], ping_ms: int, answer_ms: int
) -> None:
    """What gRPC does with these is measured below, for 40 seconds."""
    settings: Any = {"tls": False, "token": "", "token_in_plain_view": False}
    options = dict(connection(targets, **settings, max_request_bytes=1, max_response_bytes=1).options)
    assert options["grpc.keepalive_time_ms"] == ping_ms
    assert options["grpc.keepalive_timeout_ms"] == options["grpc.http2.ping_timeout_ms"] == answer_ms
    assert options["grpc.http2.max_pings_without_data"] == 0, "pings go on while a call is quiet"
    assert options["grpc.max_reconnect_backoff_ms"] == 2_000


@pytest.mark.thorough
async def test_a_server_that_disappears_is_noticed_without_a_timeout() -> None:
    """Nobody closes the connection. Takes 40 seconds."""
    with GatewayProcess(model="paged-attention", flags=["--kv-pages", "64"]) as gateway:
        async with AsyncClient(gateway.address, timeout_s=300, retries=False) as client:
            await client.status()
            os.kill(gateway.process.pid, signal.SIGSTOP)
            try:
                with pytest.raises(Unavailable):
                    await client.status()
            finally:
                os.kill(gateway.process.pid, signal.SIGCONT)


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


@pytest.mark.parametrize(
    "target", ["", "http://127.0.0.1:50051", "127.0.0.1:99999", "ipv4:127.0.0.1:1,127.0.0.1:65536"]
)
async def test_a_url_is_no_target_and_no_port_is_taken_modulo(target: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ValueError, match="is refused: must "):
            kind(target)


@pytest.mark.parametrize(
    ("others", "refused"),
    [
        (["unix:/run/quire", "10.0.0.1:1"], "would go to 10.0.0.1:1 in plain view"),
        (["ipv4:127.0.0.1:1", "ipv4:127.0.0.2:1"], ""),
        (["127.0.0.1:1", "http://127.0.0.1:2"], "'http://127.0.0.1:2' is refused"),
        ("127.0.0.1:1,", "'' is refused"),
    ],
)
def test_each_of_several_targets_is_checked(others: str | list[str], refused: str) -> None:
    with pytest.raises(ValueError, match=refused) if refused else contextlib.nullcontext():
        Client(others, token="secret").close()


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


HERE = [
    "127.0.0.1:{}",
    "localhost:{}",
    "LOCALHOST:{}",
    "0.0.0.0:{}",
    "dns:///localhost:{}",
    "ipv4:127.0.0.1:{}",
]


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY"])
async def test_no_proxy_is_asked_for_this_machine(
    variable: str, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot reach a server here; and before, it saw the token, which goes without TLS to this machine."""
    with serving(executor) as target, http_proxy() as proxy:
        monkeypatch.setenv(variable, proxy.url)
        for form in HERE:
            address = form.format(target.rpartition(":")[2])
            with Client(address, timeout_s=PATIENCE_S) as client:
                client.status()
                with client.session():
                    pass
            async with AsyncClient(address, timeout_s=PATIENCE_S) as awaiting:
                await awaiting.status()
        assert not proxy.requests


@pytest.mark.parametrize("use", [
    lambda client: client.status(),
    lambda client: client.prefill([1]),
    lambda client: list(client.execute("x")),
    lambda client: client.session().prefill([1]),
    lambda client: client.load_weights("/x"),
    lambda client: client.load_adapter("x", "/x"),
])  # fmt: skip
def test_a_proxy_is_named_where_it_may_be_the_cause(
    use: Callable[[Client], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with http_proxy() as proxy, monkeypatch.context() as patch:
        patch.setenv("http_proxy", proxy.url)
        client = Client("quire.example:50051", timeout_s=PATIENCE_S, retries=False)
        with client, pytest.raises(QuireError) as caught:
            use(client)
        assert f"(through the proxy {proxy.address} of http_proxy)" in str(caught.value)
        assert "secret" not in str(caught.value) and proxy.requests


@pytest.mark.parametrize(("target", "no_proxy", "named"), [
    ("quire.example:1", "", True), ("quire.example:1", "other.example,quire.example", False),
    ("quire.example:1", ".example", False), ("10.1.2.3:1", "10.0.0.0/8", False),
    ("10.1.2.3:1", "11.0.0.0/8", True),
    ("127.0.0.1:1", "", False), ("unix:/run/quire", "", False), ("[2001:db8::1]:1", "", True),
])  # fmt: skip
def test_which_targets_have_a_proxy(
    target: str, no_proxy: str, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", "http://me:secret@proxy.example:3128/")
    monkeypatch.setenv("no_proxy", no_proxy)
    assert proxy_of(target) == ("proxy.example:3128 of https_proxy" if named else "")
    monkeypatch.setenv("https_proxy", "proxy.example:3128")
    assert not proxy_of(target), "gRPC does not use it without a scheme"

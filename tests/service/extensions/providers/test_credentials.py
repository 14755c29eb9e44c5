"""Credentials are read again when they are refused, and only the provider ever sees them."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from quire.v1 import admin_pb2, runner_pb2
from structlog.testing import capture_logs

from service.caches.tenants import Tenant
from service.errors import ProviderFailure
from service.extensions.providers.dialects.openai import ChatCompletions
from service.runtimes.base import Batch
from tests.certificates import Authority
from tests.http_proxy import http_proxy
from tests.service.extensions.providers.fake_provider import (
    EVENT_STREAM,
    Collected,
    FakeProvider,
    Reply,
    VirtualTime,
    answered,
    config,
    delta,
    event,
    fake_provider,
    item,
    raw,
    reason,
    remote,
    run,
    said,
    stalled,
    status,
    stream,
)

MANUAL = admin_pb2.REBUILD_CAUSE_MANUAL
SECRET = "sk-planted-secret"
OTHER = "sk-another-secret"
GOOD = said("good")
HEAD = EVENT_STREAM.encode()


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(SECRET + "\n")
    return path


def write(key: Path, text: str | None) -> None:
    if text is None:
        key.unlink()
    else:
        key.write_text(text)


async def test_refused_credentials_open_the_breaker(provider: FakeProvider, key: Path) -> None:
    """They are refused for every caller, and are not tried again for each."""
    provider.script.append(status(401))
    virtual = VirtualTime()
    async with remote(config(provider, api_key_file=str(key)), virtual) as runtime:
        for tried in range(1, 13):
            out = await run(runtime, item())
            assert reason(out.last()) == ("UNAUTHORIZED" if tried <= 10 else "CIRCUIT_OPEN")
        assert len(provider.asked) == 10 and virtual.slept == []
        assert runtime.describe().breaker == runner_pb2.BREAKER_STATE_OPEN and runtime.describe().trouble
        virtual.now_s += 31
        assert not runtime.describe().trouble, "a router sends the next request"
        write(key, OTHER)
        provider.script = type(provider.script)([GOOD])
        assert (await run(runtime, item())).text("a") == "good"
        after = runtime.describe()
    assert (after.trouble, after.breaker) == ("", runner_pb2.BREAKER_STATE_CLOSED)


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "ALL_PROXY"])
async def test_a_provider_on_this_machine_is_asked_without_a_proxy(
    provider: FakeProvider, key: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """Its connection has no TLS, so that a proxy would see the key and the prompt."""
    with http_proxy() as proxy:
        monkeypatch.setenv(variable, proxy.url)
        for host in ("127.0.0.1", "localhost"):
            provider.script.append(GOOD)
            url = provider.url.replace("127.0.0.1", host)
            out = await answered(provider, item(), api_key_file=str(key), base_url=url)
            assert out.text("a") == "good"
    assert not proxy.requests


@pytest.mark.parametrize(
    ("scheme", "answer", "expected"),
    [
        ("https", 407, "NETWORK_ERROR"),
        ("https", 502, "NETWORK_ERROR"),
        ("https", None, "NETWORK_ERROR"),
        # Without a tunnel, the proxy's answer looks like the provider's.
        ("http", 407, "NETWORK_ERROR"),
        ("http", 502, "SERVER_ERROR"),
        ("http", None, "NETWORK_ERROR"),
    ],
)
async def test_a_proxy_is_named_where_it_may_be_the_cause(
    provider: FakeProvider,
    key: Path,
    monkeypatch: pytest.MonkeyPatch,
    scheme: str,
    answer: int | None,
    expected: str,
) -> None:
    with http_proxy(answer) as proxy:
        monkeypatch.setenv(f"{scheme}_PROXY".upper(), proxy.url)
        settings: dict[str, Any] = {"api_key_file": str(key), "max_retries": 0, "insecure": scheme == "http"}
        with capture_logs() as logs:
            out = await answered(provider, item(), base_url=f"{scheme}://provider.example/v1", **settings)
    assert proxy.requests
    assert any(SECRET in request for request in proxy.requests) == (scheme == "http"), "as `insecure` allows"
    error = out.last().error
    assert reason(out.last()) == expected and f"the proxy that {scheme}_proxy names" in error.message
    assert proxy.address not in error.message
    (told,) = [entry for entry in logs if entry["event"] == "a provider is reached through a proxy"]
    assert told["proxy"] == proxy.address and "secret" not in str(told)


async def test_rebuilding_a_session_does_not_disturb_running_calls(provider: FakeProvider, key: Path) -> None:
    go_on = asyncio.Event()

    async def slow(writer: asyncio.StreamWriter) -> bool:
        writer.write(HEAD + event(delta("old")))
        await go_on.wait()
        writer.write(event(delta(finish="stop")) + event("[DONE]"))
        return False

    provider.script += [slow, GOOD]
    sink = Collected()
    async with remote(config(provider, api_key_file=str(key))) as runtime:
        running = asyncio.create_task(runtime.execute(Batch("k", Tenant(), [item()]), sink))
        await sink.first.wait()
        write(key, OTHER)
        assert await runtime.rebuild_session(MANUAL) == 1
        again = await run(runtime, item())
        go_on.set()
        await running

    assert (sink.text(), again.text()) == ("old", "good")
    assert provider.connections == 2
    assert provider.asked[1].headers["authorization"] == f"Bearer {OTHER}"


@pytest.mark.parametrize("text", ["", "two words", "line\nbreak", "k\u00e9y", "\x7f", None])
async def test_an_invalid_key_is_not_sent(provider: FakeProvider, key: Path, text: str | None) -> None:
    write(key, text)

    async with remote(config(provider, api_key_file=str(key))) as runtime:
        out = await run(runtime, item())
        assert runtime.describe().trouble
        with pytest.raises(ProviderFailure):
            await runtime.rebuild_session(MANUAL)
        write(key, SECRET)
        provider.script.append(GOOD)
        assert (await run(runtime, item())).text() == "good"
        assert not runtime.describe().trouble

    assert reason(out.last()) == "UNAUTHORIZED"


@pytest.mark.parametrize("is_trusted", [True, False])
async def test_credentials_are_only_sent_over_verified_tls(
    key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_trusted: bool
) -> None:
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    monkeypatch.setenv("SSL_CERT_FILE", str(ours.cert))
    pair = (ours if is_trusted else theirs).server()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(pair.cert, pair.key)

    async with fake_provider(tls) as provider:
        provider.script.append(GOOD)
        async with remote(config(provider, api_key_file=str(key)), VirtualTime()) as runtime:
            out = await run(runtime, item())

    assert reason(out.last()) == ("" if is_trusted else "NETWORK_ERROR")
    assert len(provider.asked) == is_trusted


def _leaks() -> Iterator[tuple[str, Reply]]:
    """Responses of a provider that repeats the credentials wherever it can."""
    echo = {"error": {"message": SECRET, "type": SECRET, "code": SECRET}}
    yield "a status", status(500, echo, f"X-Echo: {SECRET}\r\nSet-Cookie: k={SECRET}\r\n")
    yield "a refusal", status(401, echo)
    yield "a bad request", status(400, echo)
    yield "a reason", raw(f"HTTP/1.1 403 {SECRET}\r\nContent-Length: 0\r\n\r\n".encode())
    yield "a broken head", raw(f"{SECRET}\r\n\r\n".encode())
    yield "a redirect", status(302, headers=f"Location: http://{SECRET}/\r\n")
    yield "an error in the stream", stream(echo)
    yield "an error behind text", stream(delta("x"), echo)
    yield "bad JSON", stream(SECRET)
    yield "a wrong type", raw(HEAD.replace(b"text/event-stream", SECRET.encode()))
    yield "a cut", raw(HEAD + event(delta("x")) + SECRET.encode())
    yield "a stall", stalled(HEAD + event(delta("x")) + SECRET.encode())
    yield "nothing", raw()


LEAKS = dict(_leaks())


@pytest.mark.parametrize("name", LEAKS)
async def test_credentials_appear_nowhere(
    provider: FakeProvider,
    key: Path,
    name: str,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Not in a log with all levels, whatever the provider does with them."""
    provider.script.append(LEAKS[name])
    shown: list[object] = []

    with caplog.at_level(logging.DEBUG):
        made = config(provider, api_key_file=str(key), read_timeout_s=0.05 if name == "a stall" else 10.0)
        async with remote(made, VirtualTime()) as runtime:
            out = await run(runtime, item())
            shown += [runtime, runtime.describe(), *vars(runtime).values(), made]
        shown += [chunk.SerializeToString() for chunk in out.chunks]

    assert reason(out.last())
    assert provider.asked[0].headers["authorization"] == f"Bearer {SECRET}"
    said_anywhere = caplog.text + "".join(capfd.readouterr()) + "".join(map(repr, shown))
    assert "planted" not in said_anywhere


async def test_an_unexpected_exception_reveals_no_credentials(
    provider: FakeProvider,
    key: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def broken(secret: str) -> dict[str, str]:
        raise ZeroDivisionError(secret)

    monkeypatch.setattr(ChatCompletions, "headers", broken)
    provider.script.append(GOOD)
    out = await answered(provider, item(), api_key_file=str(key))
    assert reason(out.last()) == "INTERNAL"
    logged = caplog.text + "".join(capfd.readouterr())
    assert "ZeroDivisionError" in logged and "planted" not in logged

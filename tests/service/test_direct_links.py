"""Connections of a server's own parts, and to what is on this machine, do not go through a proxy."""

from __future__ import annotations

import contextvars
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from quire.v1 import executor_pb2

from service import outbound
from service.config import Config
from service.errors import GatewayUnavailable
from service.extensions.gateways.peers import Addresses, Peers
from service.extensions.tracing.spans import Spans
from tests.collector import Collector
from tests.http_proxy import HttpProxy, http_proxy

NOBODY = "127.0.0.1:1"


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpProxy]:
    with http_proxy() as proxy:
        for variable in ("http_proxy", "https_proxy"):
            monkeypatch.setenv(variable, proxy.url)
        yield proxy


async def test_from_a_gateway_to_another(proxy: HttpProxy) -> None:
    peers = Peers(Config(), "secret", Addresses(), grpc.ssl_channel_credentials())
    asked = executor_pb2.GetStatusRequest(), executor_pb2.GetStatusResponse
    with pytest.raises(GatewayUnavailable):
        await peers.call(NOBODY, "GetStatus", *asked, timeout_s=30, metadata=())
    assert not proxy.requests
    await peers.close()


def test_to_a_collector_on_this_machine(proxy: HttpProxy) -> None:
    with Collector() as collector:
        spans = Spans(collector.endpoint)
        # The trace is bound in the context.
        span = contextvars.copy_context().run(spans.begin, "one", {}, ())
        assert span is not None
        span.end()
        spans.close()
        assert [one.span.name for one in collector.spans()] == ["one"]
    assert not proxy.requests


def test_to_a_mirror_of_the_hub_on_this_machine(proxy: HttpProxy, tmp_path: Path) -> None:
    """Its library reads the environment once, so in a process of its own."""
    code = (
        "import os; os.environ['no_proxy'] = 'elsewhere.example'\n"
        "from service.cli import hub\n"
        "try: hub.find_model('org/model', None)\n"
        "except hub.HubError as error: print(error, os.environ['no_proxy'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"HF_ENDPOINT": f"http://{NOBODY}", "HF_HOME": str(tmp_path), "http_proxy": proxy.url},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "cannot be downloaded from 127.0.0.1:1:" in done.stdout, done.stderr
    assert done.stdout.split()[-1] == "elsewhere.example,127.0.0.1" and not proxy.requests


@pytest.mark.parametrize(
    ("url", "variable"),
    [
        ("http://127.0.0.1:8000/v1", None),
        ("http://LOCALHOST/v1", None),
        ("http://[::1]:1", None),
        ("https://provider.example/v1", "https_proxy"),
        ("http://10.0.0.1/v1", "http_proxy"),
        ("https://no.example/v1", None),
    ],
)
def test_which_urls_have_a_proxy(url: str, variable: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://me:secret@proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", "no.example")
    found = outbound.proxy_of(url)
    assert found == (None if variable is None else outbound.Proxy(variable, "proxy.example:3128"))


@pytest.mark.parametrize("variable", ["all_proxy", "ALL_PROXY"])
def test_a_proxy_for_all(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "proxy.example:3128")
    assert outbound.proxy_of("https://a.example") == outbound.Proxy("all_proxy", "proxy.example:3128")

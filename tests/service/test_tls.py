"""TLS: client certificates, their tenants, and certificates that change while the server runs."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from quire import AsyncClient, QuireError, Tls
from quire.v1 import executor_pb2, executor_pb2_grpc

from service.api.interceptor import CallInterceptor
from service.auth.authenticator import Authenticator, current_tenant
from service.auth.tls import server_credentials
from service.auth.tokens import Role, new_token
from service.config import Config
from service.settings import ConfigError
from tests.certificates import Authority, Pair
from tests.service.served import state_of

PATIENCE_S = 30.0


class Servicer(executor_pb2_grpc.ModelExecutorServiceServicer):
    """Answers with the caller's tenant."""

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        tenant = current_tenant()
        name = tenant.name if tenant is not None else "-"
        return executor_pb2.GetModelInfoResponse(tokenizer_json=name.encode())


@asynccontextmanager
async def serving(config: Config) -> AsyncIterator[str]:
    credentials = server_credentials(config)
    assert credentials is not None
    interceptor = CallInterceptor(state_of(config), Authenticator.of(config))
    server = grpc.aio.server(interceptors=[interceptor])
    servicer = Servicer()  # type: ignore[abstract] # The other methods are not called.
    executor_pb2_grpc.add_ModelExecutorServiceServicer_to_server(servicer, server)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    yield f"localhost:{port}"
    await server.stop(None)


async def called_as(target: str, ca: Authority, who: Pair | None = None, token: str = "") -> str:
    """The tenant as whom a call is made, or why there is none."""
    key, cert = (who.key.read_bytes(), who.cert.read_bytes()) if who else (None, None)
    credentials = grpc.ssl_channel_credentials(ca.cert.read_bytes(), key, cert)
    # A new connection each time: gRPC shares those of equal options.
    async with AsyncClient(
        target, tls=credentials, token=token, timeout_s=PATIENCE_S, max_response_bytes=_unique()
    ) as client:
        try:
            return (await client.model_info()).tokenizer_json.decode()
        except QuireError as error:
            return error.reason or error.code.name


def _unique() -> int:
    return (1 << 20) + int.from_bytes(os.urandom(2), "big")


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


@pytest.fixture
def theirs(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "theirs")


def listening(pair: Pair, **rest: str) -> Config:
    return Config(tls_cert=str(pair.cert), tls_key=str(pair.key), **rest)  # type: ignore[arg-type]


async def test_a_client_certificate_names_the_tenant(
    ours: Authority, theirs: Authority, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    token, line = new_token("carol", [Role.CALL])
    listed = '[certificates]\n"ops" = { tenant = "team", roles = ["observe"] }\n'
    tokens.write_text(f"[tokens]\n{line}\n{listed}")
    config = listening(ours.server(), tls_client_ca=str(ours.cert), tokens=str(tokens))
    alice = ours.issue("alice")
    async with serving(config) as target:
        assert await called_as(target, ours, alice) == "alice"
        assert await called_as(target, ours, ours.issue("x", "URI:spiffe://here/bob")) == "spiffe://here/bob"
        assert await called_as(target, ours, ours.issue("y", "DNS:z,DNS:ops")) == "team", "a name is listed"
        assert await called_as(target, ours, alice, token) == "carol", "a token says more"
        assert await called_as(target, ours, alice, token[:-1]) == "BAD_TOKEN", "and a bad one is refused"
        assert await called_as(target, ours, ours.issue("two words")) == "BAD_CERTIFICATE"
        assert await called_as(target, ours, ours.issue("")) == "BAD_CERTIFICATE"
        assert await called_as(target, ours) == "UNAVAILABLE"
        assert await called_as(target, ours, theirs.issue("alice")) == "UNAVAILABLE"


async def test_certificates_are_reloaded(ours: Authority, theirs: Authority, tmp_path: Path) -> None:
    first, second = ours.server(), theirs.server()
    used = Pair(tmp_path / "crt", tmp_path / "key")
    shutil.copy(first.cert, used.cert)
    shutil.copy(first.key, used.key)
    async with serving(listening(used)) as target:
        assert await called_as(target, ours) == "-"
        async with AsyncClient(target, tls=Tls(ca=ours.cert), timeout_s=PATIENCE_S) as open_before:
            await open_before.model_info()
            with structlog.testing.capture_logs() as records:
                shutil.copy(second.cert, used.cert)  # its key is not there yet
                assert await called_as(target, ours) == "-", "the previous contents stay in use"
            assert any("stay in use" in record["event"] for record in records)
            shutil.copy(second.key, used.key)
            assert await called_as(target, theirs) == "-"
            assert await called_as(target, ours) == "UNAVAILABLE"
            assert (await open_before.model_info()).tokenizer_json == b"-"


def test_invalid_files_are_an_error_at_the_start(ours: Authority, theirs: Authority) -> None:
    pair, other = ours.server(), theirs.server()
    for cert, key in ((pair.cert, other.key), (pair.key, pair.cert), (pair.cert, pair.cert)):
        with pytest.raises(ConfigError, match="cannot be used"):
            server_credentials(listening(Pair(cert, key)))
    with pytest.raises(ConfigError, match="cannot be used"):
        server_credentials(listening(pair, tls_client_ca=str(pair.key)))
    with pytest.raises(ConfigError, match="cannot be used: one of them is not in PEM"):
        server_credentials(listening(Pair(Path(os.devnull), Path(os.devnull))))

"""Authentication by tokens and certificates, tenants, and roles."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from quire import errors as client_errors
from quire.v1 import executor_pb2

from service.api.interceptor import CallInterceptor
from service.auth.authenticator import Authenticator, current_tenant
from service.auth.reloaded_file import ReloadedFile
from service.auth.tokens import Role, TokenStore, new_token, read_token_store
from service.config import Config
from service.errors import Unauthenticated
from tests.service.served import channel_to, state_of
from workers.models.files import file_version

PATIENCE_S = 30.0
SERVICE = "quire.v1.ModelExecutorService"
DATA = ("Prefill", "Decode", "ForkCache", "Session")


def written(path: Path, *parts: str) -> Path:
    path.write_text("\n".join(parts))
    return path


def entry(tenant: str, *roles: str) -> tuple[str, str]:
    """A token, and its line."""
    return new_token(tenant, [Role(role) for role in roles or ("call",)])


@pytest.fixture
def alice(tmp_path: Path) -> tuple[str, Authenticator]:
    """A token, and what knows it."""
    token, line = entry("alice")
    return token, Authenticator(written(tmp_path / "tokens", "[tokens]", line), certificates=False)


# The file.


def test_a_new_token_opens_what_its_line_says(tmp_path: Path) -> None:
    token, line = entry("alice", "call", "observe")
    other, _ = entry("alice")
    file = written(tmp_path / "tokens", "[tokens]", line, "[tenants.alice]", "max_caches = 3")
    assert token not in file.read_text()
    token_store = read_token_store(file)
    principal = token_store.principal_of(token)
    assert (
        principal is not None and principal.tenant == "alice" and principal.roles == {Role.CALL, Role.OBSERVE}
    )
    assert token_store.quota_of("alice").max_caches == 3 and token_store.quota_of("bob").max_caches is None
    for wrong in (other, "", token[:-1], token + "=", "é\udc80", line.split('"')[1]):
        assert token_store.principal_of(wrong) is None
    assert TokenStore({}, {}, {}).principal_of(token) is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[tokens", "TOML"),
        ("[token]\n", "table token is unknown"),
        ("tokens = 3", "must be a table"),
        ('[tokens]\n"abc" = { tenant = "a" }', "SHA-256"),
        (f'[tokens]\n"{"a" * 64}" = "alice"', "must be a table"),
        (f'[tokens]\n"{"a" * 64}" = {{ roles = ["call"] }}', "tenant"),
        (f'[tokens]\n"{"a" * 64}" = {{ tenant = "a b" }}', "without spaces"),
        (f'[tokens]\n"{"a" * 64}" = {{ tenant = "" }}', "without spaces"),
        (f'[tokens]\n"{"a" * 64}" = {{ tenant = "a", roles = ["root"] }}', "roles"),
        (f'[tokens]\n"{"a" * 64}" = {{ tenant = "a", role = "call" }}', "nothing else"),
        ("[tenants.a]\nmax_cache = 3", "quota max_cache is unknown"),
        ("[tenants.a]\nmax_caches = 0", "above 0"),
        ("[tenants.a]\nmax_caches = true", "above 0"),
        ("[tenants.a]\nmax_caches = 1.5", "above 0"),
        ("[tenants.a]\nmax_per_s = nan", "above 0"),
        ("", "has no tokens"),
        ("# no entry\n[tokens]\n[certificates]\n", "has no tokens"),
        ("[tenants.a]\nmax_caches = 1", "has no token"),
    ],
)
def test_an_invalid_file_is_refused(tmp_path: Path, content: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_token_store(written(tmp_path / "tokens", content))


# Authentication.


class Servicer:
    """Every call answers, and notes as whom it was made."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __getattr__(self, rpc: str) -> Any:
        async def answer(_request: Any, _context: Any) -> Any:
            tenant = current_tenant()
            self.seen.append("-" if tenant is None else tenant.name)
            return None if rpc == "Session" else getattr(executor_pb2, f"{rpc}Response")()

        return answer


UNARY = {
    method.name for method in executor_pb2.DESCRIPTOR.services_by_name["ModelExecutorService"].methods
} - {"Session"}


class Harness:
    """A server with authentication, and a client of it."""

    def __init__(self, servicer: Servicer, channel: grpc.aio.Channel) -> None:
        self.servicer = servicer
        self.channel = channel

    async def call(self, rpc: str, *authorization: str) -> str:
        """The reason for which a call is refused, or the tenant as whom it was made."""
        metadata = [("authorization", value) for value in authorization]
        try:
            if rpc == "Session":
                stream: Any = self.channel.stream_stream(f"/{SERVICE}/Session")
                call = stream(iter([]), metadata=metadata, timeout=PATIENCE_S)
                async for _ in call:
                    pass
            else:
                raw: Any = self.channel.unary_unary(f"/{SERVICE}/{rpc}")
                await raw(b"", metadata=metadata, timeout=PATIENCE_S)
        except grpc.aio.AioRpcError as error:
            parsed = client_errors.from_rpc_error(error)
            assert parsed.metadata.get("request_id"), "refusals can be found in the log too"
            assert isinstance(parsed, client_errors.Unauthenticated) == parsed.reason.endswith("_TOKEN")
            assert not any(value and value in parsed.message for value in authorization)
            return parsed.reason
        return self.servicer.seen[-1]


@contextlib.asynccontextmanager
async def behind(authenticator: Authenticator | None) -> AsyncIterator[Harness]:
    interceptor = CallInterceptor(state_of(Config()), authenticator)
    servicer = Servicer()
    add_health = partial(health_pb2_grpc.add_HealthServicer_to_server, health.aio.HealthServicer())
    async with channel_to(servicer, interceptor, add_health) as channel:
        yield Harness(servicer, channel)


async def test_only_a_known_token_is_accepted(alice: tuple[str, Authenticator]) -> None:
    (token, authenticator), (stranger, _) = alice, entry("alice")
    async with behind(authenticator) as harness:
        for rpc in DATA:
            assert await harness.call(rpc, f"Bearer {token}") == "alice"
            assert await harness.call(rpc, f"bearer {token}") == "alice"
            assert await harness.call(rpc) == "NO_TOKEN"
            for wrong in (f"Bearer {stranger}", "Bearer ", token, f"Basic {token}", f"Bearer {token} x"):
                assert await harness.call(rpc, wrong) == "BAD_TOKEN"
        assert await harness.call("Decode", f"Bearer {token}", f"Bearer {stranger}") == "BAD_TOKEN"
        assert len(harness.servicer.seen) == 2 * len(DATA)


async def test_no_request_of_an_unauthenticated_call_is_read(alice: tuple[str, Authenticator]) -> None:
    async with behind(alice[1]) as harness:
        never = asyncio.Event()

        async def messages() -> AsyncIterator[bytes]:
            yield b"\x00"
            await never.wait()

        half_sent: Any = harness.channel.stream_unary(f"/{SERVICE}/Prefill")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await half_sent(messages(), timeout=PATIENCE_S)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_health_is_open(alice: tuple[str, Authenticator]) -> None:
    async with behind(alice[1]) as harness:
        stub: Any = health_pb2_grpc.HealthStub(harness.channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_roles(tmp_path: Path) -> None:
    observed = {"GetStatus", "GetCacheMetrics", "GetLoraMetrics"}
    both = {"GetModelInfo", "GetCapabilities", "ListCaches"}
    everything = {*UNARY, "Session"}
    allowed = {"call": everything - observed, "observe": observed | both, "administer": everything}
    made = {role: entry(f"t-{role}", role) for role in allowed}
    lines = [line for _, line in made.values()]
    authenticator = Authenticator(written(tmp_path / "tokens", "[tokens]", *lines), certificates=False)
    async with behind(authenticator) as harness:
        for role, (token, _) in made.items():
            answers = {rpc: await harness.call(rpc, f"Bearer {token}") for rpc in everything}
            assert {rpc for rpc, answer in answers.items() if answer == f"t-{role}"} == allowed[role]
            assert {a for rpc, a in answers.items() if rpc not in allowed[role]} <= {"ROLE_MISSING"}


async def test_readers_count_in_the_rate(tmp_path: Path) -> None:
    token, line = entry("alice")
    file = written(tmp_path / "tokens", "[tokens]", line, "[tenants.alice]", "max_per_s = 0.001")
    async with behind(Authenticator(file, certificates=False)) as harness:
        assert await harness.call("ListCaches", f"Bearer {token}") == "alice"
        assert await harness.call("ListCaches", f"Bearer {token}") == "QUOTA"


# The second is a file in the middle of being rewritten.
@pytest.mark.parametrize("broken", ["[tokens", ""], ids=["syntax", "empty"])
async def test_the_file_is_reloaded_and_a_broken_one_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    monkeypatch.setattr("service.auth.authenticator._POLL_INTERVAL_S", 0.01)
    (old, old_line), (new, new_line) = entry("alice"), entry("alice")
    file = written(tmp_path / "tokens", "[tokens]", old_line)
    authenticator = Authenticator(file, certificates=False)
    watching = asyncio.create_task(authenticator.watch())
    async with behind(authenticator) as harness, asyncio.timeout(PATIENCE_S):
        assert await harness.call("Decode", f"Bearer {old}") == "alice"
        with structlog.testing.capture_logs() as records:
            written(file, broken)
            while not any("cannot reload the tokens" in record["event"] for record in records):
                await asyncio.sleep(0.01)
        assert await harness.call("Decode", f"Bearer {old}") == "alice"

        other = written(tmp_path / "other", "[tokens]", new_line, "[tenants.alice]", "max_caches = 7")
        other.replace(file)
        while await harness.call("Decode", f"Bearer {new}") != "alice":
            await asyncio.sleep(0.01)
        assert await harness.call("Decode", f"Bearer {old}") == "BAD_TOKEN"
        assert authenticator.tenant("alice").quota.max_caches == 7, "of the same tenant as before"
    watching.cancel()


PEER = {"x509_common_name": [b"carol"]}
DECODE = f"/{SERVICE}/Decode"


def caller(authenticator: Authenticator, *authorization: str) -> str:
    """As whom a call with carol's certificate is made."""
    metadata = [("authorization", value) for value in authorization]

    def call() -> str:
        if not authenticator.authenticate(DECODE, metadata):
            authenticator.authenticate_by_certificate(DECODE, PEER)
        tenant = current_tenant()
        assert tenant is not None
        return tenant.name

    # Other tests have no tenant.
    return contextvars.copy_context().run(call)


@pytest.mark.parametrize("content", [None, "[tenants.alice]\nmax_caches = 1"])
def test_without_tokens_a_bearer_is_no_credential(tmp_path: Path, content: str | None) -> None:
    """Of a certificate's owner. OpenAI's clients always send one."""
    file = None if content is None else written(tmp_path / "tokens", content)
    authenticator = Authenticator(file, certificates=True)
    for values in ((), ("Bearer unused",), ("Basic x",), ("Bearer ",), ("Bearer a", "Bearer b")):
        assert caller(authenticator, *values) == "carol"


def test_with_tokens_and_certificates_a_token_decides(tmp_path: Path) -> None:
    token, line = entry("alice")
    authenticator = Authenticator(written(tmp_path / "tokens", "[tokens]", line), certificates=True)
    assert caller(authenticator, f"Bearer {token}") == "alice"
    assert caller(authenticator) == "carol"
    with pytest.raises(Unauthenticated, match="not valid"):
        caller(authenticator, "Bearer unused")


def test_a_file_that_is_rewritten_in_place_with_its_time_set_back_is_read_again(tmp_path: Path) -> None:
    """As a token that is replaced by one of the same length. Before, the old one stayed valid."""
    path = tmp_path / "tokens"
    path.write_text("old")
    tokens = ReloadedFile("tokens", [path], path.read_text)
    status = path.stat()
    assert not tokens.refresh()
    while path.stat().st_ctime_ns == status.st_ctime_ns:
        # The clock of the file system has moved on.
        time.sleep(0.001)
        with path.open("r+") as file:
            file.write("new")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (path.stat().st_ino, path.stat().st_size, path.stat().st_mtime_ns) == (
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
    )
    assert tokens.refresh() and tokens.value == "new"
    assert file_version(path.stat()) != file_version(status), "nor is a model loaded that changes meanwhile"

"""A real gateway with authentication: strangers learn nothing, logs that nobody reads stop nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from quire import Client, PermissionDenied, QuireError, SessionEnded
from quire.v1 import executor_pb2
from safetensors.torch import save

from service.auth.tokens import Role, new_token
from tests import quire_command
from tests.certificates import Authority
from tests.gateway_process import GatewayProcess

PROMPT = list(range(1, 50))
TENANTS = ("alice", "mallory")


class Guarded(GatewayProcess):
    """A gateway with a token for each tenant; the harness itself observes."""

    def __init__(
        self, directory: Path, *flags: str, model: str = "paged-attention", quotas: Sequence[str] = ()
    ) -> None:
        made = {name: new_token(name, [Role.CALL]) for name in TENANTS}
        made["ops"] = new_token("ops", [Role.OBSERVE])
        self.tokens = {name: token for name, (token, _) in made.items()}
        file = directory / "tokens"
        file.write_text("\n".join(["[tokens]", *(line for _, line in made.values()), *quotas]))
        super().__init__(model=model, flags=["--kv-pages", "64", "--tokens", str(file), *flags])

    def status(self) -> executor_pb2.GetStatusResponse:
        with self.client("ops") as ops:
            return ops.status()

    def client(self, name: str) -> Client:
        return Client(self.address, token=self.tokens.get(name, ""), timeout_s=30)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with Guarded(tmp_path_factory.mktemp("guarded")) as gateway:
        yield gateway


def test_prefixes_of_others_give_nothing_away(guarded: Guarded) -> None:
    with guarded.client("alice") as alice, guarded.client("mallory") as mallory:
        assert alice.prefill(PROMPT).reused_tokens == 0
        assert alice.prefill(PROMPT).reused_tokens == 48
        assert mallory.prefill(PROMPT).reused_tokens == 0, "another tenant's"
        salted = executor_pb2.PrefillRequest(token_ids=PROMPT, cache_salt="user-7")
        reused = [alice.stub.Prefill(salted, metadata=alice.metadata).reused_tokens for _ in range(2)]
        assert reused == [0, 48], "another salt's, then its own"


def test_strangers_see_nothing_on_a_session_either(guarded: Guarded) -> None:
    with guarded.client("alice") as alice, guarded.client("mallory") as mallory:
        cache = alice.prefill(PROMPT[:5])
        with mallory.session() as session:
            session.adopt(cache)
            with pytest.raises(QuireError, match="CACHE_NOT_FOUND"):
                cache.decode(1)
            assert cache.release() is False
            own = session.prefill([1, 2])
        listed = mallory.stub.ListCaches(executor_pb2.ListCachesRequest(), metadata=mallory.metadata)
        ids = {handle.cache_id for handle in listed.kv_caches}
        assert own.cache_id in ids and cache.cache_id not in ids
        alice.adopt(cache)
        cache.decode(1)
        assert cache.release() is True


def test_who_may_not_administer_or_is_not_known(guarded: Guarded) -> None:
    """The roles of each call: tests/service/test_auth.py."""
    with guarded.client("alice") as alice, pytest.raises(PermissionDenied, match="ROLE_MISSING"):
        alice.upload_weights([save({})])
    with guarded.client("nobody") as nobody, nobody.session() as session:
        with pytest.raises(SessionEnded) as ended:
            session.prefill([1])
        assert ended.value.reason == "NO_TOKEN"


def test_tls_from_the_command_line(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    pair, alice = authority.server(), authority.issue("alice")
    flags = ["--tls-cert", str(pair.cert), "--tls-key", str(pair.key), "--tls-client-ca", str(authority.cert)]

    class Encrypted(GatewayProcess):
        def wait_until_ready(self) -> None:  # type: ignore[override]
            """The harness has no certificate to ask. The command waits for a worker by itself."""

    with Encrypted(model="adder", flags=flags) as gateway:
        show = ["--ca", str(authority.cert), "--cert", str(alice.cert), "--key", str(alice.key)]
        done = quire_command.completed("generate", "--target", gateway.address, *show, "12+34=")
        assert (done.returncode, done.stdout) == (0, "46\n"), done.stderr
        refused = quire_command.completed("generate", "--target", gateway.address, *show[:2], "1+1=")
        assert refused.returncode == 1

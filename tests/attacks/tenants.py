"""Strangers at the door, and tenants who want what is another's."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

from quire.v1 import executor_pb2 as pb

from service.auth.tokens import Role, new_token
from tests.attacks.frame import TIMEOUT_S, Attack, Scene
from tests.gateway_process import GatewayProcess

_SECRET = [*range(1, 32), 7, 3, 5]
_NUMBERS = itertools.count()


class _Guarded(GatewayProcess):
    """A gateway with tenants. Harness and bystanders have tokens; an attacker is mallory, or nobody."""

    def __init__(self) -> None:
        made = {name: new_token(name, [Role.CALL]) for name in ("alice", "mallory", "bystander")}
        made["ops"] = new_token("ops", [Role.ADMINISTER])
        self.tokens = {name: token for name, (token, _) in made.items()}
        file = Path(tempfile.mkdtemp()) / "tokens"
        file.write_text("[tokens]\n" + "\n".join(line for _, line in made.values()))
        flags = ["--kv-pages", "2048", "--tokens", str(file)]
        super().__init__(model="paged-attention", workers=2, flags=flags)

    @property
    def bystander_token(self) -> str:
        return self.tokens["bystander"]

    def status(self) -> pb.GetStatusResponse:
        return self.stub.GetStatus(pb.GetStatusRequest(), metadata=self.of("ops"), timeout=TIMEOUT_S)

    def of(self, name: str) -> tuple[tuple[str, str], ...]:
        """The metadata of a tenant's calls."""
        return (("authorization", f"Bearer {self.tokens[name]}"),)


def _alice(scene: Scene) -> None:
    gateway: Any = scene.gateway
    request = pb.PrefillRequest(token_ids=_SECRET, request_id="alices")
    answer = gateway.stub.Prefill(request, metadata=gateway.of("alice"), timeout=TIMEOUT_S)
    scene.held["cache_id"] = answer.kv_cache.cache_id
    scene.notes["given away"] = 0


def _mallory(scene: Scene) -> None:
    """Everything that would tell something of another's cache, or change it."""
    gateway: Any = scene.gateway
    cache_id, mallory = scene.held["cache_id"], gateway.of("mallory")
    for rpc, request in (
        ("Decode", pb.DecodeRequest(cache_id=cache_id, token_id=1)),
        ("ForkCache", pb.ForkCacheRequest(cache_id=cache_id, count=1)),
        ("TruncateKV", pb.TruncateKVRequest(cache_id=cache_id, new_len=1)),
        ("RenewCache", pb.RenewCacheRequest(cache_id=cache_id)),
    ):
        scene.notes["given away"] += scene.send(rpc, request, metadata=mallory) is not None
    released = scene.send("ReleaseCache", pb.ReleaseCacheRequest(cache_id=cache_id), metadata=mallory)
    listed = scene.send("ListCaches", pb.ListCachesRequest(page_size=1000), metadata=mallory)
    scene.notes["given away"] += pb.ReleaseCacheResponse.FromString(released).released
    scene.notes["given away"] += cache_id.encode() in listed
    # Her own caches, of the same tokens: with the same request id, and another last page each time.
    for guess in (
        pb.PrefillRequest(token_ids=_SECRET, request_id="alices"),
        pb.PrefillRequest(token_ids=[*_SECRET[:-1], next(_NUMBERS) % 900], cache_salt=f"{next(_NUMBERS)}"),
    ):
        answer = pb.PrefillResponse.FromString(scene.send("Prefill", guess, metadata=mallory))
        known = answer.kv_cache.cache_id == cache_id or (answer.reused_tokens and guess.cache_salt)
        scene.notes["given away"] += bool(known)
        scene.send(
            "ReleaseCache", pb.ReleaseCacheRequest(cache_id=answer.kv_cache.cache_id), metadata=mallory
        )


def _bad_tokens(scene: Scene) -> None:
    for value in (f"Bearer {next(_NUMBERS):064x}", "Bearer", "Basic x", "x" * 7000):
        scene.send("Prefill", pb.PrefillRequest(token_ids=[1]), metadata=(("authorization", value),))
    scene.send("Prefill", pb.PrefillRequest(token_ids=[1]))


def _control_characters(scene: Scene) -> None:
    for text in ("\x1b[2J\x1b]0;mine\x07", "a\r\nlevel=error", "\x9b31m", "\u202e" + "x", "\x00"):
        scene.send("Prefill", pb.PrefillRequest(token_ids=[1], request_id=text))
        scene.send("Decode", pb.DecodeRequest(cache_id=text, token_id=1))
    raw = scene.gateway.log_path.read_bytes()
    scene.notes["control bytes in the log"] = sum(byte < 32 and byte != 10 for byte in raw)


ATTACKS = (
    Attack(
        "another tenant",
        "all calls on another's cache, request id and prefix",
        _mallory,
        tries=200,
        prepare=_alice,
        gateway=_Guarded,
    ),
    Attack(
        "bad tokens",
        "tokens that are none, and none",
        _bad_tokens,
        tries=400,
        gateway=_Guarded,
    ),
    Attack(
        "control characters",
        "escapes of terminals in ids",
        _control_characters,
        tries=100,
        flags=("--log-level", "debug"),
    ),
)

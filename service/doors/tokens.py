"""The file that says who may come in: tokens and certificates, their tenants and roles, the tenants' quotas.

    [tokens]
    "<SHA-256 of the token, in hex>" = { tenant = "alice", roles = ["call"] }

    [certificates]
    "<a name in the certificate>" = { tenant = "bob", roles = ["call", "observe"] }

    [tenants.alice]
    max_caches = 100
    max_tokens = 1_000_000
    max_in_flight = 64
    max_per_s = 200

It holds no secret: a token has 256 random bits, which nobody finds from its hash.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import re
import secrets
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from service.caches.tenants import UNBOUNDED, Quota

_MAX_FILE_BYTES = 4 << 20
_NAME = re.compile(r"[!-~]{1,128}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_QUOTAS: Mapping[str, tuple[type, ...]] = {
    "max_caches": (int,),
    "max_tokens": (int,),
    "max_in_flight": (int,),
    "max_per_s": (int, float),
}


class Role(enum.Enum):
    """What a caller may do. `administer` includes the others."""

    CALL = "call"
    OBSERVE = "observe"
    ADMINISTER = "administer"


@dataclass(frozen=True, slots=True)
class Grant:
    """Whose calls are let in, and what they may do."""

    tenant: str
    roles: frozenset[Role] = frozenset({Role.CALL})

    def allows(self, role: Role) -> bool:
        """Whether it may do what needs `role`."""
        return role in self.roles or Role.ADMINISTER in self.roles


@dataclass(frozen=True, slots=True)
class Register:
    """One reading of the file."""

    certificates: Mapping[str, Grant] = field(default_factory=dict)
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    # By what `_blinded` makes of a token's digest, with that digest.
    _tokens: Mapping[bytes, tuple[bytes, Grant]] = field(default_factory=dict)
    _key: bytes = b""

    @classmethod
    def of(cls, tokens: Mapping[str, Grant], **rest: Any) -> Register:
        """A register of tokens, by their digests in hex."""
        key = secrets.token_bytes(32)
        digests = {bytes.fromhex(digest): grant for digest, grant in tokens.items()}
        return cls(_tokens={_blinded(d, key): (d, g) for d, g in digests.items()}, _key=key, **rest)

    def grant_of(self, token: str) -> Grant | None:
        """What a token opens, in a time that tells nothing of the tokens there are.

        It is looked for under a hash whose key nobody outside knows, so where the search ends says nothing.
        """
        digest = _digest(token)
        known, grant = self._tokens.get(_blinded(digest, self._key), (bytes(len(digest)), None))
        return grant if hmac.compare_digest(known, digest) else None

    def quota_of(self, tenant: str) -> Quota:
        """How much a tenant may hold."""
        return self.quotas.get(tenant, UNBOUNDED)


def read_register(path: Path, *, has_ca: bool = False) -> Register:
    """Reads the file. `has_ca`: callers may come in by certificates, too.

    Raises OSError, or ValueError that says what is wrong with it.
    """
    with path.open("rb") as file:
        data = file.read(_MAX_FILE_BYTES + 1)
    if len(data) > _MAX_FILE_BYTES:
        raise ValueError(f"{path}: more than {_MAX_FILE_BYTES} bytes")
    try:
        content = tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: must be a TOML file: {error}") from None
    unknown = content.keys() - {"tokens", "certificates", "tenants"}
    if unknown:
        raise ValueError(f"{path}: there is no table {min(unknown)}")
    tokens, certificates, tenants = (
        _table(content.get(name, {}), name) for name in ("tokens", "certificates", "tenants")
    )
    for digest in tokens:
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"{path}: [tokens]: a key must be a SHA-256 in 64 lowercase hex digits")
    register = Register.of(
        {digest: _grant(entry, "tokens") for digest, entry in tokens.items()},
        certificates={name: _grant(entry, "certificates") for name, entry in certificates.items()},
        quotas={_tenant(name): _quota(entry, name) for name, entry in tenants.items()},
    )
    if not tokens and not (has_ca and (certificates or tenants)):
        # It may be in the middle of being written.
        raise ValueError(f"{path}: is empty, or has no token: nobody could come in")
    return register


def new_token(tenant: str, roles: Sequence[Role]) -> tuple[str, str]:
    """A new token, and the line for the table [tokens] that lets it in. Raises ValueError for a bad name."""
    token = f"quire_{secrets.token_urlsafe(32)}"
    listed = ", ".join(f'"{role.value}"' for role in roles)
    quoted = _tenant(tenant).replace("\\", "\\\\").replace('"', '\\"')
    return token, f'"{_digest(token).hex()}" = {{ tenant = "{quoted}", roles = [{listed}] }}'


def is_tenant_name(name: object) -> bool:
    """Whether it can name a tenant: up to 128 printable ASCII characters without spaces."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


def _blinded(digest: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(digest, key=key, digest_size=16).digest()


def _table(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"[{name}] must be a table")  # noqa: TRY004 - of a file, not of a caller
    return value


def _tenant(name: object) -> str:
    if not is_tenant_name(name):
        raise ValueError(f"a tenant's name must have 1 to 128 printable characters without spaces: {name!r}")
    return str(name)


def _grant(entry: object, table: str) -> Grant:
    content = _table(entry, table)
    if "tenant" not in content or content.keys() - {"tenant", "roles"}:
        raise ValueError(f"[{table}]: an entry must have a tenant, may have roles, and nothing else")
    roles = content.get("roles", [Role.CALL.value])
    if not isinstance(roles, list) or not all(role in [known.value for known in Role] for role in roles):
        raise ValueError(f"[{table}]: roles must be a list of {', '.join(role.value for role in Role)}")
    return Grant(_tenant(content["tenant"]), frozenset(Role(role) for role in roles))


def _quota(entry: object, tenant: str) -> Quota:
    content = _table(entry, f"tenants.{tenant}")
    for name, value in content.items():
        if name not in _QUOTAS:
            raise ValueError(f"[tenants.{tenant}]: there is no quota {name}; there are {', '.join(_QUOTAS)}")
        number = isinstance(value, _QUOTAS[name]) and not isinstance(value, bool)
        if not number or not 0 < value < 1 << 63:
            raise ValueError(f"[tenants.{tenant}]: {name} must be a number above 0")
    return Quota(**content)

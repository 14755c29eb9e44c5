"""The tokens file: tokens and certificates with their tenants and roles, and the tenants' quotas.

    [tokens]
    "<SHA-256 of the token, in hex>" = { tenant = "alice", roles = ["call"] }

    [certificates]
    "<a name in the certificate>" = { tenant = "bob", roles = ["call", "observe"] }

    [tenants.alice]
    max_caches = 100
    max_tokens = 1_000_000
    max_in_flight = 64
    max_per_s = 200

It contains no secret: a token has 256 random bits, which cannot be found from its hash.
"""

from __future__ import annotations

import enum
import hashlib
import re
import secrets
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.caches.tenants import UNBOUNDED, Quota
from workers.common.trusted import require_trusted

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
    """A permission. `administer` includes the others."""

    CALL = "call"
    OBSERVE = "observe"
    ADMINISTER = "administer"


@dataclass(frozen=True, slots=True)
class Principal:
    """The tenant and the roles of an authenticated caller."""

    tenant: str
    roles: frozenset[Role] = frozenset({Role.CALL})

    def allows(self, role: Role) -> bool:
        return role in self.roles or Role.ADMINISTER in self.roles


@dataclass(frozen=True, slots=True)
class TokenStore:
    """The contents of the tokens file. `tokens`: by their digests in hex; `quotas`: by the tenant's name."""

    tokens: Mapping[str, Principal]
    certificates: Mapping[str, Principal]
    quotas: Mapping[str, Quota]

    def principal_of(self, token: str) -> Principal | None:
        """The principal of a token.

        The time of the lookup says nothing of other tokens: it depends on a digest, which cannot be chosen.
        """
        return self.tokens.get(_digest(token))

    def quota_of(self, tenant: str) -> Quota:
        return self.quotas.get(tenant, UNBOUNDED)


def read_token_store(path: Path, *, has_ca: bool = False) -> TokenStore:
    """Reads the file. `has_ca`: client certificates are in use, so tokens are optional.

    Raises OSError, or a ValueError that names the mistake.
    """
    require_trusted(path)
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
        raise ValueError(f"{path}: table {min(unknown)} is unknown")
    tokens, certificates, tenants = (
        _table(content.get(name, {}), name) for name in ("tokens", "certificates", "tenants")
    )
    for digest in tokens:
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"{path}: [tokens]: a key must be a SHA-256 in 64 lowercase hex digits")
    token_store = TokenStore(
        {digest: _principal(entry, "tokens") for digest, entry in tokens.items()},
        certificates={name: _principal(entry, "certificates") for name, entry in certificates.items()},
        quotas={_tenant(name): _quota(entry, name) for name, entry in tenants.items()},
    )
    if not tokens and not (has_ca and (certificates or tenants)):
        # The file may be only partly written.
        raise ValueError(f"{path}: the file has no tokens: every call would be refused")
    return token_store


def new_token(tenant: str, roles: Sequence[Role]) -> tuple[str, str]:
    """A new token, and its line for the table [tokens]. Raises ValueError for an invalid tenant name."""
    token = f"quire_{secrets.token_urlsafe(32)}"
    listed = ", ".join(f'"{role.value}"' for role in roles)
    quoted = _tenant(tenant).replace("\\", "\\\\").replace('"', '\\"')
    return token, f'"{_digest(token)}" = {{ tenant = "{quoted}", roles = [{listed}] }}'


def is_tenant_name(name: object) -> bool:
    """Whether it is a valid tenant name: 1 to 128 printable ASCII characters without spaces."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()


def _table(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"[{name}] must be a table")  # noqa: TRY004 - of a file, not of a caller
    return value


def _tenant(name: object) -> str:
    if not is_tenant_name(name):
        raise ValueError(f"a tenant's name must have 1 to 128 printable characters without spaces: {name!r}")
    return str(name)


def _principal(entry: object, table: str) -> Principal:
    content = _table(entry, table)
    if "tenant" not in content or content.keys() - {"tenant", "roles"}:
        raise ValueError(f"[{table}]: an entry must have a tenant, and may have roles and nothing else")
    roles = content.get("roles", [Role.CALL.value])
    if not isinstance(roles, list) or not all(role in [known.value for known in Role] for role in roles):
        raise ValueError(f"[{table}]: roles must be a list of {', '.join(role.value for role in Role)}")
    return Principal(_tenant(content["tenant"]), frozenset(Role(role) for role in roles))


def _quota(entry: object, tenant: str) -> Quota:
    content = _table(entry, f"tenants.{tenant}")
    for name, value in content.items():
        if name not in _QUOTAS:
            raise ValueError(f"[tenants.{tenant}]: quota {name} is unknown; quotas are {', '.join(_QUOTAS)}")
        number = isinstance(value, _QUOTAS[name]) and not isinstance(value, bool)
        if not number or not 0 < value < 1 << 63:
            raise ValueError(f"[tenants.{tenant}]: {name} must be a number above 0")
    return Quota(**content)

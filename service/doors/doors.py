"""Who may come in: finds out whose a call is, by its token or its client certificate, and what it may do.

Without a file of tokens and without client certificates there are no doors, and everybody is one anonymous
tenant. Health is open to all who can connect: load balancers hold no tokens, and it tells of nobody.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path

from service.caches.tenants import Tenant
from service.config import Config, ConfigError
from service.doors.tokens import Grant, Register, Role, is_tenant_name, read_register
from service.doors.watched import Watched
from service.errors import RoleMissing, Unauthenticated

AUTHORIZATION = "authorization"
_SCHEME = "bearer "
_POLL_INTERVAL_S = 1.0
_OPEN = "/grpc.health.v1.Health/"
_OURS = "/quire.v1."
# Who may make calls that are no data calls: those with one of these roles. Callers do not observe: the load
# of others, and how often their prefixes were reused, is no concern of theirs.
_ROLES = {
    **dict.fromkeys(("GetStatus", "GetCacheMetrics", "GetLoraMetrics"), (Role.OBSERVE,)),
    **dict.fromkeys(("GetModelInfo", "GetCapabilities", "ListCaches"), (Role.CALL, Role.OBSERVE)),
    **dict.fromkeys(("GetRuntime", "ListRuntimes"), (Role.CALL, Role.OBSERVE)),
    # They change what is served to all.
    **dict.fromkeys(("LoadWeights", "RebuildSession"), (Role.ADMINISTER,)),
}
# The table of caches counts what is asked of it, so that a Session is no way around a quota.
_NOT_COUNTED_BY_THE_TABLE = frozenset({*_ROLES, "Session"})
# What a certificate says of whom it belongs to, the first first.
_IDENTITIES = ("x509_subject_alternative_name", "x509_common_name")

_EMPTY = Register()
_current: ContextVar[Tenant | None] = ContextVar("tenant", default=None)


def current_tenant() -> Tenant | None:
    """Whose the call is that is being handled in this task. None: of nobody in particular."""
    return _current.get()


def current_tenant_name() -> str:
    """Its name; empty where callers are not told apart."""
    tenant = _current.get()
    return "" if tenant is None else tenant.name


def _needed(method: str) -> Sequence[Role]:
    if not method.startswith(_OURS):
        return ()
    service, _, name = method.rpartition("/")
    return _ROLES.get(name, (Role.ADMINISTER,) if service.endswith("AdminService") else (Role.CALL,))


class Doors:
    """Owner of the tenants. One object for each name, for good: caches belong to it."""

    def __init__(self, tokens: Path | None, *, certificates: bool) -> None:
        """Raises OSError or ValueError if the file cannot be used."""
        self._file = None
        if tokens is not None:
            self._file = Watched("tokens", (tokens,), lambda: read_register(tokens, has_ca=certificates))
        self._certificates = certificates
        self._tenants: dict[str, Tenant] = {}

    @classmethod
    def of(cls, config: Config) -> Doors | None:
        """The doors that the settings ask for. Raises ConfigError."""
        if not config.tokens and not config.tls_client_ca:
            return None
        try:
            path = Path(config.tokens) if config.tokens else None
            return cls(path, certificates=bool(config.tls_client_ca))
        except (OSError, ValueError) as error:
            raise ConfigError("tokens", "the file", config.tokens, str(error)) from None

    def enter(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Lets in a call with a token, before anything of it is read; or none where a certificate will do.

        Raises Unauthenticated, RoleMissing or QuotaExceeded.
        """
        if method.startswith(_OPEN):
            return
        values = [value for key, value in metadata or () if key == AUTHORIZATION]
        if not values and self._certificates:
            return
        if not values:
            raise Unauthenticated("NO_TOKEN", "a bearer token is needed in the metadata: authorization")
        grant = self._grant_of(values)
        if grant is None:
            raise Unauthenticated("BAD_TOKEN", "the token opens nothing")
        self._let_in(method, grant)

    def enter_by_certificate(self, method: str, peer: Mapping[str, Iterable[bytes]]) -> None:
        """Lets in a call without a token, by what TLS has checked. Raises as `enter` does."""
        names = [name.decode(errors="replace") for key in _IDENTITIES for name in peer.get(key, ())]
        listed = (self._register.certificates.get(name) for name in names)
        grant = next((grant for grant in listed if grant is not None), None)
        if grant is None:
            # Who signs certificates decides who comes in: one that is not listed is a tenant of its own name.
            if not names or not is_tenant_name(names[0]):
                raise Unauthenticated("BAD_CERTIFICATE", "the certificate has no name that can be a tenant's")
            grant = Grant(names[0])
        self._let_in(method, grant)

    async def watch(self) -> None:
        """Reads the file again when it changes, until cancelled."""
        while self._file is not None:
            await asyncio.sleep(_POLL_INTERVAL_S)
            # In a thread: a large file, or one on a network, must not hold up everybody.
            if await asyncio.to_thread(self._file.refresh):
                for tenant in self._tenants.values():
                    tenant.quota = self._register.quota_of(tenant.name)

    @property
    def _register(self) -> Register:
        return self._file.value if self._file is not None else _EMPTY

    def _grant_of(self, values: list[str | bytes]) -> Grant | None:
        value = values[0]
        # Two tokens in one call: which of them counts would be a guess.
        if len(values) > 1 or isinstance(value, bytes) or value[: len(_SCHEME)].lower() != _SCHEME:
            return None
        return self._register.grant_of(value[len(_SCHEME) :].strip())

    def _let_in(self, method: str, grant: Grant) -> None:
        needed = _needed(method)
        if needed and not any(grant.allows(role) for role in needed):
            raise RoleMissing(needed[0].value)
        tenant = self.tenant(grant.tenant)
        if method.startswith(_OURS) and method.rpartition("/")[2] in _NOT_COUNTED_BY_THE_TABLE:
            tenant.take_turn(time.monotonic())
        _current.set(tenant)

    def tenant(self, name: str) -> Tenant:
        """The tenant of a name."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name, self._register.quota_of(name))
        return tenant

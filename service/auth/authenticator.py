"""Authentication and authorization: the tenant of a call, by token or client certificate, and its roles.

Without a tokens file and client certificates there is no authentication, and all callers share one anonymous
tenant. Health checks need none: load balancers have no tokens, and the answer is the same for all.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path

from service.auth.reloaded_file import ReloadedFile
from service.auth.tokens import Principal, Role, TokenStore, is_tenant_name, read_token_store
from service.caches.tenants import Tenant
from service.config import Config
from service.errors import RoleMissing, Unauthenticated
from service.settings import ConfigError

AUTHORIZATION = "authorization"
# The metadata by which a gateway knows calls that another gateway of the same server forwards.
HOP, TENANT = "quire-hop", "quire-tenant"
_SCHEME = "bearer "
_POLL_INTERVAL_S = 1.0
_UNAUTHENTICATED = "/grpc.health.v1.Health/"
_QUIRE_METHODS = "/quire.v1."
# The roles of calls that are not data calls: one of them is required. `call` does not include `observe`,
# because load and prefix reuse of other tenants are confidential.
_ROLES = {
    **dict.fromkeys(("GetStatus", "GetCacheMetrics", "GetLoraMetrics"), (Role.OBSERVE,)),
    **dict.fromkeys(("GetModelInfo", "GetCapabilities", "ListCaches"), (Role.CALL, Role.OBSERVE)),
    **dict.fromkeys(("ListRuntimes",), (Role.CALL, Role.OBSERVE)),
    "ListAdapters": (Role.CALL, Role.OBSERVE, Role.ADMINISTER),
}
# Other calls are rate-limited where they are queued (`caches`), which includes calls on a Session.
_RATE_LIMITED_HERE = frozenset({*_ROLES, "Session"})
# The properties of a certificate that name its owner, in order of preference.
_IDENTITIES = ("x509_subject_alternative_name", "x509_common_name")

_EMPTY = TokenStore({}, {}, {})
_current_tenant: ContextVar[Tenant | None] = ContextVar("tenant", default=None)


# The tenant of the call that this task handles. None without authentication.
current_tenant: Callable[[], Tenant | None] = _current_tenant.get


def current_tenant_name() -> str:
    """The name of the current tenant, empty without authentication."""
    tenant = _current_tenant.get()
    return "" if tenant is None else tenant.name


def _required_roles(method: str) -> Sequence[Role]:
    if not method.startswith(_QUIRE_METHODS):
        return ()
    service, _, name = method.rpartition("/")
    return _ROLES.get(name, (Role.ADMINISTER,) if service.endswith("AdminService") else (Role.CALL,))


class Authenticator:
    """Owner of the tenants. Each name has one Tenant object, which is never replaced: caches refer to it."""

    def __init__(self, tokens: Path | None, *, certificates: bool) -> None:
        """Raises OSError or ValueError if the file cannot be used."""
        self._file = None
        if tokens is not None:
            self._file = ReloadedFile(
                "tokens", (tokens,), lambda: read_token_store(tokens, has_ca=certificates)
            )
        self._certificates = certificates
        # With it, other gateways of this server prove that they forward a call. Empty: there are none.
        self.hop_secret = ""
        self._tenants: dict[str, Tenant] = {}

    @classmethod
    def of(cls, config: Config) -> Authenticator | None:
        """The authentication that the settings require, or None. Raises ConfigError."""
        if not config.tokens and not config.tls_client_ca:
            return None
        try:
            path = Path(config.tokens) if config.tokens else None
            return cls(path, certificates=bool(config.tls_client_ca))
        except (OSError, ValueError) as error:
            raise ConfigError("tokens", "", config.tokens, str(error)) from None

    def authenticate(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Authenticates a call by its token, before its request is read, and sets the current tenant.

        If client certificates are in use, a call without a token passes, and if no tokens are configured any
        call: clients such as OpenAI's always send one. False then: `authenticate_by_certificate` has to check
        it later. Raises Unauthenticated, RoleMissing or QuotaExceeded.
        """
        if method.startswith(_UNAUTHENTICATED):
            return True
        values = [value for key, value in metadata or () if key == AUTHORIZATION]
        if self._certificates and not (values and self._token_store.tokens):
            self._authenticate_forwarded(dict(metadata or ()))
            return False
        if not values:
            raise Unauthenticated("NO_TOKEN", "a bearer token is required: authorization: Bearer TOKEN")
        principal = self._principal_of(values)
        if principal is None:
            raise Unauthenticated("BAD_TOKEN", "the token is not valid")
        self._authorize(method, principal)
        return True

    def _authenticate_forwarded(self, metadata: Mapping[str, str | bytes]) -> None:
        """Sets the tenant of a call that a peer has authenticated."""
        secret, tenant = str(metadata.get(HOP, "")), metadata.get(TENANT)
        is_ours = self.hop_secret and hmac.compare_digest(secret.encode(), self.hop_secret.encode())
        if is_ours and is_tenant_name(tenant):
            _current_tenant.set(self.tenant(str(tenant)))

    def authenticate_by_certificate(self, method: str, peer: Mapping[str, Iterable[bytes]]) -> None:
        """Authenticates a call by its client certificate, verified by TLS. Raises like `authenticate`."""
        names = [name.decode(errors="replace") for key in _IDENTITIES for name in peer.get(key, ())]
        listed = (self._token_store.certificates.get(name) for name in names)
        principal = next((principal for principal in listed if principal is not None), None)
        if principal is None:
            # The CA decides who may call. The owner of an unlisted certificate is a tenant with its name.
            if not names or not is_tenant_name(names[0]):
                raise Unauthenticated("BAD_CERTIFICATE", "the certificate has no valid tenant name")
            principal = Principal(names[0])
        self._authorize(method, principal)

    async def watch(self) -> None:
        """Reads the file again when it changes, until cancelled."""
        while self._file is not None:
            await asyncio.sleep(_POLL_INTERVAL_S)
            # In a thread: a large file, or one on a network, must not block the event loop.
            if await asyncio.to_thread(self._file.refresh):
                for tenant in self._tenants.values():
                    tenant.quota = self._token_store.quota_of(tenant.name)

    @property
    def _token_store(self) -> TokenStore:
        return self._file.value if self._file is not None else _EMPTY

    def _principal_of(self, values: list[str | bytes]) -> Principal | None:
        value = values[0]
        # Several tokens in one call are ambiguous.
        if len(values) > 1 or isinstance(value, bytes) or value[: len(_SCHEME)].lower() != _SCHEME:
            return None
        return self._token_store.principal_of(value[len(_SCHEME) :].strip())

    def _authorize(self, method: str, principal: Principal) -> None:
        required = _required_roles(method)
        if required and not any(principal.allows(role) for role in required):
            raise RoleMissing(required[0].value)
        tenant = self.tenant(principal.tenant)
        if method.startswith(_QUIRE_METHODS) and method.rpartition("/")[2] in _RATE_LIMITED_HERE:
            tenant.admit(time.monotonic())
        _current_tenant.set(tenant)

    def tenant(self, name: str) -> Tenant:
        """The tenant with this name, created on first use."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name, self._token_store.quota_of(name))
        return tenant

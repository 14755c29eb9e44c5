"""HTTP sessions with a provider, each with the credentials that were valid when it was created.

Credentials never appear in logs, errors or reprs. A session that is replaced closes after its last call.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path

import httpx2

from service.errors import ProviderFailure
from service.extensions.providers import failures
from service.extensions.providers.config import ProviderConfig
from service.logging import get_logger
from service.outbound import proxy_of
from workers.common.trusted import require_trusted

_log = get_logger(__name__)
_MAX_SECRET_BYTES = 1 << 16


@dataclass(slots=True, eq=False, repr=False)
class HttpSession:
    """An HTTP client and the credentials of its requests (empty: none), which its repr does not show."""

    client: httpx2.AsyncClient
    secret: str
    users: int = 0
    is_retired: bool = False

    async def close_if_idle(self) -> None:
        """Closes it if it was replaced and has no more calls."""
        if self.is_retired and self.users == 0:
            await self.client.aclose()


class SessionPool:
    """Owner of a provider's sessions: the current one for new calls, and replaced ones with running calls."""

    def __init__(self, config: ProviderConfig) -> None:
        self._config = config
        self._current: HttpSession | None = None
        self._lock = asyncio.Lock()
        self._is_closed = False
        # Why there are no credentials or no session. Empty: there are, or they were not needed yet.
        self.trouble = ""
        # When the provider last refused the current credentials. None: it has not, or took them since then.
        self.refused_at_s: float | None = None
        # These libraries log every request and the provider's response headers.
        for library in ("httpx2", "httpcore2"):
            logging.getLogger(library).setLevel(logging.WARNING)

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[HttpSession]:
        """A session for one request. Raises ProviderFailure: there are no credentials, or no session."""
        async with self._lock:
            session = self._current
            if session is None:
                session = await self._replace(await self._read_secret())
            session.users += 1
            if self._is_closed:
                # The pool was closed while this request waited for a permit.
                await self._retire()
        try:
            yield session
        finally:
            session.users -= 1
            await session.close_if_idle()

    async def renew(self, used: HttpSession, now_s: float) -> bool:
        """Reads the credentials again after the provider refused those of `used`, once for all its calls.

        Returns whether there are others now. Raises ProviderFailure: there are none any more, and nothing
        has changed.
        """
        async with self._lock:
            if self._current is used:
                secret = await self._read_secret()
                if secret == used.secret:
                    self.refused_at_s = now_s
                    return False
                await self._replace(secret)
        return True

    def accepted(self, used: HttpSession) -> None:
        """The provider has taken the credentials of a request."""
        if self._current is used:
            self.refused_at_s = None

    async def rebuild(self) -> None:
        """Replaces connections and credentials. Raises ProviderFailure: nothing has changed."""
        async with self._lock:
            await self._replace(await self._read_secret())

    async def close(self) -> None:
        """Closes the current session. Later calls get a session of their own."""
        self._is_closed = True
        async with self._lock:
            await self._retire()

    async def _read_secret(self) -> str:
        """The credentials. Empty: none are configured. Raises ProviderFailure if they are unusable."""
        config = self._config
        if not config.api_key_env and not config.api_key_file:
            return ""
        secret, why = "", "it is empty, or not of one word in ASCII"
        try:
            secret = await asyncio.to_thread(_configured_text, config)
        except OSError as error:
            why = str(error.strerror)
        # Others are invalid in a header, and HTTP libraries quote an invalid header in their errors.
        if not secret or not secret.isascii() or not secret.isprintable() or " " in secret:
            place = config.api_key_env or config.api_key_file
            _log.error("a provider's credentials cannot be used", runtime=config.name, place=place, why=why)
            self.trouble = "this server has no usable credentials for the provider"
            raise ProviderFailure("UNAUTHORIZED", self.trouble)
        self.trouble = ""
        return secret

    async def _replace(self, secret: str) -> HttpSession:
        try:
            client = await self._new_client()
        # A proxy that is no URL, or needs a library that is not installed; certificates that are not there.
        except (OSError, ValueError, ImportError, httpx2.InvalidURL) as error:
            # Its text may hold the credentials of a proxy.
            kind = type(error).__name__
            _log.error(
                "the environment's proxy or certificates cannot be used", runtime=self._config.name, kind=kind
            )
            self.trouble = "a proxy or the certificates that this server's environment names cannot be used"
            raise failures.unreachable("NETWORK_ERROR", self._config.base_url) from None
        self.trouble = ""
        await self._retire()
        self._current = HttpSession(client, secret)
        self.refused_at_s = None
        return self._current

    async def _retire(self) -> None:
        session, self._current = self._current, None
        if session is not None:
            session.is_retired = True
            await session.close_if_idle()

    async def _new_client(self) -> httpx2.AsyncClient:
        if self._config.base_url.startswith("https:"):
            # In a thread: it reads many certificates.
            tls = await asyncio.to_thread(httpx2.create_ssl_context)
        else:
            # Trusts no certificate.
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        proxy = proxy_of(self._config.base_url)
        if proxy is not None:
            _log.info(
                "a provider is reached through a proxy",
                runtime=self._config.name,
                proxy=proxy.address,
                variable=proxy.variable,
            )
        return httpx2.AsyncClient(
            verify=tls,
            # It is what reads the proxies of the environment.
            trust_env=not self._config.is_on_this_machine,
            # A cookie from one caller's response must not be sent with another's request.
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
            # Credentials must only go to the configured address.
            follow_redirects=False,
            timeout=httpx2.Timeout(None, connect=self._config.connect_timeout_s),
            # The limiter bounds their number by max_concurrent.
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=self._config.max_concurrent),
        )


def _configured_text(config: ProviderConfig) -> str:
    """Raises OSError."""
    if config.api_key_env:
        return os.environ.get(config.api_key_env, "").strip()
    require_trusted(Path(config.api_key_file))
    with Path(config.api_key_file).open("rb") as file:
        return file.read(_MAX_SECRET_BYTES).decode("ascii", errors="replace").strip()

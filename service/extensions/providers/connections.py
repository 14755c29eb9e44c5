"""Connections to a provider, and the credentials of its requests.

Credentials never appear in logs, errors or reprs. They are read for each request, so that new ones take
effect at once, and are not stored.
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


@dataclass(slots=True, eq=False)
class _Shared:
    """An HTTP client and the number of requests that use it."""

    client: httpx2.AsyncClient
    users: int = 0


class Connections:
    """Owner of a provider's HTTP clients: the current one, and replaced ones while requests use them."""

    def __init__(self, config: ProviderConfig) -> None:
        """Opens no connection yet."""
        self._config = config
        self._current: _Shared | None = None
        self._lock = asyncio.Lock()
        self._is_closed = False
        # Why there are no credentials or no client. Empty: no problem is known.
        self.trouble = ""
        # They would log every request, and the provider's response headers.
        for library in ("httpx2", "httpcore2"):
            logging.getLogger(library).setLevel(logging.WARNING)

    @asynccontextmanager
    async def use(self) -> AsyncIterator[httpx2.AsyncClient]:
        """A client for one request. Raises ProviderFailure."""
        async with self._lock:
            shared = self._current or await self._open()
            # A request that waited while this was closed gets a client of its own.
            self._current = None if self._is_closed else shared
            shared.users += 1
        try:
            yield shared.client
        finally:
            shared.users -= 1
            await self._close_unused(shared)

    async def rebuild(self) -> None:
        """Replaces the connections. Raises ProviderFailure, also for credentials; then nothing changes."""
        await self.secret()
        async with self._lock:
            replaced, self._current = self._current, await self._open()
        await self._close_unused(replaced)

    async def close(self) -> None:
        """Closes the connections. Those of running requests close when the requests end."""
        self._is_closed = True
        async with self._lock:
            replaced, self._current = self._current, None
        await self._close_unused(replaced)

    async def secret(self) -> str:
        """The credentials. Empty: none are configured. Raises ProviderFailure if they are unusable."""
        config = self._config
        if not config.api_key_env and not config.api_key_file:
            return ""
        secret, why = "", "it is empty, or not of one word in ASCII"
        try:
            secret = await asyncio.to_thread(_configured_text, config)
        except OSError as error:
            why = str(error.strerror)
        # Anything else is invalid in a header, and HTTP libraries quote invalid headers in their errors.
        if not secret or not secret.isascii() or not secret.isprintable() or " " in secret:
            place = config.api_key_env or config.api_key_file
            _log.error("a provider's credentials cannot be used", runtime=config.name, place=place, why=why)
            self.trouble = "this server has no usable credentials for the provider"
            raise ProviderFailure("UNAUTHORIZED", self.trouble)
        self.trouble = ""
        return secret

    async def _close_unused(self, shared: _Shared | None) -> None:
        if shared is not None and shared is not self._current and not shared.users:
            await shared.client.aclose()

    async def _open(self) -> _Shared:
        try:
            client = await self._new_client()
        # An invalid proxy URL, or one that needs a library that is not installed; or missing certificates.
        except (OSError, ValueError, ImportError, httpx2.InvalidURL) as error:
            # The error's text may contain the credentials of a proxy.
            kind = type(error).__name__
            _log.error(
                "the environment's proxy or certificates cannot be used", runtime=self._config.name, kind=kind
            )
            self.trouble = "a proxy or the certificates that this server's environment names cannot be used"
            raise failures.unreachable("NETWORK_ERROR", self._config.base_url) from None
        self.trouble = ""
        return _Shared(client)

    async def _new_client(self) -> httpx2.AsyncClient:
        config = self._config
        if config.base_url.startswith("https:"):
            # In a thread: it reads many certificates.
            tls = await asyncio.to_thread(httpx2.create_ssl_context)
        else:
            # Trusts no certificate.
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        proxy = proxy_of(config.base_url)
        if proxy is not None:
            _log.info(
                "a provider is reached through a proxy",
                runtime=config.name,
                proxy=proxy.address,
                variable=proxy.variable,
            )
        return httpx2.AsyncClient(
            verify=tls,
            # With this the client uses the proxies of the environment.
            trust_env=not config.is_on_this_machine,
            # A cookie from one caller's response must not be sent with another caller's request.
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
            # Credentials must only go to the configured address.
            follow_redirects=False,
            timeout=httpx2.Timeout(config.read_timeout_s, connect=config.connect_timeout_s, pool=None),
            # The limiter bounds the number of connections by max_concurrent.
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=config.max_concurrent),
        )


def _configured_text(config: ProviderConfig) -> str:
    """The configured credentials. Raises OSError."""
    if config.api_key_env:
        return os.environ.get(config.api_key_env, "").strip()
    require_trusted(Path(config.api_key_file))
    with Path(config.api_key_file).open("rb") as file:
        return file.read(_MAX_SECRET_BYTES).decode("ascii", errors="replace").strip()

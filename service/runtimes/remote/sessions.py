"""Connections to a provider, each with the credentials as they were when it was made.

A session that is replaced goes on for the calls that it has, and closes with the last of them.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx2

from service.errors import ProviderFailure
from service.runtimes.remote import credentials
from service.runtimes.remote.config import ProviderConfig
from service.runtimes.remote.credentials import Secret


class Session:
    """One client with one reading of the credentials."""

    def __init__(self, client: httpx2.AsyncClient, secret: Secret | None) -> None:
        self.client = client
        self.secret = secret
        self.users = 0
        self.is_retired = False

    async def close_if_idle(self) -> None:
        """Closes it once nobody needs it any more."""
        if self.is_retired and self.users == 0:
            await self.client.aclose()


class Sessions:
    """Owner of a provider's sessions: the one that is lent to new calls, and those before it."""

    def __init__(self, config: ProviderConfig) -> None:
        self._config = config
        self._current: Session | None = None
        self._changing = asyncio.Lock()
        self._is_closed = False
        # Why there are no credentials. Empty: there are, or nobody has looked.
        self.trouble = ""
        # They tell of every request, and repeat what the provider wrote into the head of its answer.
        for library in ("httpx2", "httpcore2"):
            logging.getLogger(library).setLevel(logging.WARNING)

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[Session]:
        """A session for one request. Raises ProviderFailure: there are no credentials."""
        async with self._changing:
            session = self._current
            if session is None:
                session = await self._replace(await self._read())
            session.users += 1
            if self._is_closed:
                # Its runtime was replaced while this request waited for its turn.
                await self._retire()
        try:
            yield session
        finally:
            session.users -= 1
            await session.close_if_idle()

    async def renew(self, used: Session) -> None:
        """The provider refused a session's credentials: they are read again, once for all who were refused.

        Raises ProviderFailure: there are none any more, and nothing has changed.
        """
        async with self._changing:
            if self._current is used:
                secret = await self._read()
                if secret != used.secret:
                    await self._replace(secret)

    async def rebuild(self) -> None:
        """New connections and credentials. Raises ProviderFailure: nothing has changed."""
        async with self._changing:
            await self._replace(await self._read())

    async def close(self) -> None:
        """Calls that still come get a session each."""
        self._is_closed = True
        async with self._changing:
            await self._retire()

    async def _read(self) -> Secret | None:
        try:
            secret = await credentials.read(self._config)
        except ProviderFailure as error:
            self.trouble = error.message
            raise
        self.trouble = ""
        return secret

    async def _replace(self, secret: Secret | None) -> Session:
        client = await self._new_client()
        await self._retire()
        self._current = Session(client, secret)
        return self._current

    async def _retire(self) -> None:
        session, self._current = self._current, None
        if session is not None:
            session.is_retired = True
            await session.close_if_idle()

    async def _new_client(self) -> httpx2.AsyncClient:
        if self._config.base_url.startswith("https:"):
            # Reads many certificates.
            tls = await asyncio.to_thread(httpx2.create_ssl_context)
        else:
            # Nobody is trusted.
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        return httpx2.AsyncClient(
            verify=tls,
            # Not asked for, and one caller's would come back with another's request.
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
            # Credentials are for the address of the configuration.
            follow_redirects=False,
            timeout=httpx2.Timeout(None, connect=self._config.connect_timeout_s),
            # How many there are is up to max_concurrent.
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=self._config.max_concurrent),
        )

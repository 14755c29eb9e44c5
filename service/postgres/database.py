"""Connections to PostgreSQL, by asyncpg. Only this module knows the driver.

No text of the driver about an address reaches a message: it may contain a password.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import asyncpg

from service.postgres.errors import DatabaseFailed
from service.postgres.schema import upgrade

CONNECT_S: Final = 5.0
# The server ends a statement by itself after this, so that it is certain that it has failed. Then the
# connection is closed if there is no answer, and it is not certain.
STATEMENT_S: Final = 10.0
ANSWER_S: Final = STATEMENT_S + 2.0
_CLOSE_S: Final = 1.0
_SETTINGS: Final = {
    "application_name": "quire",
    # What was answered survives a crash of the database, whatever its default is.
    "synchronous_commit": "on",
    "statement_timeout": f"{STATEMENT_S:.0f}s",
    "idle_in_transaction_session_timeout": f"{STATEMENT_S:.0f}s",
}
# All that the driver raises. TimeoutError is an OSError.
_FAILURES: Final = (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, EOFError)


class Conflict(DatabaseFailed):
    """A row with this key exists already."""


class Database:
    """One connection, which is opened when it is needed. Its statements run one after the other.

    Between `close` and the next statement it may move to another event loop.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: asyncpg.Connection | None = None
        self._lock = asyncio.Lock()

    @property
    def is_connected(self) -> bool:
        """Whether the last statement's connection is still open."""
        return self._connection is not None and not self._connection.is_closed()

    async def connect(self) -> None:
        """Opens the connection if it is not open. Raises DatabaseFailed."""
        if self.is_connected:
            return
        with _translated():
            self._connection = await asyncpg.connect(
                self._url, timeout=CONNECT_S, command_timeout=ANSWER_S, server_settings=_SETTINGS
            )

    async def prepare(self) -> None:
        """Creates the tables, or brings those of an earlier version up to date. Raises DatabaseFailed."""
        async with self._ready() as connection:
            await upgrade(connection)

    async def fetch(self, query: str, *values: object) -> list[Sequence[Any]]:
        """The rows of a statement, which is a transaction.

        Raises DatabaseFailed: then it is unknown whether the statement has done something, unless the
        connection is still open.
        """
        async with self._ready() as connection:
            rows: list[Sequence[Any]] = await connection.fetch(query, *values)
            return rows

    async def close(self) -> None:
        """Closes the connection, within a bounded time."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(*_FAILURES):
                await connection.close(timeout=_CLOSE_S)

    def terminate(self) -> None:
        """Closes the connection without waiting."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(*_FAILURES, RuntimeError):  # its event loop is closed
                connection.terminate()

    @contextlib.asynccontextmanager
    async def _ready(self) -> AsyncIterator[Any]:
        async with self._lock:
            await self.connect()
            try:
                with _translated():
                    yield self._connection
            except asyncio.CancelledError:
                # A statement may be running.
                self.terminate()
                raise
            except DatabaseFailed as error:
                if not isinstance(error.__cause__, asyncpg.PostgresError) or not self.is_connected:
                    self.terminate()
                raise


@contextlib.contextmanager
def _translated() -> Any:
    try:
        yield
    except asyncpg.UniqueViolationError as error:
        raise Conflict("a row with this number exists") from error
    except _FAILURES as error:
        raise DatabaseFailed(_described(error)) from error


def _described(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "it does not answer"
    if isinstance(error, asyncpg.PostgresError):
        # Of the server, which has no password; or of the driver about a lost connection.
        return str(error).partition("\n")[0] or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"the connection failed ({type(error).__name__})"

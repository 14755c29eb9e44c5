"""Connections to PostgreSQL, by asyncpg. Only this module knows the driver.

No text of the driver about an address reaches a message.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Final

import asyncpg

from service.extensions.gateways.postgres.errors import Conflict, DatabaseFailed
from service.extensions.gateways.postgres.schema import create_tables

CONNECT_S: Final = 3.0
# The server ends a statement by itself after this, so that it is certain that it has done nothing. If no
# answer comes either, the connection is closed, and that is not certain.
STATEMENT_S: Final = 10.0
ANSWER_S: Final = STATEMENT_S + 2.0
_CLOSE_S: Final = 1.0
_SETTINGS: Final = {
    "application_name": "quire",
    # What was answered survives a crash of the database, whatever its default is.
    "synchronous_commit": "on",
    "default_transaction_isolation": "read committed",
    "statement_timeout": f"{STATEMENT_S:.0f}s",
    "idle_in_transaction_session_timeout": f"{STATEMENT_S:.0f}s",
}
# All that the driver raises; ValueError for an address; an internal error where a connection breaks in an
# unlucky moment. TimeoutError is an OSError.
_FAILURES: Final = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
    EOFError,
    ValueError,
)


class Database:
    """One connection, which is opened when it is needed. Its statements run one after the other.

    Between `close` and the next statement it may move to another event loop.
    """

    def __init__(self, url: str, answer_s: float = ANSWER_S) -> None:
        """`answer_s`: without an answer to a statement for so long, the connection is closed."""
        self._url = url
        self._answer_s = answer_s
        self._connection: Any = None
        self._lock = asyncio.Lock()

    async def prepare(self) -> None:
        """Creates the tables if they are missing. Raises DatabaseFailed."""
        async with self._ready(ANSWER_S) as connection:
            await create_tables(connection)

    async def fetch(self, query: str, *values: object) -> list[Sequence[Any]]:
        """The rows of a statement, which is a transaction of its own. Raises DatabaseFailed."""
        async with self._ready(self._answer_s) as connection:
            rows: list[Sequence[Any]] = await connection.fetch(query, *values)
            return rows

    async def close(self) -> None:
        """Closes the connection, within a bounded time."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(*_FAILURES):
                await connection.close(timeout=_CLOSE_S)

    def terminate(self) -> None:
        """Closes the connection without waiting. A statement that is running may or may not take place."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(*_FAILURES, RuntimeError):  # its event loop is closed
                connection.terminate()

    @contextlib.asynccontextmanager
    async def _ready(self, answer_s: float) -> AsyncIterator[Any]:
        """The open connection, for one statement."""
        async with self._lock:
            if self._connection is None or self._connection.is_closed():
                with _translated():
                    self._connection = await asyncpg.connect(
                        self._url, timeout=CONNECT_S, server_settings=_SETTINGS
                    )
            # Not the driver's timeout: it cancels the statement, and so ends a commit's wait for a standby.
            timer = asyncio.get_running_loop().call_later(answer_s, self._connection.terminate)
            try:
                with _translated(self._connection):
                    yield self._connection
            except BaseException as error:
                if not (isinstance(error, DatabaseFailed) and error.is_certain):
                    self.terminate()
                raise
            finally:
                timer.cancel()


@contextlib.contextmanager
def _translated(connection: Any = None) -> Iterator[None]:
    """`connection`: a statement was sent on it."""
    try:
        yield
    except asyncpg.UniqueViolationError as error:
        raise Conflict("a row with this number exists") from error
    except _FAILURES as error:
        # After a fatal error the transaction may have been committed before.
        is_refused = getattr(error, "severity_en", None) == "ERROR"
        raise DatabaseFailed(_described(error), is_certain=is_refused or connection is None) from error
    except AttributeError as error:
        # The driver's, if the connection is terminated between two messages of a statement.
        if connection is None or not connection.is_closed():
            raise
        raise DatabaseFailed("it does not answer", is_certain=False) from error


def _described(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "it does not answer"
    if isinstance(error, asyncpg.PostgresError):
        # Of the server, which has no password; or of the driver about a lost connection.
        return str(error).partition("\n")[0] or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"the connection failed ({type(error).__name__})"

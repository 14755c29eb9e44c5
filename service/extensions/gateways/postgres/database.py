"""Connections to PostgreSQL, by asyncpg. Only this module uses the driver.

No message contains the driver's text about an address.
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
# The server cancels a statement after this time, and then it certainly had no effect. Without an answer from
# the server the connection is closed, and the effect is unknown.
STATEMENT_S: Final = 10.0
ANSWER_S: Final = STATEMENT_S + 2.0
_CLOSE_S: Final = 1.0
_SETTINGS: Final = {
    "application_name": "quire",
    # Commits survive a crash of the database, whatever its default is.
    "synchronous_commit": "on",
    "default_transaction_isolation": "read committed",
    "statement_timeout": f"{STATEMENT_S:.0f}s",
    "idle_in_transaction_session_timeout": f"{STATEMENT_S:.0f}s",
}
# Everything that the driver raises: also ValueError for an address, and its internal error for a connection
# that breaks at an unexpected point. TimeoutError is an OSError.
_FAILURES: Final = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
    EOFError,
    ValueError,
)


class Database:
    """One connection, which is opened on demand. Its statements run one after the other.

    Between `close` and the next statement it may move to another event loop.
    """

    def __init__(self, url: str, answer_s: float = ANSWER_S) -> None:
        """`answer_s`: the connection is closed if a statement has no answer for this long."""
        self._url = url
        self._answer_s = answer_s
        self._connection: Any = None
        self._lock = asyncio.Lock()

    async def prepare(self) -> None:
        """Creates the tables if they are missing. Raises DatabaseFailed."""
        async with self._ready(ANSWER_S) as connection:
            await create_tables(connection)

    async def fetch(self, query: str, *values: object) -> list[Sequence[Any]]:
        """Runs a statement as a transaction of its own. Returns its rows. Raises DatabaseFailed."""
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
        """Closes the connection without waiting. A running statement may or may not take effect."""
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
            # Not the driver's timeout: it cancels the statement, and so the wait of a commit for a standby.
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
    """Turns the driver's exceptions into DatabaseFailed. `connection`: one on which a statement was sent."""
    try:
        yield
    except asyncpg.UniqueViolationError as error:
        raise Conflict("a row with this number exists") from error
    except _FAILURES as error:
        # A fatal error may come after the transaction was committed.
        is_refused = getattr(error, "severity_en", None) == "ERROR"
        raise DatabaseFailed(_described(error), is_certain=is_refused or connection is None) from error
    except AttributeError as error:
        # The driver raises it if the connection is terminated between two messages of a statement.
        if connection is None or not connection.is_closed():
            raise
        raise DatabaseFailed("it does not answer", is_certain=False) from error


def _described(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "it does not answer"
    if isinstance(error, asyncpg.PostgresError):
        # The server's text, which has no password; or the driver's about a lost connection.
        return str(error).partition("\n")[0] or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"the connection failed ({type(error).__name__})"

"""Named values that survive a restart of the gateway. The journal keeps the last value of each name.

Values and caches share the journal's order. So a gateway that recovers a cache also recovers every value that
was stored before the cache was created, whichever write was the last one before a crash.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from service.caches.ledger import Ledger
from service.caches.records import ValueStored
from service.errors import StorageUnavailable
from service.journal.base import Journal
from service.logging import get_logger

_log = get_logger(__name__)
_RETRY_S = 1.0


class StoredValues:
    """Commits values, and applies them to the ledger. All methods are called on the event loop."""

    def __init__(self, journal: Journal | None = None, ledger: Ledger | None = None) -> None:
        """`ledger`: has the recovered values. Without a journal nothing survives."""
        self._journal = Journal() if journal is None else journal
        self._ledger = Ledger() if ledger is None else ledger
        # Values of `put` that are not durable yet, by name.
        self._wanted: dict[str, bytes] = {}
        self._closed = False

    def get(self, name: str) -> bytes:
        return self._ledger.values.get(name, b"")

    def all(self, prefix: str) -> dict[str, bytes]:
        """The values whose names begin with a prefix, by the rest of their names."""
        values = self._ledger.values.items()
        return {name.removeprefix(prefix): value for name, value in values if name.startswith(prefix)}

    async def set(self, values: Mapping[str, bytes]) -> None:
        """Stores all of these values, or none. Removes names with empty values. Raises StorageUnavailable.

        Then they survive a crash of the system, even if the journal does not promise that for tokens.
        """
        replaced = {name: self._wanted.pop(name) for name in values if name in self._wanted}
        stored = asyncio.get_running_loop().create_future()

        def on_committed(ok: bool) -> None:
            if ok:
                self._apply(values)
            else:
                for name in replaced.keys() - self._wanted.keys():
                    self.put(name, replaced[name])
            if not stored.done():
                stored.set_result(ok)

        self._journal.commit([ValueStored(name, value) for name, value in values.items()], on_committed)
        if not await stored:
            raise StorageUnavailable("the journal cannot be written")
        await self._journal.sync()

    def put(self, name: str, value: bytes) -> None:
        """Stores a value, before all later commits. Retries if that fails."""
        if value != self.get(name) or name in self._wanted:
            self._wanted[name] = value
            self._commit(name, value)

    def close(self) -> None:
        """Stops retries."""
        self._closed = True

    def _commit(self, name: str, value: bytes) -> None:
        def on_committed(ok: bool) -> None:
            if ok:
                self._apply({name: value})
            if self._wanted.get(name) is not value:
                return
            if ok:
                del self._wanted[name]
            elif not self._closed:
                _log.warning("a value cannot be stored yet", name=name)
                asyncio.get_running_loop().call_later(_RETRY_S, self._retry, name, value)

        self._journal.commit([ValueStored(name, value)], on_committed)

    def _retry(self, name: str, value: bytes) -> None:
        if self._wanted.get(name) is value and not self._closed:
            self._commit(name, value)

    def _apply(self, values: Mapping[str, bytes]) -> None:
        for name, value in values.items():
            self._ledger.apply(ValueStored(name, value))

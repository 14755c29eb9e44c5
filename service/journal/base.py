"""The token journal: what each cache holds, whatever becomes of the KV.

A record is written after the append was computed and before it is answered, so an answered append is in the
journal and one that is not in the journal was never answered. The journal knows tokens and lengths; it does
not know workers' processes, pages or callers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from service.caches.records import Record


class JournalConflict(Exception):
    """A record does not fit what the journal holds: the sequence's owner has a bug."""


class Journal(Protocol):
    """Where records go. `append` returns once they are as durable as the journal promises."""

    def append(self, records: Sequence[Record]) -> None:
        """Applies records in order. Raises JournalConflict, applying none of the conflicting one."""

    def token_ids(self, cache_id: str) -> Sequence[int]:
        """The tokens of a cache, as a copy. Raises KeyError for an unknown one."""

    def __len__(self) -> int:
        """How many caches there are."""

    @property
    def size_bytes(self) -> int:
        """What the journal takes, against which a budget is held."""

"""A journal in this process's memory: survives workers, not the gateway."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from service.caches.records import (
    CacheCreated,
    CacheForked,
    CacheReleased,
    CacheTruncated,
    Record,
    TokensAppended,
)
from service.journal.base import JournalConflict


@dataclass(slots=True)
class _Journaled:
    token_ids: array[int]  # uint32: a quarter of a list of ints
    prompt_len: int
    epoch: int
    seed: int
    lease_s: float


class MemoryJournal:
    """Owns the tokens of every cache."""

    def __init__(self) -> None:
        self._entries: dict[str, _Journaled] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def token_ids(self, cache_id: str) -> Sequence[int]:
        """The tokens of a cache, as a copy. Raises KeyError for an unknown one."""
        return self._entries[cache_id].token_ids[:]

    def append(self, records: Sequence[Record]) -> None:
        """Applies records in order. Raises JournalConflict, applying none of the conflicting one."""
        for record in records:
            self._apply(record)

    def _apply(self, record: Record) -> None:
        match record:
            case TokensAppended():
                self._append_tokens(record)
            case CacheCreated():
                self._insert(record.cache_id, _Journaled(array("I"), 0, 0, record.seed, record.lease_s))
            case CacheTruncated():
                entry = self._entry(record.cache_id)
                if record.new_len > len(entry.token_ids):
                    raise JournalConflict(f"truncate to {record.new_len} of {len(entry.token_ids)} tokens")
                del entry.token_ids[record.new_len :]
                entry.prompt_len = min(entry.prompt_len, record.new_len)
            case CacheForked():
                parent = self._entry(record.parent)
                copy = _Journaled(
                    parent.token_ids[:], parent.prompt_len, parent.epoch, record.seed, record.lease_s
                )
                self._insert(record.cache_id, copy)
            case CacheReleased():
                if self._entries.pop(record.cache_id, None) is None:
                    raise JournalConflict("release of an unknown cache")

    def _append_tokens(self, record: TokensAppended) -> None:
        entry = self._entry(record.cache_id)
        if record.position != len(entry.token_ids):
            raise JournalConflict(f"append at {record.position} of {len(entry.token_ids)} tokens")
        if record.epoch < entry.epoch:
            raise JournalConflict(f"append by epoch {record.epoch} after epoch {entry.epoch}")
        entry.token_ids.extend(record.token_ids)
        entry.prompt_len = record.prompt_len
        entry.epoch = record.epoch

    def _insert(self, cache_id: str, entry: _Journaled) -> None:
        if cache_id in self._entries:
            raise JournalConflict("the cache exists already")
        self._entries[cache_id] = entry

    def _entry(self, cache_id: str) -> _Journaled:
        entry = self._entries.get(cache_id)
        if entry is None:
            raise JournalConflict("the cache is unknown")
        return entry

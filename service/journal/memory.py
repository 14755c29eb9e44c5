"""A journal in this process's memory: survives workers, not the gateway."""

from __future__ import annotations

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
from service.journal.chunks import CHUNK_TOKENS, ChunkedTokens, ChunkStore

# A cache but for its tokens, about.
_ENTRY_BYTES = 512


@dataclass(slots=True)
class _Journaled:
    tokens: ChunkedTokens
    prompt_len: int
    epoch: int
    seed: int
    lease_s: float


class MemoryJournal:
    """Owns the tokens of every cache."""

    def __init__(self, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self._entries: dict[str, _Journaled] = {}
        self._store = ChunkStore(chunk_tokens)

    def __len__(self) -> int:
        return len(self._entries)

    def token_ids(self, cache_id: str) -> Sequence[int]:
        """The tokens of a cache, as a copy. Raises KeyError for an unknown one."""
        return self._entries[cache_id].tokens.copy()

    @property
    def size_bytes(self) -> int:
        """What the caches and their tokens take, about; what forks share is counted once."""
        return self._store.size_bytes + _ENTRY_BYTES * len(self._entries)

    def append(self, records: Sequence[Record]) -> None:
        """Applies records in order. Raises JournalConflict, applying none of the conflicting one."""
        for record in records:
            self._apply(record)

    def _apply(self, record: Record) -> None:
        match record:
            case TokensAppended():
                self._append_tokens(record)
            case CacheCreated():
                self._check_new(record.cache_id)
                created = _Journaled(ChunkedTokens(), 0, 0, record.seed, record.lease_s)
                self._entries[record.cache_id] = created
            case CacheTruncated():
                entry = self._entry(record.cache_id)
                if record.new_len > entry.tokens.length:
                    raise JournalConflict(f"truncate to {record.new_len} of {entry.tokens.length} tokens")
                self._store.cut(entry.tokens, record.new_len)
                entry.prompt_len = min(entry.prompt_len, record.new_len)
            case CacheForked():
                parent = self._entry(record.parent)
                self._check_new(record.cache_id)
                tokens = self._store.fork(parent.tokens)
                copy = _Journaled(tokens, parent.prompt_len, parent.epoch, record.seed, record.lease_s)
                self._entries[record.cache_id] = copy
            case CacheReleased():
                released = self._entries.pop(record.cache_id, None)
                if released is None:
                    raise JournalConflict("release of an unknown cache")
                self._store.cut(released.tokens, 0)

    def _append_tokens(self, record: TokensAppended) -> None:
        entry = self._entry(record.cache_id)
        if record.position != entry.tokens.length:
            raise JournalConflict(f"append at {record.position} of {entry.tokens.length} tokens")
        if record.epoch < entry.epoch:
            raise JournalConflict(f"append by epoch {record.epoch} after epoch {entry.epoch}")
        self._store.extend(entry.tokens, record.token_ids)
        entry.prompt_len = record.prompt_len
        entry.epoch = record.epoch

    def _check_new(self, cache_id: str) -> None:
        if cache_id in self._entries:
            raise JournalConflict("the cache exists already")

    def _entry(self, cache_id: str) -> _Journaled:
        entry = self._entries.get(cache_id)
        if entry is None:
            raise JournalConflict("the cache is unknown")
        return entry

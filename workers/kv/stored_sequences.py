"""Which pages and snapshots of sequences are to be on disk, too: tells `DiskPages`. No I/O.

Each full page is. But with recurrent layers a prefix can be reused up to a snapshot only. So pages are then
stored when there is a snapshot after them, and it with them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from workers.given_experts import given_salt
from workers.kv.disk_pages import DiskPages
from workers.kv.page_pool import PagePool, root_digest, state_digest
from workers.kv.sequence import KvSequence
from workers.kv.states import StateSlots

# What the gateway puts before the salt of a tenant: see `Tenant.salt` there.
_NUMBERED_ADAPTER = re.compile(rb"a\d+/")


class StoredSequences:
    """Decides which pages to store. Called by the `KvTable`, for sequences of the served weights."""

    def __init__(self, disk: DiskPages, pool: PagePool, states: StateSlots | None, page_size: int) -> None:
        """From now on, tell `disk` which pages to store, and which pages are about to be overwritten."""
        self.disk, self._pool, self._states, self._page_size = disk, pool, states, page_size
        pool.on_discard = disk.discarded if states is None else self._page_discarded
        if states is not None:
            states.on_discard = disk.discarded

    def _page_discarded(self, digest: bytes) -> None:
        self.disk.discarded(digest)
        if self._states is not None:
            self._states.discarded(digest)

    def indexed(self, seq: KvSequence, i: int) -> None:
        """Page i of a sequence was indexed by its digest."""
        if self._states is None and is_lasting(seq.salt):
            self.disk.published(seq.pages[i], seq.digests[i], _parent(seq, i))

    def kept(self, seq: KvSequence, positions: Sequence[int]) -> None:
        """A sequence has snapshots of its recurrent state after `positions` tokens."""
        if self._states is None or not self.disk.takes_writes or not is_lasting(seq.salt):
            return
        for position in positions:
            last = position // self._page_size - 1
            self._store_pages(seq, last)
            if (slot := self._states.snapshot(seq.digests[last])) is not None:
                self.disk.published(slot, state_digest(seq.digests[last]), _parent(seq, last))

    def _store_pages(self, seq: KvSequence, last: int) -> None:
        """Store the pages after the last stored one, up to page `last`."""
        first = last + 1
        while first and not self.disk.will_have(seq.digests[first - 1]):
            first -= 1
        for i in range(first, last + 1):
            if (page := self._pool.lookup(seq.digests[i])) is not None:
                self.disk.published(page, seq.digests[i], _parent(seq, i))


def is_lasting(salt: bytes) -> bool:
    """Whether a salt has the same meaning in every process: then pages under it can be stored.

    That of an adapter whose content is not known has only its number, which another one can get later.
    """
    return _NUMBERED_ADAPTER.match(given_salt(salt)) is None


def _parent(seq: KvSequence, i: int) -> bytes:
    """The digest of the page before page i of a sequence, or the root's."""
    return seq.digests[i - 1] if i else root_digest(seq.salt)

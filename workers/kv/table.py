"""Sequences of tokens and the pages that hold their KV: match, reserve, append, truncate, fork, release.

How the parts of a sequence relate (page_size = 4):

    token_ids  [ a b c d | e f g h | i j ]            committed: their KV is in the pages
    pages      [   p0    |   p1    |   p2    |  p3 ]  p3 and the rest of p2 are reserved, not yet written
    digests    [   d0    |   d1    ]                  one per full page of committed tokens
    writable = 16                                     reserved slots before this position may be written

**No page is written while another sequence can see the slots written to.** `reserve` makes the partly
filled last page private first (copy on write), and sets `writable`. Full pages are never written again.

The data that decodes need is in columns (`SequenceColumns`), so that a step reserves and commits the tokens
of all sequences in a few operations.

This module moves no data: it returns the page copies to make. It is not thread-safe; the thread of the step
loop owns it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from quire.v1.types_pb2 import PoolUsage

from workers.kv.disk_pages import DiskPages
from workers.kv.integrity import IntegrityCheck
from workers.kv.page_pool import DIGEST_BYTES, HeldPages, IntegrityError, PagePool, is_state
from workers.kv.page_tables import PageTables
from workers.kv.prefixes import Prefixes, last_digest
from workers.kv.sequence import ALL, NO_ROW, KvSequence, Rows, SequenceColumns
from workers.kv.states import StateSlots
from workers.kv.stored_sequences import StoredSequences


class KvTable:
    """Owner of the pool and of every sequence in it.

    Methods that take a KvSequence raise ValueError for one that is not (or no longer) in this table.
    """

    def __init__(self, num_pages: int, page_size: int = 16, states: StateSlots | None = None) -> None:
        """`page_size` in tokens. `states`: for a model with recurrent layers."""
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {page_size}")
        self.page_size = page_size
        self.states = states
        self._pool = PagePool(num_pages)
        self.prefixes = Prefixes(self._pool, page_size)
        if states is not None:
            self._pool.on_discard = states.discarded
        self._sequences: dict[int, KvSequence] = {}
        self._columns = SequenceColumns(page_size)
        # The row in the columns, by key; and the sequence, by row.
        self._row_of: dict[int, int] = {}
        self._in_row: dict[int, KvSequence] = {}
        self.page_tables = PageTables(self._columns, self._in_row)
        # Totals, so that `usage` need not visit all sequences.
        self._tokens = 0
        self._prefix_hit_tokens = 0
        self._prefix_query_tokens = 0
        self._copied_pages = 0
        # Stores pages on disk. None: they are not. See `store_on`.
        self._stored: StoredSequences | None = None
        # Running checks, which are told of every page that a sequence gets or frees.
        self._checks: list[IntegrityCheck] = []
        self.held = HeldPages(self._pool)

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[KvSequence]:
        return iter(self._sequences.values())

    def create(self, key: int, salt: bytes = b"") -> KvSequence:
        """Add and return an empty sequence. Raises ValueError if `key` is taken."""
        return self._add(key, self.prefixes.salted(salt), self.prefixes.generation)

    def _add(self, key: int, salt: bytes, generation: int) -> KvSequence:
        if key in self._sequences:
            raise ValueError(f"sequence {key} exists")
        seq = self._sequences[key] = KvSequence(key, salt, generation, self._columns)
        self._row_of[key], self._in_row[seq.row] = seq.row, seq
        for check in self._checks:
            check.sequence_added(key)
        return seq

    def forget_prefixes(self) -> None:
        """Stop sharing all present pages, since their contents are of other weights.

        Present sequences keep their pages, and will not share their further pages either.
        """
        self.prefixes.generation += 1
        if self.states is not None:
            self.states.forget_snapshots()

    def get(self, key: int) -> KvSequence | None:
        return self._sequences.get(key)

    def slot(self, seq: KvSequence, i: int) -> int:
        """Return the slot of token `i`, committed or reserved: page * page_size + offset."""
        return seq.pages[i // self.page_size] * self.page_size + i % self.page_size

    def match_prefix(self, seq: KvSequence, tokens: Sequence[int], limit: int) -> int:
        """Extend `seq` by shared pages that hold the next full pages of `tokens`. Return how many tokens.

        The reused tokens are committed: they are in `seq.token_ids` afterwards and need no forward. At
        most `limit` tokens, rounded down to pages. Returns 0 for a sequence that ends within a page or
        has reserved slots: a shared page can only follow a full one.
        """
        self._check_owned(seq)
        if not self.prefixes.may_share_next(seq):
            return 0
        found: list[tuple[bytes, int]] = []
        # With recurrent layers, only the pages up to the last snapshot are reusable.
        reusable = 0
        for digest in self.prefixes.digests(last_digest(seq), tokens, limit):
            page = self._pool.lookup(digest)
            if page is None:
                break
            found.append((digest, page))
            if self.states is None or self.states.has_snapshot(digest):
                reusable = len(found)
        for digest, page in found[:reusable]:
            self._pool.incref(page)
            seq.pages.append(page)
            seq.digests.append(digest)
        self._extend(seq, tokens[: reusable * self.page_size])
        self._columns.changes[seq.row] += 1
        for check in self._checks:
            check.pages_added(seq.key, seq.pages[len(seq.pages) - reusable :])
        if self.states is not None and reusable:
            self.states.matched(seq)
        return reusable * self.page_size

    @property
    def reuse_unit(self) -> int:
        """Prefixes are reused in multiples of this many tokens."""
        return self.page_size if self.states is None else self.states.spacing

    def _extend(self, seq: KvSequence, tokens: Sequence[int]) -> None:
        seq.token_ids.extend(tokens)
        self._columns.lengths[seq.row] += len(tokens)
        self._tokens += len(tokens)

    def count_prompt(self, tokens: int, reused_tokens: int) -> None:
        """Count a prompt for `usage`. Called once for each prompt, when it has begun."""
        self._prefix_query_tokens += tokens
        self._prefix_hit_tokens += reused_tokens

    def reset_counts(self) -> None:
        """Count prompts from zero again."""
        self._prefix_query_tokens = self._prefix_hit_tokens = 0

    def reserve(self, seq: KvSequence, n: int) -> list[tuple[int, int]]:
        """Reserve slots for `n` tokens after the committed ones. Return the (src, dst) page copies to make.

        The caller makes the copies of all `reserve` calls in order, before it writes to the pool: a later
        copy may read a page that an earlier one filled. Raises OutOfPages, and changes nothing, if there are
        too few pages.
        """
        self._check_owned(seq)
        if n <= 0:
            return []
        length = len(seq)
        written_page, offset = divmod(length, self.page_size)
        shared = offset > 0 and self._pool.refcount(seq.pages[written_page]) > 1
        missing_pages = max(0, self._pages_for(length + n) - len(seq.pages)) + shared
        fresh = self._pool.allocate(missing_pages) if missing_pages else []
        for check in self._checks:
            check.pages_added(seq.key, fresh)
            check.pages_removed(seq.key, seq.pages[written_page : written_page + shared])

        copies = []
        if shared:
            src, dst = seq.pages[written_page], fresh.pop(0)
            seq.pages[written_page] = dst
            self._pool.decref(src)
            self._copied_pages += 1
            copies.append((src, dst))
        elif offset:
            # The sequence was truncated within an indexed page, which is about to get other tokens.
            self._pool.unpublish(seq.pages[written_page])
        seq.pages.extend(fresh)
        self._columns.writable[seq.row] = len(seq.pages) * self.page_size
        self._columns.changes[seq.row] += missing_pages > 0
        return copies

    def reserve_next(
        self, keys: Sequence[int], positions: Rows, allowed: NDArray[np.bool_] | None = None, ahead: int = 0
    ) -> tuple[Rows, NDArray[np.bool_]]:
        """Reserve a slot for one token of each of these sequences, at its end.

        `ahead`: this many tokens after its end, where the slots in between are reserved already.

        Returns [N] int64, their rows, and [N] bool, for which of them it was done. Has no effect on a
        sequence that is not `allowed`, unknown, of another length, needs a copy of a page, or finds no free
        page. Use `reserve` for these.
        """
        columns, known = self._columns, self._row_of
        rows = np.array([known.get(key, NO_ROW) for key in keys])
        done = columns.lengths[rows] + ahead == positions
        if allowed is not None:
            done &= allowed
        ready = done & (positions < columns.writable[rows])
        if not all(ready.tolist()):
            for item in (done & ~ready).nonzero()[0].tolist():
                done[item] = self._reserve_one(self._in_row[rows.item(item)], ahead)
        return rows, done

    def _reserve_one(self, seq: KvSequence, ahead: int) -> bool:
        page, offset = divmod(len(seq) + ahead, self.page_size)
        if offset and not self._pool.is_private(seq.pages[page]):
            return False
        if page == len(seq.pages) and not self._pool.available:
            return False
        self.reserve(seq, ahead + 1)
        return True

    def take_back(self, seq: KvSequence, copies: Sequence[tuple[int, int]]) -> None:
        """Undo what `reserve` did to shared pages, since its copies could not be made."""
        self._check_owned(seq)
        for src, dst in copies:
            seq.pages[seq.pages.index(dst)] = src
            self._pool.incref(src)
            self._pool.decref(dst)
            self._copied_pages -= 1
            self._columns.writable[seq.row] = 0
            self._columns.changes[seq.row] += 1

    def append(self, seq: KvSequence, tokens: Sequence[int], own: int | None = None) -> None:
        """Commit `tokens`, whose KV has just been written into reserved slots. Index pages that are full now.

        A page is not indexed if another page with the same tokens is. Raises ValueError, and changes
        nothing, if too few slots were reserved.

        own: The index of the first token whose KV was computed in a tree, where sums are rounded differently.
            Pages from there on are shared only with forks. None: all may be shared.
        """
        self._check_owned(seq)
        end = len(seq) + len(tokens)
        if end > seq.writable:
            raise ValueError(f"sequence {seq.key}: {end} tokens do not fit in the {seq.writable} reserved")
        if own is not None:
            seq.shared_until = min(seq.shared_until, len(seq) + own)
        self._extend(seq, tokens)
        self._index_pages(seq, end)
        if self.states is not None:
            self._keep_states(self.states, seq)

    def _keep_states(self, states: StateSlots, seq: KvSequence) -> None:
        snapshots = states.appended(seq, is_shared=seq.generation == self.prefixes.generation)
        if snapshots and self._stored is not None:
            self._stored.kept(seq, snapshots)

    def append_next(self, rows: Rows, positions: Rows, tokens: Rows) -> None:
        """As `append` of one token to each of the sequences in these rows, after `reserve_next`."""
        columns, ends = self._columns, positions + 1
        columns.recent[rows, positions % self.page_size] = tokens
        columns.lengths[rows] = ends
        self._tokens += len(rows)
        is_full = ends % self.page_size == 0
        for row, end in zip(rows[is_full].tolist(), ends[is_full].tolist(), strict=True):
            self._index_pages(self._in_row[row], end)
        if self.states is not None:
            for row in rows.tolist():
                seq = self._in_row[row]
                self._keep_states(self.states, seq)
                self.states.end(seq.key)

    def _index_pages(self, seq: KvSequence, end: int) -> None:
        first, size = seq.digests.length, self.page_size
        tokens = seq.token_ids[first * size : end // size * size]
        for i, digest in enumerate(self.prefixes.digests(last_digest(seq), tokens, len(tokens)), first):
            seq.digests.append(digest)
            self._publish(seq, i)

    def _publish(self, seq: KvSequence, i: int) -> None:
        if not self.prefixes.is_shared(seq, (i + 1) * self.page_size):
            return
        if self._pool.publish(seq.pages[i], seq.digests[i]) and self._stored is not None:
            self._stored.indexed(seq, i)

    def truncate(self, seq: KvSequence, new_len: int) -> None:
        """Cut `seq` to `new_len` tokens and free all pages after them, including reserved ones.

        Indexed pages become cached, others free. Raises ValueError for a length past the end.
        """
        self._check_owned(seq)
        if not 0 <= new_len <= len(seq):
            raise ValueError(f"sequence {seq.key} of {len(seq)} tokens cannot be cut to {new_len}")
        kept_pages = self._pages_for(new_len)
        full_pages = len(seq.digests)
        # Last page first, so that the end of a chain is evicted before the pages it depends on.
        for i in range(len(seq.pages) - 1, kept_pages - 1, -1):
            page = seq.pages[i]
            if i < full_pages and self._pool.refcount(page) == 1:
                # If an indexed page with the same tokens was evicted meanwhile, this one takes its place.
                self._publish(seq, i)
            self._pool.decref(page)
        for check in self._checks:
            check.pages_removed(seq.key, seq.pages[kept_pages:])
        self._tokens -= len(seq) - new_len
        del seq.pages[kept_pages:]
        seq.digests.cut(new_len // self.page_size)
        seq.token_ids.cut(new_len)
        if new_len <= seq.shared_until:
            seq.shared_until = ALL
        columns = self._columns
        columns.lengths[seq.row], columns.writable[seq.row] = new_len, 0
        columns.changes[seq.row] += 1
        if self.states is not None:
            self.states.truncated(seq)

    def fork(self, seq: KvSequence, child_keys: Sequence[int]) -> list[KvSequence]:
        """Add and return sequences with the same tokens in the same pages. Reserved slots are not shared.

        Costs a reference count for each page, and a list of pages for each child. Tokens and digests are
        shared. Raises ValueError, and adds nothing, if a key is taken.
        """
        self._check_owned(seq)
        if len(set(child_keys)) < len(child_keys) or any(key in self._sequences for key in child_keys):
            raise ValueError(f"one of the sequences {list(child_keys)} exists")
        pages = seq.pages[: self._pages_for(len(seq))]
        for page in pages:
            self._pool.incref(page, len(child_keys))
        children = []
        for key in child_keys:
            child = self._add(key, seq.salt, seq.generation)
            child.token_ids = seq.token_ids.copy()
            child.pages = pages[:]
            for check in self._checks:
                check.pages_added(key, pages)
            child.digests, child.shared_until = seq.digests.copy(), seq.shared_until
            self._tokens += len(seq)
            children.append(child)
        if len(seq) % self.page_size and children:
            self._columns.writable[seq.row] = 0
        if self.states is not None:
            self.states.forked(seq.key, child_keys)
        return children

    def release(self, key: int) -> bool:
        """Remove the sequence of `key` and free its pages. False if there is none."""
        seq = self._sequences.get(key)
        if seq is None:
            return False
        self.truncate(seq, 0)
        if self.states is not None:
            self.states.released(key)
        del self._sequences[key], self._row_of[key], self._in_row[seq.row]
        self._columns.remove(seq.row)
        return True

    # Pages that are on disk too.

    def store_on(self, disk: DiskPages) -> None:
        """From now on, tell `disk` which pages to store, and which pages are about to be overwritten."""
        self._stored = StoredSequences(disk, self._pool, self.states, self.page_size)

    def find(self, digest: bytes) -> int | None:
        """The page of this digest, or the slot of this state. None: there is none.

        The next call may evict it, unless that is `held.hold`.
        """
        if self.states is not None and is_state(digest):
            return self.states.snapshot(digest[:DIGEST_BYTES])
        return self._pool.lookup(digest)

    def filled(self, page: int, digest: bytes) -> None:
        """Index a page of `held` whose contents were read, unless another page has this digest by now."""
        self._pool.publish(page, digest)

    @property
    def pages_available(self) -> int:
        """Pages free or cached."""
        return self._pool.available

    def usage(self) -> PoolUsage:
        """Return a snapshot, in O(1)."""
        return PoolUsage(
            sequences=len(self._sequences),
            tokens=self._tokens,
            pages_total=self._pool.num_pages,
            pages_free=self._pool.free,
            pages_cached=self._pool.cached,
            pages_referenced=self._pool.referenced,
            prefix_hit_tokens=self._prefix_hit_tokens,
            prefix_query_tokens=self._prefix_query_tokens,
            evicted_pages=self._pool.evicted_pages,
            copied_pages=self._copied_pages,
        )

    def check_integrity(self) -> None:
        """Raise IntegrityError unless pool and sequences agree page by page. O(pages held)."""
        for _ in self.check_integrity_in_slices():
            pass

    def check_integrity_in_slices(self) -> Iterator[None]:
        """As `check_integrity`, in slices. The table may be used and changed between two of them."""
        if self._stored is not None:
            self._stored.disk.check_integrity(self.find)
        check = IntegrityCheck(self._sequences, self._pool, self.page_size, self.held.references)
        self._checks.append(check)
        try:
            yield from check.slices()
        finally:
            self._checks.remove(check)
        if self.states is not None:
            self.states.check_integrity()
        if self._tokens != sum(map(len, self._sequences.values())):
            raise IntegrityError(f"{self._tokens} tokens counted, the sequences disagree")

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _check_owned(self, seq: KvSequence) -> None:
        if self._sequences.get(seq.key) is not seq:
            raise ValueError(f"sequence {seq.key} is not in this table")

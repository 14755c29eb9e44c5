"""Which pages of sequences can be shared, and under which digests. Changes neither sequences nor the pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from workers.kv.page_pool import PagePool, page_digest, root_digest
from workers.kv.sequence import KvSequence


class Prefixes:
    """The digests of a `KvTable`'s pages.

    Attributes:
        generation: Incremented with each replacement of the weights, by the table. Pages of sequences of
            earlier generations are no longer shared.
    """

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool, self._page_size = pool, page_size
        self.generation = 0

    def salted(self, salt: bytes) -> bytes:
        """The salt of a new sequence, which is never that of an earlier generation."""
        return b"%d|%b" % (self.generation, salt) if self.generation else salt

    def salt_of(self, seq: KvSequence) -> bytes:
        """The salt with which a sequence was created."""
        return seq.salt.split(b"|", 1)[1] if seq.generation else seq.salt

    def may_share_next(self, seq: KvSequence) -> bool:
        """Whether the next page of a sequence can be a shared one: it ends with a full page."""
        return seq.generation == self.generation and len(seq) == len(seq.pages) * self._page_size

    def is_shared(self, seq: KvSequence, end: int) -> bool:
        """Whether other sequences may share the page of this one that ends at `end`."""
        return seq.generation == self.generation and end <= seq.shared_until

    def digests(self, parent: bytes, tokens: Sequence[int], limit: int) -> Iterator[bytes]:
        """The digests of the full pages in the first `limit` of `tokens`, after the page `parent`."""
        size = self._page_size
        for start in range(0, min(limit, len(tokens)) // size * size, size):
            parent = page_digest(parent, tokens[start : start + size])
            yield parent

    def digests_at(
        self, seq: KvSequence | None, position: int, salt: bytes, tokens: Sequence[int], limit: int
    ) -> Iterator[tuple[bytes, bytes]]:
        """(digest, parent digest) of each full page in the first `limit` of `tokens`, appended at `position`.

        `seq` None: a new sequence with this salt. Yields nothing if the sequence is shorter, or the position
        is within a page.
        """
        if position % self._page_size or (position and (seq is None or len(seq) < position)):
            return
        parent = root_digest(self.salted(salt))
        if position and seq is not None:
            parent = seq.digests[position // self._page_size - 1]
        for digest in self.digests(parent, tokens, limit):
            yield digest, parent
            parent = digest

    def find(
        self, seq: KvSequence | None, salt: bytes, tokens: Sequence[int], limit: int
    ) -> tuple[int, bytes | None]:
        """How many tokens `KvTable.match_prefix` would find, and the digest of the first page it would not.

        `seq` None: a new sequence with this salt. (0, None): it would find all pages, or none can be shared.
        """
        if seq is not None and not self.may_share_next(seq):
            return 0, None
        last = root_digest(self.salted(salt)) if seq is None else last_digest(seq)
        for pages, digest in enumerate(self.digests(last, tokens, limit)):
            if self._pool.lookup(digest) is None:
                return pages * self._page_size, digest
        return 0, None

    def next_digest(self, seq: KvSequence, tokens: Sequence[int]) -> bytes | None:
        """The digest of the next page that `tokens` fill after `seq`. None: none, or it cannot be shared."""
        offset = len(seq) % self._page_size
        end = len(seq) - offset + self._page_size
        if len(seq) + len(tokens) < end or not self.is_shared(seq, end):
            return None
        page_tokens = [*seq.token_ids[len(seq) - offset : len(seq)], *tokens[: self._page_size - offset]]
        return page_digest(last_digest(seq), page_tokens)


def last_digest(seq: KvSequence) -> bytes:
    """The parent digest of a sequence's next page."""
    return seq.digests[-1] if seq.digests else root_digest(seq.salt)

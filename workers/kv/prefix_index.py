"""The prefix index: a hash chain over full pages, and a map from digests to pages.

A page's digest covers its own tokens and, through its parent's digest, all tokens before them and the salt.
Keys and values of a token depend on exactly these, so pages with equal digests are interchangeable. If a page
in the middle of a chain is evicted, the pages after it are not found until it is computed again, and are
still correct then.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_BYTES = 16

# Separates root digests from page digests, for any salt.
_ROOT_PERSON = b"quire-kv-root"


def root_digest(salt: bytes) -> bytes:
    """Return the parent digest of a sequence's first page. Sequences share pages only under equal salts."""
    return blake2b(salt, digest_size=DIGEST_BYTES, person=_ROOT_PERSON).digest()


def page_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the digest of a full page that holds `tokens` and follows the page of digest `parent`.

    Raises struct.error for a token outside uint32.
    """
    return blake2b(parent + struct.pack(f"<{len(tokens)}I", *tokens), digest_size=DIGEST_BYTES).digest()


class PrefixIndex:
    """A one-to-one map between digests and pages: each digest has one canonical page. O(1)."""

    __slots__ = ("_digest_of", "_page_of")

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._page_of)

    def __contains__(self, page: int) -> bool:
        return page in self._digest_of

    def page_of(self, digest: bytes) -> int | None:
        """Return the canonical page of `digest`, if there is one."""
        return self._page_of.get(digest)

    def digest_of(self, page: int) -> bytes | None:
        """Return the digest of `page`, if it is indexed."""
        return self._digest_of.get(page)

    def insert(self, page: int, digest: bytes) -> bool:
        """Make `page` the canonical page of `digest`. False, and no change, if either is indexed already."""
        if page in self._digest_of or digest in self._page_of:
            return False
        self._page_of[digest] = page
        self._digest_of[page] = digest
        return True

    def discard(self, page: int) -> bool:
        """Remove `page`. False if it was not indexed."""
        digest = self._digest_of.pop(page, None)
        if digest is None:
            return False
        del self._page_of[digest]
        return True

    def is_one_to_one(self, page: int) -> bool:
        """Whether both maps agree about `page`, and have the same size. O(1)."""
        digest = self._digest_of.get(page)
        return len(self._page_of) == len(self._digest_of) and (
            digest is None or self._page_of.get(digest) == page
        )

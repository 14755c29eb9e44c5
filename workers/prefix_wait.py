"""Prompts with a common prefix that arrive together: the common pages are computed once.

The prefix cache has only complete pages. A forward that arrives while a page is being computed does not find
it, and would compute it, too. So each forward registers which page it fills next. Another one that needs the
same page waits until the first has computed their common tokens, and then finds the pages.

No forward waits for one of lower priority, which may not be scheduled for a long time. A forward that waits
has not begun, and one that is waited for has. So there are no cycles.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workers.kv.table import KvTable
from workers.operations import Forward


class PrefixWaits:
    """Tracks which forward fills which page next. Only for forwards with at least a page of tokens to go."""

    def __init__(self, kv_table: KvTable) -> None:
        self._kv_table = kv_table
        # By the digest of the page, which depends on all tokens up to its end.
        self._filling: dict[bytes, Forward] = {}

    def progressed(self, forward: Forward) -> None:
        """Note that a forward has begun, or that a part of it was computed."""
        self.finished(forward)
        page_size = self._kv_table.page_size
        if forward.remaining < page_size or forward.parents:
            # Others cannot reuse a part of a page, nor pages of a token tree, whose tokens may be dropped.
            return
        tokens = forward.token_ids[forward.computed : forward.computed + page_size]
        digest = self._kv_table.prefixes.next_digest(forward.kv, tokens)
        if digest is not None and digest not in self._filling:
            self._filling[digest] = forward
            forward.filling_digest = digest

    def finished(self, forward: Forward) -> None:
        """Note that a forward fills no further page."""
        if forward.filling_digest is not None:
            del self._filling[forward.filling_digest]
            forward.filling_digest = None

    def must_wait(self, forward: Forward) -> bool:
        """Whether a forward should wait for another one before it begins. Sets `waits_for`, `waits_until`."""
        page_size = self._kv_table.page_size
        reusable = len(forward.token_ids) - max(forward.wanted_rows, 1)
        if not self._filling or reusable < page_size:
            return False
        sequence = self._kv_table.get(forward.sequence)
        if sequence is not None and len(sequence) != forward.position:
            return False
        found, digest = self._kv_table.prefixes.find(sequence, forward.salt, forward.token_ids, reusable)
        first = self._filling.get(digest) if digest is not None else None
        if first is None or first.priority.value < forward.priority.value:
            return False
        # The common prefix may end within a page. That page cannot be shared: each forward computes its own.
        # In a model with recurrent layers the same holds for what follows the last snapshot.
        ahead = first.position - forward.position
        start = max(found + page_size, ahead)
        common = start + _common_length(forward.token_ids[start:reusable], first.token_ids[start - ahead :])
        end = forward.position + common
        end -= end % self._kv_table.reuse_unit
        if end <= forward.position + found:
            return False
        forward.waits_for, forward.waits_until = first, end - first.position
        return True


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """The length of the common prefix."""
    length = min(len(first), len(second))
    different = np.flatnonzero(np.asarray(first[:length]) != np.asarray(second[:length]))
    return int(different[0]) if len(different) else length

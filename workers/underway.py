"""Prompts that begin alike and come together: what they have in common is computed once.

KV is shared by whole pages that are there. Who comes while such pages are being computed would find none,
and compute them too. So it is known of each forward which page it fills next; a forward that wants the very
same page waits for the first one, for as long as their tokens are the same, and finds the pages then.

Nobody waits for one of lower priority, which may have no turn for long. Who waits has begun nothing, and who
is waited for has begun: they never wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workers.kv.table import KvTable
from workers.operations import Forward
from workers.running import Behind, RunningForward


class Underway:
    """Owner of which forward fills which page next."""

    def __init__(self, kv_table: KvTable) -> None:
        self._kv_table = kv_table
        # By the digest of the page, which says what all tokens up to its end are.
        self._filling: dict[bytes, RunningForward] = {}
        self._digest_of: dict[RunningForward, bytes] = {}

    def goes_on(self, running: RunningForward) -> None:
        """A forward has begun, or some of it was computed."""
        if running in self._digest_of:
            self.ended(running)
        if len(running.op.token_ids) - running.computed < self._kv_table.page_size or running.op.parents:
            # Of single tokens nobody waits for a page, nor of those that may go.
            return
        page_end = running.computed + self._kv_table.page_size
        digest = self._kv_table.next_digest(
            running.sequence, running.op.token_ids[running.computed : page_end]
        )
        if digest is not None and digest not in self._filling:
            self._filling[digest] = running
            self._digest_of[running] = digest

    def ended(self, running: RunningForward) -> None:
        """Nothing more is computed of a forward."""
        digest = self._digest_of.pop(running, None)
        if digest is not None:
            del self._filling[digest]

    def behind(self, op: Forward) -> Behind | None:
        """What a forward that has not begun had better wait for; None: nothing."""
        reusable = len(op.token_ids) - max(op.wanted_rows, 1)
        if not self._filling or reusable < self._kv_table.page_size:
            return None
        sequence = self._kv_table.get(op.sequence)
        if sequence is not None and len(sequence) != op.position:
            return None
        found, digest = self._kv_table.look_up(sequence, op.salt, op.token_ids, reusable)
        first = self._filling.get(digest) if digest is not None else None
        if first is None or first.op.priority.value < op.priority.value:
            return None
        # What they have in common ends within a page: that one each computes for himself.
        ahead = first.op.position - op.position
        start = found + self._kv_table.page_size
        ours = op.token_ids[max(start, ahead) : reusable]
        theirs = first.op.token_ids[max(start, ahead) - ahead :]
        alike = max(start, ahead) + _common(ours, theirs)
        end = op.position + alike
        return Behind(first.op.op_id, end - end % self._kv_table.page_size - first.op.position)


def _common(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """With how many tokens both begin."""
    length = min(len(ours), len(theirs))
    differ = np.flatnonzero(np.asarray(ours[:length]) != np.asarray(theirs[:length]))
    return int(differ[0]) if len(differ) else length

"""Which sequence kills workers. Pure.

When a worker dies under several sequences, one of them may have done it, or none. All are tried again
together; those under whom it happens repeatedly are then tried one at a time, until it is known who it is.
That one is quarantined: its operations fail, and nobody else's do.
"""

from __future__ import annotations

from collections.abc import Iterable

from service.caches.entries import CacheEntry

# A process that was killed from outside hardly was by what it computed; the kernel kills for memory, though.
_STRIKES_CRASHED, _STRIKES_KILLED = 2, 1
_GUILTY = 4


def blame(entries: Iterable[CacheEntry], *, crashed: bool) -> None:
    """A worker died while it computed these. Quarantines the one that is most suspect, if that is one."""
    under = list({entry.number: entry for entry in entries}.values())
    most = max((entry.strikes for entry in under), default=0)
    suspects = [entry for entry in under if entry.strikes == most]
    for entry in under:
        entry.strikes += _STRIKES_CRASHED if crashed else _STRIKES_KILLED
    # In company it may have been another, which was lucky until now.
    was_alone = len(under) == 1 or most >= _GUILTY
    if most and was_alone and len(suspects) == 1 and suspects[0].strikes >= _GUILTY:
        suspects[0].quarantined = True


def must_be_alone(entry: CacheEntry) -> bool:
    """Whether no other such sequence may be computed on a worker at the same time."""
    return entry.strikes >= _GUILTY

"""Finds the cache whose computation crashes workers, and quarantines it. Pure.

When a worker dies, any of the caches that it was computing may be the cause, or none. All are retried
together. A cache that was computed during several crashes becomes a suspect; a worker computes one suspect
at a time. If a worker dies while it computes a suspect, the suspect is blamed. The caches computed beside it
may also be the cause, so they become suspects. A suspect that is blamed for the second time, or was computed
alone when the worker died, is quarantined: its operations fail from then on.
"""

from __future__ import annotations

from collections.abc import Sequence

from service.caches.entries import CacheEntry

# A killed process is less suspicious than a crash, but it counts: the kernel kills processes for their
# memory.
_SCORE_CRASHED, _SCORE_KILLED = 2, 1
_MUST_BE_ALONE = 4
_MOST_TIMES_BLAMED = 2


def blame(entries: Sequence[CacheEntry], *, crashed: bool) -> None:
    """A worker died while it computed these caches. Quarantines one if it is known to be the cause."""
    suspects = [entry for entry in entries if must_be_alone(entry)]
    for entry in entries:
        entry.crash_score += _SCORE_CRASHED if crashed else _SCORE_KILLED
    if len(entries) == 1 and must_be_alone(entries[0]):
        entries[0].quarantined = True
    elif len(suspects) == 1:
        (suspect,) = suspects
        suspect.times_blamed += 1
        suspect.quarantined = suspect.times_blamed == _MOST_TIMES_BLAMED
        for entry in entries:
            entry.crash_score = max(entry.crash_score, _MUST_BE_ALONE)


def clear(entry: CacheEntry) -> None:
    """The cache was computed without a crash, so it is no longer a suspect."""
    entry.crash_score = entry.times_blamed = 0


def must_be_alone(entry: CacheEntry) -> bool:
    """Whether the cache is a suspect: a worker computes one at a time."""
    return entry.crash_score >= _MUST_BE_ALONE

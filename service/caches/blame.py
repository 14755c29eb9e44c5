"""Which sequence kills workers. Pure.

When a worker dies under several sequences, one of them may have done it, or none. All are tried again
together; those under whom it happens repeatedly become suspects, of which a worker has one at a time. A
death then names the suspect that was there; but one without marks, that was there too, may have done it: so
that becomes a suspect as well, and only who is named twice, or was alone, is quarantined. Its operations
fail from then on, and nobody else's do.
"""

from __future__ import annotations

from collections.abc import Iterable

from service.caches.entries import CacheEntry

# A process that was killed from outside hardly was by what it computed; the kernel kills for memory, though.
_STRIKES_CRASHED, _STRIKES_KILLED = 2, 1
_GUILTY = 4
_TIMES_NAMED = 2


def blame(entries: Iterable[CacheEntry], *, crashed: bool) -> None:
    """A worker died while it computed these. Quarantines one of them, if it is known who did it."""
    under = list({entry.number: entry for entry in entries}.values())
    suspects = [entry for entry in under if must_be_alone(entry)]
    for entry in under:
        entry.strikes += _STRIKES_CRASHED if crashed else _STRIKES_KILLED
    if len(under) == 1 and must_be_alone(under[0]):
        under[0].quarantined = True
    elif len(suspects) == 1:
        (suspect,) = suspects
        suspect.named += 1
        suspect.quarantined = suspect.named == _TIMES_NAMED
        for entry in under:
            entry.strikes = max(entry.strikes, _GUILTY)


def must_be_alone(entry: CacheEntry) -> bool:
    """Whether no other such sequence may be computed on a worker at the same time."""
    return entry.strikes >= _GUILTY

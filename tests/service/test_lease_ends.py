"""Leases that ran out are found at once, however many caches there are whose leases run on."""

from __future__ import annotations

import random

from service.caches.entries import CacheEntry
from service.caches.leases import LeaseEnds


class Entry(CacheEntry):
    """One that counts how often it is looked at."""

    looked = 0

    @property
    def busy(self) -> bool:
        type(self).looked += 1
        return self.is_busy

    is_busy = False


def new_entry(ends_s: float) -> Entry:
    entry = Entry.__new__(Entry)
    entry.expires_at_s = ends_s
    return entry


def test_it_finds_what_a_look_at_all_would() -> None:
    rng = random.Random(7)
    leases, now_s = LeaseEnds(), 0.0
    entries: list[Entry] = []
    for _ in range(5000):
        match rng.randrange(6):
            case 0 | 1:
                entries.append(new_entry(now_s + rng.choice((0.0, 0.3, 1.0, 5.0, 100.0, float("inf")))))
                leases.add(entries[-1])
            case 2 if entries:
                # Used: without a word.
                entry = rng.choice(entries)
                entry.expires_at_s = max(entry.expires_at_s, now_s + rng.random() * 10)
            case 3 if entries:
                entry = rng.choice(entries)
                entry.is_busy = not entry.is_busy
            case 4 if entries:
                entry = rng.choice(entries)
                entry.expires_at_s = now_s + rng.random()
                leases.moved(entry)
            case _:
                now_s += rng.random()
                at_most = rng.choice((None, 1, 3))
                due = [entry for entry in entries if entry.expires_at_s <= now_s and not entry.is_busy]
                found = leases.due(now_s, at_most)
                assert len(found) == (len(due) if at_most is None else min(at_most, len(due)))
                assert len({*map(id, found)}) == len(found) and {*map(id, found)} <= {*map(id, due)}
                for ended in found:
                    if rng.random() < 0.8:
                        leases.remove(ended)
                        entries = [entry for entry in entries if entry is not ended]
    for entry in entries:
        leases.remove(entry)
    assert leases.due(1e12) == [] and not leases._bucket_of and not leases._in_use

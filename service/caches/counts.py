"""Counters that keep no entries with a count of zero."""

from __future__ import annotations

from collections import Counter
from typing import TypeVar

_Key = TypeVar("_Key")


def take_one(counts: Counter[_Key], key: _Key) -> None:
    """Subtracts one, and deletes the entry at zero."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]

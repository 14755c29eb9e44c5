"""Counts of things that come and go, which keep nothing of what is not there any more."""

from __future__ import annotations

from collections import Counter
from typing import TypeVar

_Key = TypeVar("_Key")


def take_one(counts: Counter[_Key], key: _Key) -> None:
    """One less of it; the last one leaves no trace."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]

"""Which weights new caches get, and which older caches can still be used.

A cache and its forks belong to the weights that were served when it was created. They are never computed with
others. After a switch they can be used for a while (drain), or only be released.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from service.caches.entries import CacheEntry, Operation
from service.caches.ledger import Ledger
from service.caches.requests import Append
from service.errors import WeightsChanged

if TYPE_CHECKING:
    from service.caches.kind import OperationKind


class Weights:
    """Owns the state of served weights. These are named by numbers, which grow."""

    def __init__(self, ledger: Ledger) -> None:
        # The weights of new caches.
        self.serving = 0
        # Older weights whose caches can still be used.
        self._usable: set[int] = set()
        self._ledger = ledger

    def switch(self, weights: int, *, drain: bool) -> None:
        """New caches get other weights. `drain`: existing caches can still be used."""
        if drain:
            self._usable.add(self.serving)
        self.serving = weights

    def drained(self, weights: int) -> None:
        """Refuses new requests for caches of these weights. Earlier requests continue."""
        self._usable.discard(weights)

    def can_use(self, weights: int) -> bool:
        """Whether caches of these weights can be used."""
        return weights == self.serving or weights in self._usable

    def require(self, kind: OperationKind[Any], entry: CacheEntry, append: Append | None) -> None:
        """Raises WeightsChanged if a cache cannot be used, or an append was checked for other weights."""
        weights = entry.state.weights
        checked = None if append is None else append.weights
        if kind.needs_weights and (not self.can_use(weights) or checked not in (None, weights)):
            raise WeightsChanged

    def has_caches(self, weights: int) -> bool:
        """Whether there are caches of these weights."""
        return any(state.weights == weights for state in self._ledger)


def operations_with(operations: Iterable[Operation], weights: int) -> list[Operation]:
    """The operations with a cache of these weights."""
    return [o for o in operations if any(entry.state.weights == weights for entry in o.entries)]

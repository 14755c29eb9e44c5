"""Which weights new caches get, and which older caches can still be used.

A cache and its forks belong to the weights that were served when it was created. After a switch they can be
used for a while (drain), or only be released. Where weights are replaced by others of the same config, caches
can continue with those: then they belong to them, and their KV is recomputed.
"""

from __future__ import annotations

from collections.abc import Iterable

from service.caches.entries import CacheEntry, Operation
from service.caches.ledger import Ledger
from service.caches.requests import Append
from service.errors import WeightsChanged


class Weights:
    """Owns the state of served weights. These are named by numbers, which grow."""

    def __init__(self, ledger: Ledger) -> None:
        # The weights of new caches.
        self.serving = 0
        # The first weights whose caches continue with the ones that are served.
        self.continued_from = 0
        # Older weights whose caches can still be used.
        self._usable: set[int] = set()
        self._ledger = ledger

    def switch(self, weights: int, *, drain: bool) -> None:
        """New caches get other weights. `drain`: existing caches can still be used."""
        if drain:
            self._usable.add(self.serving)
        self.serving = self.continued_from = weights

    def replace(self, weights: int, *, continued_from: int) -> None:
        """New caches get other weights, and those of `continued_from` and later ones continue with them."""
        self.serving, self.continued_from = weights, continued_from
        self._ledger.continue_weights(continued_from, weights)

    def current(self, weights: int) -> int:
        """The weights with which something of these is computed now."""
        return self.serving if self.continued_from <= weights <= self.serving else weights

    def drained(self, weights: int) -> None:
        """Refuses new requests for caches of these weights. Earlier requests continue."""
        self._usable.discard(weights)

    def can_use(self, weights: int) -> bool:
        """Whether caches of these weights can be used."""
        return weights == self.serving or weights in self._usable

    def require(self, entry: CacheEntry, append: Append | None) -> None:
        """Raises WeightsChanged if a cache cannot be used, or an append was checked for other weights."""
        weights = entry.state.weights
        checked = None if append is None else append.weights
        if not self.can_use(weights) or (checked is not None and self.current(checked) != weights):
            raise WeightsChanged

    def has_caches(self, weights: int) -> bool:
        """Whether there are caches of these weights."""
        return any(state.weights == weights for state in self._ledger)


def operations_with(operations: Iterable[Operation], weights: int) -> list[Operation]:
    """The operations with a cache of these weights."""
    return [o for o in operations if any(entry.state.weights == weights for entry in o.entries)]

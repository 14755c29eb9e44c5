"""Which weights new caches get, and which older caches can still be used.

A cache and its forks belong to the weights that were served when it was created. When these are replaced,
either the caches can only be released; or they continue with the new weights and belong to them. Their KV is
then recomputed, or kept as it is.
"""

from __future__ import annotations

from service.caches.entries import CacheEntry
from service.caches.ledger import Ledger
from service.errors import WeightsChanged


class Weights:
    """Knows which weights are served. Weights have numbers, which grow with each replacement."""

    def __init__(self, ledger: Ledger) -> None:
        # The weights of new caches.
        self.serving = 0
        # The oldest weights whose caches continue with the served ones.
        self.continued_from = 0
        self._ledger = ledger

    def replace(self, weights: int, *, continued_from: int) -> None:
        """Serves other weights. Caches of the weights `continued_from` and later ones continue with them."""
        self.serving, self.continued_from = weights, continued_from
        self._ledger.continue_weights(continued_from, weights)

    def current(self, weights: int) -> int:
        """The weights that now compute a cache which was created with `weights`."""
        return self.serving if self.continued_from <= weights <= self.serving else weights

    def can_use(self, weights: int) -> bool:
        return weights == self.serving

    def require(self, entry: CacheEntry) -> None:
        """Raises WeightsChanged if a cache cannot be used."""
        if not self.can_use(entry.state.weights):
            raise WeightsChanged

    def has_caches(self, weights: int) -> bool:
        return any(state.weights == weights for state in self._ledger)

"""Caches that a caller holds and that an item continues; and whether their tokens are the item's own.

A generation is a pure function of the tokens before it, its options and its seed. If the cache already has
tokens after the item's prompt, the item generates them once more, on a copy of the cache. If they are the
same, an earlier run of the item made them, and it continues after them in the cache itself. If one differs,
another caller has changed the cache, and nothing is appended to it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from quire.v1 import runner_pb2

from service.caches.requests import Renew
from service.caches.tenants import Tenant
from service.dispatcher import Dispatcher
from service.errors import CacheNotFound, PositionMismatch, QuireError


@dataclass(frozen=True, slots=True)
class HeldCache:
    """The state of a cache when the item's turn came.

    Attributes:
        token_ids: All its tokens.
        position: Where the item appends its first tokens. The cache may have tokens after it.
        seed: The seed of draws if the caller gives none.
    """

    cache_id: str
    token_ids: array[int]
    position: int
    seed: int

    @property
    def ahead(self) -> array[int]:
        """The tokens from the position on."""
        return self.token_ids[self.position :]

    def require_same(self, index: int, token_id: int) -> None:
        """Raises PositionMismatch: the cache has another token at this index."""
        if index < len(self.token_ids) and self.token_ids[index] != token_id:
            raise PositionMismatch(self.position, len(self.token_ids))


async def held_cache(
    dispatcher: Dispatcher, prompt: runner_pb2.CachePrompt, tenant: Tenant | None
) -> HeldCache:
    """The cache that an item continues. Raises CacheNotFound, PositionMismatch or another QuireError."""
    # Restarts the lease, and waits for the operations that are ahead.
    (found,) = await dispatcher.run([Renew(prompt.cache_id)], tenant)
    if isinstance(found, QuireError):
        raise found
    index = dispatcher.caches.index
    entry = index.find(prompt.cache_id, tenant or index.anonymous)
    if entry is None:
        raise CacheNotFound
    state = entry.state
    position = prompt.position if prompt.HasField("position") else state.length
    if position > state.length:
        raise PositionMismatch(position, state.length)
    return HeldCache(prompt.cache_id, state.tokens.copy(), position, state.seed)

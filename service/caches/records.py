"""What the journal is told: the history of every cache in tokens, whatever becomes of the KV."""

from __future__ import annotations

from collections.abc import Sequence

from service.caches.plain import plain


@plain
class CacheCreated:
    """A new cache, without tokens yet."""

    cache_id: str
    seed: int
    lease_s: float


@plain
class TokensAppended:
    """Tokens that follow the first `position` ones."""

    cache_id: str
    position: int
    token_ids: Sequence[int]
    # Tokens before this index are prompt.
    prompt_len: int
    # Incarnation of the worker that computed them.
    epoch: int


@plain
class CacheTruncated:
    """Only the first `new_len` tokens stay."""

    cache_id: str
    new_len: int


@plain
class CacheForked:
    """A new cache with the parent's tokens."""

    cache_id: str
    parent: str
    seed: int
    lease_s: float


@plain
class CacheReleased:
    """The cache is forgotten."""

    cache_id: str


Record = CacheCreated | TokensAppended | CacheTruncated | CacheForked | CacheReleased

"""What is written down of every cache, so that a restart finds it: plain data, encoded by the journal.

The state of all caches is what these records leave, applied in order (`ledger.py`). A cache is named by its
number, which it has for ever and by which workers know it, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from service.caches.plain import plain


@plain
class CacheCreated:
    """A new cache, without tokens yet."""

    number: int
    cache_id: str
    tenant: str
    salt: bytes
    seed: int
    lease_s: float
    # Under which its creation is recognised when it is repeated. Empty: it is not.
    request_id: str
    # Of which weights it is: with no others anything is ever computed for it.
    weights: int = 0


@plain
class TokensAppended:
    """Tokens that follow the first `position` ones."""

    number: int
    position: int
    token_ids: Sequence[int]
    # Tokens before this index are prompt.
    prompt_len: int
    # Of the KV that they were computed on: grows whenever the cache's KV is placed anew.
    ownership: int
    # How the append chose what to keep, and all its tokens if it did not keep them all, or if they were a
    # tree: see `fingerprint`.
    accept: int = 0
    asked: bytes = b""


@plain
class CacheTruncated:
    """Only the first `new_len` tokens stay."""

    number: int
    new_len: int


@plain
class Child:
    """A cache that a fork makes."""

    number: int
    cache_id: str
    seed: int


@plain
class CacheForked:
    """New caches with the tokens, the tenant, the salt, the lease and the weights of `parent`."""

    parent: int
    children: Sequence[Child]
    # Under which the fork is recognised when it is repeated. Empty: it is not.
    request_id: str
    # Of a fork of several parents, which has a record for each: how many children it makes in all, and how
    # many of them come before these. 0: these are all.
    total: int = 0
    first: int = 0


@plain
class LeaseRenewed:
    """The lease runs anew, for so long."""

    number: int
    lease_s: float


@plain
class CacheReleased:
    """The cache is forgotten."""

    number: int


@plain
class LastAppend:
    """The append that made a cache as long as it is, to recognise its repetition."""

    base: int
    kept: int
    accept: int
    # Of all its tokens, also those that were not kept.
    asked: bytes


@plain
class ForkKey:
    """The fork that made a cache, to recognise its repetition: the cache was its child number `index`."""

    request_id: str
    # The cache's own; a fork may have several.
    parent: int
    index: int
    count: int


@plain
class CacheRestated:
    """All there is to know of a cache: records of it before this one are not needed any more."""

    number: int
    cache_id: str
    tenant: str
    salt: bytes
    seed: int
    lease_s: float
    request_id: str
    prompt_len: int
    ownership: int
    last: LastAppend | None
    fork: ForkKey | None
    # The first `shared_len` tokens are those of the cache `shares_with`, restated before; 0: of none.
    shares_with: int
    shared_len: int
    # Those that follow.
    token_ids: Sequence[int]
    weights: int = 0


Record = (
    CacheCreated
    | TokensAppended
    | CacheTruncated
    | CacheForked
    | LeaseRenewed
    | CacheReleased
    | CacheRestated
)


def numbers_of(record: Record) -> Sequence[int]:
    """The caches that a record changes."""
    if isinstance(record, CacheForked):
        return [child.number for child in record.children]
    return (record.number,)

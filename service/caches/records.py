"""The records of the journal: plain data, which the journal encodes.

Applied in order they give the state of all caches (`ledger.py`). A cache is named by its number, which never
changes and is also used in commands to workers.
"""

from __future__ import annotations

from collections.abc import Sequence

from service.caches.frozen_struct import frozen_struct


@frozen_struct
class CacheCreated:
    """A new cache without tokens."""

    number: int
    cache_id: str
    tenant: str
    salt: bytes
    seed: int
    lease_s: float
    # To recognise a repeated creation. Empty: not recognised.
    request_id: str
    # The numbers of the only weights that compute it, and of its adapter (0: none).
    weights: int = 0
    adapter: int = 0


@frozen_struct
class TokensAppended:
    """Tokens appended at `position`."""

    number: int
    position: int
    token_ids: Sequence[int]
    # Tokens before this index are prompt.
    prompt_len: int
    # `CacheEntry.ownership` of the placement that computed them.
    ownership: int
    # How the append chose the tokens to keep. `fingerprint`: of all its tokens, if it did not keep all of
    # them or they were a tree.
    accept: int = 0
    fingerprint: bytes = b""


@frozen_struct
class CacheTruncated:
    """Keeps only the first `new_len` tokens."""

    number: int
    new_len: int


@frozen_struct
class Child:
    """A cache that a fork makes."""

    number: int
    cache_id: str
    seed: int


@frozen_struct
class CacheForked:
    """New caches with the tokens, tenant, salt, lease, weights and adapter of `parent`."""

    parent: int
    children: Sequence[Child]
    # To recognise a repeated fork. Empty: not recognised.
    request_id: str
    # A fork of several parents has a record for each. `total`: the number of children of all of them (0:
    # there is only one record); `first`: the index of this record's first child among these.
    total: int = 0
    first: int = 0


@frozen_struct
class LeaseRenewed:
    """The lease restarts with a new length."""

    number: int
    lease_s: float


@frozen_struct
class CacheReleased:
    """The cache is removed."""

    number: int


@frozen_struct
class LastAppend:
    """The last append of a cache, to recognise its repetition."""

    base: int
    kept: int
    accept: int
    # Fingerprint of all its tokens, including those that were not kept.
    fingerprint: bytes


@frozen_struct
class ForkKey:
    """The fork that created a cache as child `index`, to recognise its repetition."""

    request_id: str
    # The parent of this cache: one of those of the fork.
    parent: int
    index: int
    count: int


@frozen_struct
class CacheRestated:
    """The whole state of a cache. Earlier records of it are no longer needed."""

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
    # The first `shared_len` tokens are those of the cache `shares_with`, restated before. 0: none.
    shares_with: int
    shared_len: int
    # The tokens after these.
    token_ids: Sequence[int]
    weights: int = 0
    adapter: int = 0


@frozen_struct
class ValueStored:
    """A named value that is stored beside the caches; see `StoredValues`. Empty: it is deleted."""

    name: str
    value: bytes


Record = (
    CacheCreated
    | TokensAppended
    | CacheTruncated
    | CacheForked
    | LeaseRenewed
    | CacheReleased
    | CacheRestated
    | ValueStored
)


def numbers_of(record: Record) -> Sequence[int]:
    """The caches that a record changes."""
    if isinstance(record, CacheForked):
        return [child.number for child in record.children]
    if isinstance(record, ValueStored):
        return ()
    return (record.number,)

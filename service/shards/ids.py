"""Which shard an id names.

With one shard, ids name none: `kv_...`. With several, the ids of shard 3 begin with `kv3_`.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

_RANDOM_BYTES = 18
_ID = re.compile(r"kv(\d{1,6})_", re.ASCII)


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `count` parts of all caches."""

    index: int = 0
    count: int = 1

    @property
    def prefix(self) -> str:
        """What the ids of its caches begin with."""
        return f"kv{self.index}_" if self.count > 1 else "kv_"

    def new_cache_id(self) -> str:
        """The id of a new cache."""
        return self.prefix + secrets.token_urlsafe(_RANDOM_BYTES)

    def workers(self, total: int) -> range:
        """Its share of the workers, by their indexes among all."""
        return range(total * self.index // self.count, total * (self.index + 1) // self.count)


def shard_of(cache_id: str) -> int | None:
    """The shard that an id names. None: it names none."""
    named = _ID.match(cache_id)
    return None if named is None else int(named[1])

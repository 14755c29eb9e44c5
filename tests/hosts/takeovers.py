"""How long callers wait when the gateway of a shard is lost: until a call that began later is answered."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from tests.soak.tally import quantiles


class Takeovers:
    """Times by kind of fault. Shards in which no caller has a cache at that moment do not count."""

    def __init__(self) -> None:
        # By caller.
        self._shards_in_use: dict[object, int] = {}
        # By shard: since when it is lost, and by what.
        self._lost: dict[int, tuple[float, str]] = {}
        self._waits: dict[str, list[float]] = {}

    def uses(self, caller: object, shard: int | None) -> None:
        """The shard of the cache that a caller has now. None: it has none."""
        self._shards_in_use.pop(caller, None)
        if shard is not None:
            self._shards_in_use[caller] = shard

    def lost(self, kind: str, shards: Iterable[int], at_s: float) -> None:
        """The gateway of these shards was hit."""
        for shard in shards:
            if shard in self._shards_in_use.values():
                self._lost.setdefault(shard, (at_s, kind))

    def answered(self, shard: int, began_s: float) -> None:
        """A call for a cache of this shard was answered, whose attempt began at this time."""
        lost = self._lost.get(shard)
        if lost is not None and began_s > lost[0]:
            del self._lost[shard]
            self._waits.setdefault(lost[1], []).append(time.time() - lost[0])

    def summary(self) -> dict[str, Any]:
        """For JSON. In seconds."""
        return {
            kind: {"shards": len(found)} | quantiles(found, 2) for kind, found in sorted(self._waits.items())
        }

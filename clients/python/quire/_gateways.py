"""Which of several gateways a call goes to: the one that has its cache, as far as is known.

Any of them answers for all caches, so a wrong choice costs a hop only. Calls for new caches, Sessions
and executions take turns.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from typing import Any

# What an answer's trailing metadata says if another gateway has the cache: its address.
_METADATA = "quire-gateway"
_SHARD = re.compile(r"kv\d+_", re.ASCII)
_SCHEME = re.compile(r"(unix|unix-abstract|dns|ipv4|ipv6|vsock|xds):")


def targets_of(target: str | Sequence[str]) -> list[str]:
    """The targets in a list, or in a text with commas that is no gRPC URI."""
    if isinstance(target, str):
        return [target] if _SCHEME.match(target) else target.split(",")
    if not target:
        raise ValueError("a target is needed")
    return list(target)


class Gateways:
    """What the answers have said so far. Safe to use from several threads."""

    def __init__(self, targets: Sequence[str]) -> None:
        self._targets = targets
        self._turn = random.randrange(len(targets))
        # By the beginning of an id, which names its shard.
        self._owners: dict[str, str] = {}

    def target(self, request: Any) -> str:
        """Where to send a request."""
        known = self._owners.get(_shard(request))
        return self.next() if known is None else known

    def next(self) -> str:
        """The target whose turn it is. The next one has its turn then."""
        target = self._targets[self._turn % len(self._targets)]
        self._turn += 1
        return target

    def answered(
        self, target: str, request: Any, response: Any, metadata: Iterable[tuple[str, str | bytes]] | None
    ) -> None:
        """Learns from an answer, and from its trailing metadata."""
        shard = _shard(request)
        if not shard:
            shard = _shard(getattr(response, "kv_cache", None))
        owner = next((value for key, value in metadata or () if key == _METADATA), target)
        # No other addresses: they would get the token.
        if shard and owner in self._targets:
            self._owners[shard] = str(owner)

    def failed(self, target: str) -> None:
        """A gateway is away: the next attempt goes to another one."""
        if self._targets[self._turn % len(self._targets)] == target:
            self._turn += 1
        for shard in [shard for shard, owner in [*self._owners.items()] if owner == target]:
            self._owners.pop(shard, None)


def _shard(message: Any) -> str:
    """The beginning of the id in a message, or of the first item's. Empty: there is none."""
    for item in getattr(message, "items", None) or (message,):
        if named := _SHARD.match(getattr(item, "cache_id", "")):
            return named[0]
    return ""

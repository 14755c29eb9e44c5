"""At which addresses the owners of the shards are reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class Addresses:
    """By shard. One that nobody has now has none.

    Attributes:
        peers: For gateways.
        public: Where clients reach the owner and no other. Empty: such an address is not known.
    """

    peers: Mapping[int, str] = field(default_factory=dict)
    public: Mapping[int, str] = field(default_factory=dict)

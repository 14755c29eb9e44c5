"""The memory limit for the answers of all calls until they are sent, and for unread chunks.

Where callers have tenants, one tenant has at most half of it.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import grpc

from service.caches.tenants import Tenant
from service.errors import AnswersFull
from service.turns import share_of

# Answers of at most this size count once: the call itself takes as much, and the number of calls has a limit.
SMALL_BYTES = 4096
# How often a larger answer is in memory, until its client has read it: the message, which is made while the
# worker's is still there, the same serialized, and in gRPC's buffer.
COPIES = 3


def in_memory(answer_bytes: int) -> int:
    """The memory of an answer with so many bytes, all copies together."""
    return answer_bytes if answer_bytes <= SMALL_BYTES else COPIES * answer_bytes


class AnswerBudget:
    """Counts the bytes of answers that are being computed, wait to be written, or are not yet read."""

    def __init__(self, max_bytes: int, whole: AnswerBudget | None = None) -> None:
        """`whole`: what this is a tenant's share of."""
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._whole = whole
        # Of tenants: those that are referred to, and those where something is counted.
        self._shares: WeakValueDictionary[Tenant, AnswerBudget] = WeakValueDictionary()
        self._used: set[AnswerBudget] = set()

    def of(self, tenant: Tenant | None) -> AnswerBudget:
        """The share of a tenant: what is counted there is counted here too. None: all of it."""
        if tenant is None:
            return self
        share = self._shares.get(tenant)
        if share is None:
            share = self._shares[tenant] = AnswerBudget(share_of(self.max_bytes, tenant), self)
        return share

    def check(self, size_bytes: int) -> None:
        """Raises AnswersFull if there is no room for a further answer."""
        if self.used_bytes and self.used_bytes + size_bytes > self.max_bytes:
            raise AnswersFull(self.max_bytes)

    def take(self, size_bytes: int) -> None:
        """Reserves memory for an answer before it is computed. Raises AnswersFull.

        A single answer is always admitted, however large.
        """
        # This runs for each token, so without tenants it calls nothing.
        if self.used_bytes and self.used_bytes + size_bytes > self.max_bytes:
            raise AnswersFull(self.max_bytes)
        if self._whole is None:
            self.used_bytes += size_bytes
        else:
            self._whole.check(size_bytes)
            self.adjust(size_bytes)

    @property
    def is_exceeded(self) -> bool:
        """Whether the limit is reached: its own, or that of all for a tenant with at least an equal share."""
        if self.used_bytes >= self.max_bytes:
            return True
        whole = self._whole
        if whole is None or whole.used_bytes < whole.max_bytes:
            return False
        return self.used_bytes * len(whole._used) >= whole.max_bytes  # noqa: SLF001 - its own class

    def adjust(self, size_bytes: int) -> None:
        """Counts more bytes, without a check; or fewer, if negative."""
        self.used_bytes += size_bytes
        whole = self._whole
        if whole is not None:
            whole.used_bytes += size_bytes
            (whole._used.add if self.used_bytes else whole._used.discard)(self)  # noqa: SLF001

    def take_until_done(self, size_bytes: int, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """`take`, and release when the call has ended."""
        if size_bytes > SMALL_BYTES:
            self.take(size_bytes)
            context.add_done_callback(lambda _: self.adjust(-size_bytes))  # type: ignore[arg-type]

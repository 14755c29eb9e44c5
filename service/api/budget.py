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
        # Of large answers.
        self.large_bytes = 0
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
        if size_bytes <= SMALL_BYTES:
            # Who asks for little does not wait for those who ask for much.
            if self.used_bytes - self.large_bytes + size_bytes > self.max_bytes:
                raise AnswersFull(self.max_bytes)
        elif self.used_bytes + size_bytes > self.max_bytes and (
            self.large_bytes or size_bytes <= self.max_bytes
        ):
            raise AnswersFull(self.max_bytes)

    def take(self, size_bytes: int) -> None:
        """Reserves memory for an answer before it is computed. Raises AnswersFull.

        One that could never fit is admitted if it is the only large one.
        """
        # This runs for each token: without tenants, a small answer calls nothing.
        if size_bytes > SMALL_BYTES or self.used_bytes - self.large_bytes + size_bytes > self.max_bytes:
            self.check(size_bytes)
        if self._whole is None:
            self.used_bytes += size_bytes
            if size_bytes > SMALL_BYTES:
                self.large_bytes += size_bytes
        else:
            self._whole.check(size_bytes)
            self.adjust(size_bytes, is_large=size_bytes > SMALL_BYTES)

    @property
    def is_exceeded(self) -> bool:
        """Whether the limit is reached: its own, or that of all for a tenant with at least an equal share."""
        if self.used_bytes >= self.max_bytes:
            return True
        whole = self._whole
        if whole is None or whole.used_bytes < whole.max_bytes:
            return False
        return self.used_bytes * len(whole._used) >= whole.max_bytes  # noqa: SLF001 - its own class

    def adjust(self, size_bytes: int, *, is_large: bool = False) -> None:
        """Counts more bytes, without a check; or fewer, if negative. `is_large`: of large answers."""
        self.used_bytes += size_bytes
        if is_large:
            self.large_bytes += size_bytes
        whole = self._whole
        if whole is not None:
            whole.adjust(size_bytes, is_large=is_large)
            (whole._used.add if self.used_bytes else whole._used.discard)(self)  # noqa: SLF001

    def take_until_done(self, size_bytes: int, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """`take`, and release when the call has ended."""
        if size_bytes > SMALL_BYTES:
            self.take(size_bytes)
            context.add_done_callback(lambda _: self.adjust(-size_bytes, is_large=True))  # type: ignore[arg-type]

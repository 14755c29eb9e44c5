"""Memory limits for answers: of all calls until they are sent, and of executions that may be resumed."""

from __future__ import annotations

from typing import Any, Protocol

import grpc

from service.errors import AnswersFull

# Smaller answers are not counted: the call itself takes as much, and the number of calls has a limit.
_SMALL_BYTES = 4096


class AnswerBudget:
    """Counts the bytes of answers that are being computed, wait to be written, or are not yet read."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Reserves memory for an answer before it is computed. Raises AnswersFull.

        A single answer is always admitted, however large.
        """
        if self.used_bytes and self.used_bytes + size_bytes > self.max_bytes:
            raise AnswersFull(self.max_bytes)
        self.used_bytes += size_bytes

    @property
    def is_exceeded(self) -> bool:
        """Whether the limit is reached."""
        return self.used_bytes >= self.max_bytes

    def adjust(self, size_bytes: int) -> None:
        """Counts more bytes, without a check; or fewer, if negative."""
        self.used_bytes += size_bytes

    def take_until_done(self, size_bytes: int, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """`take`, and release when the call has ended."""
        if size_bytes > _SMALL_BYTES:
            self.take(size_bytes)
            context.add_done_callback(lambda _: self.adjust(-size_bytes))  # type: ignore[arg-type]


class ReplayHolder(Protocol):
    """Stores chunks that were read, for a client that resumes."""

    def evict_to(self, size_bytes: int) -> None:
        """Evicts the oldest chunks until at most `size_bytes` are left."""


class ReplayBudget:
    """Counts the bytes of chunks that are stored although they were read. Over the limit, holders evict."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._holders: dict[ReplayHolder, int] = {}

    def add(self, holder: ReplayHolder, size_bytes: int) -> None:
        """A holder stores more bytes. Over the limit, the largest holders evict."""
        self._holders[holder] = self._holders.get(holder, 0) + size_bytes
        self.used_bytes += size_bytes
        if self.used_bytes > self.max_bytes:
            # Down to half of the limit, so that this is rare.
            share_bytes = self.max_bytes // (2 * len(self._holders))
            for each in list(self._holders):
                each.evict_to(share_bytes)

    def remove(self, holder: ReplayHolder, size_bytes: int) -> None:
        """A holder stores fewer bytes."""
        self.used_bytes -= size_bytes
        self._holders[holder] -= size_bytes
        if not self._holders[holder]:
            del self._holders[holder]

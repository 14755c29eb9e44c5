"""The memory limit for the answers of all calls until they are sent, and for unread chunks."""

from __future__ import annotations

from typing import Any

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

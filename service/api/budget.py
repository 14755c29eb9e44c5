"""One budget for the answers of all callers: from admission until what was computed has been handed over."""

from __future__ import annotations

from typing import Any, Protocol

import grpc

from service.errors import AnswersFull

# Smaller answers weigh no more than the call itself; how many there can be is bounded elsewhere.
_SMALL_BYTES = 4096


class AnswerBudget:
    """Counts the bytes of answers that are computed, wait to be written, or are not read by their callers."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Makes room for an answer, before it is computed. Raises AnswersFull.

        One alone always has room, however large.
        """
        if self.used_bytes and self.used_bytes + size_bytes > self.max_bytes:
            raise AnswersFull(self.max_bytes)
        self.used_bytes += size_bytes

    @property
    def is_exceeded(self) -> bool:
        """Whether nothing more has room."""
        return self.used_bytes >= self.max_bytes

    def exchange(self, promised_bytes: int, size_bytes: int) -> None:
        """An answer is there, and has its true size from now on; none counts as 0."""
        self.used_bytes += size_bytes - promised_bytes

    def take_until_done(self, size_bytes: int, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """`take`, given back when the call is over: its answer was written, or nobody wants it."""
        if size_bytes > _SMALL_BYTES:
            self.take(size_bytes)
            context.add_done_callback(lambda _: self.exchange(size_bytes, 0))  # type: ignore[arg-type]


class Keeper(Protocol):
    """Keeps answers that were read, for one who comes again."""

    def keep_at_most(self, size_bytes: int) -> None:
        """Gives up what is more than that, the oldest first."""


class KeptBudget:
    """Counts the bytes of answers that are kept though they were read. Beyond it all give up a part."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._keepers: dict[Keeper, int] = {}

    def add(self, keeper: Keeper, size_bytes: int) -> None:
        """A keeper keeps so much more. If that is too much, those who keep most give some up."""
        self._keepers[keeper] = self._keepers.get(keeper, 0) + size_bytes
        self.used_bytes += size_bytes
        if self.used_bytes > self.max_bytes:
            # Half of it all: the next time is not soon.
            share_bytes = self.max_bytes // (2 * len(self._keepers))
            for one in list(self._keepers):
                one.keep_at_most(share_bytes)

    def remove(self, keeper: Keeper, size_bytes: int) -> None:
        """A keeper keeps so much less."""
        self.used_bytes -= size_bytes
        self._keepers[keeper] -= size_bytes
        if not self._keepers[keeper]:
            del self._keepers[keeper]

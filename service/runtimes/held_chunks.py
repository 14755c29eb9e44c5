"""What has come of an execution: what nobody has read yet, and of what was read what there is room for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import TypeAlias

from quire.v1 import runner_pb2

from service.api.budget import AnswerBudget, KeptBudget
from service.errors import ExecutionLost

# Of what is held, so many chunks are looked at in one go: a millisecond or two.
_LOOKED_AT_ONCE = 2048
# What is held of one that is kept, and of that, what was read last, whatever else is there.
MAX_KEPT_BYTES = 16 << 20
LAST_READ_BYTES = 1 << 20
# What a chunk takes beside its contents, about.
_CHUNK_BYTES = 200
# A message that would be larger is sent in several.
_MESSAGE_BYTES = 1 << 18

# A sample: its item's id, and its index.
_SampleKey: TypeAlias = tuple[str, int]
_Sized: TypeAlias = tuple[runner_pb2.SampleChunk, int]


class HeldChunks:
    """Owner of an execution's chunks (a Keeper). The budgets count what several of these hold."""

    def __init__(self, unread: AnswerBudget, read: KeptBudget, *, keeps: bool) -> None:
        """`keeps`: what was read is kept for one who comes again."""
        self._keeps = keeps
        self.unread_bytes = 0
        self._unread: deque[_Sized] = deque()
        self._unread_budget = unread
        # Older than what is unread.
        self._read: deque[_Sized] = deque()
        self._read_bytes = 0
        self._read_budget = read
        # How much of the samples is held no longer.
        self._lost: dict[_SampleKey, int] = {}
        self._is_closed = False

    def add(self, chunk: runner_pb2.SampleChunk) -> None:
        """Another has come."""
        size_bytes = chunk.ByteSize() + _CHUNK_BYTES
        self._unread.append((chunk, size_bytes))
        self._count_unread(size_bytes)
        self.keep_at_most(self._most_read_bytes)

    @property
    def has_unread(self) -> bool:
        """Whether there is something to take, or to pass over."""
        return bool(self._unread)

    def take(self, is_known: Callable[[runner_pb2.SampleChunk], bool]) -> list[runner_pb2.SampleChunk]:
        """What fits a message, as far as it was looked for; without what the reader knows already."""
        chunks: list[runner_pb2.SampleChunk] = []
        left_bytes, taken_bytes = _MESSAGE_BYTES, 0
        for _ in range(min(len(self._unread), _LOOKED_AT_ONCE)):
            if left_bytes <= 0:
                break
            chunk, size_bytes = taken = self._unread.popleft()
            taken_bytes += size_bytes
            if self._keeps and not self._is_closed:
                self._read.append(taken)
            if not is_known(chunk):
                chunks.append(chunk)
                left_bytes -= size_bytes
        self._count_unread(-taken_bytes)
        if self._read and taken_bytes:
            self._read_bytes += taken_bytes
            self._read_budget.add(self, taken_bytes)
            self.keep_at_most(self._most_read_bytes)
        return chunks

    def read_again(self, progress: Mapping[_SampleKey, int]) -> None:
        """All that is held is unread: a reader comes who has so much of the samples.

        Raises ExecutionLost if something is held no longer that he has not.
        """
        if any(progress.get(key, 0) < position for key, position in self._lost.items()):
            raise ExecutionLost
        read, size_bytes = self._read, self._read_bytes
        self._read, self._read_bytes = deque(), 0
        if size_bytes:
            self._read_budget.remove(self, size_bytes)
        self._unread.extendleft(reversed(read))
        self._count_unread(size_bytes)

    @property
    def _most_read_bytes(self) -> int:
        return max(LAST_READ_BYTES, MAX_KEPT_BYTES - self.unread_bytes)

    def keep_at_most(self, size_bytes: int) -> None:
        """See `Keeper`."""
        given_up_bytes = 0
        while self._read_bytes > size_bytes:
            chunk, chunk_bytes = self._read.popleft()
            self._lost[chunk.item_id, chunk.sample] = end_of(chunk)
            self._read_bytes -= chunk_bytes
            given_up_bytes += chunk_bytes
        if given_up_bytes:
            self._read_budget.remove(self, given_up_bytes)

    def close(self) -> None:
        """It counts no longer. What is unread may still be taken."""
        self.keep_at_most(0)
        self._unread_budget.exchange(self.unread_bytes, 0)
        self._is_closed = True

    def _count_unread(self, size_bytes: int) -> None:
        self.unread_bytes += size_bytes
        if not self._is_closed:
            self._unread_budget.exchange(0, size_bytes)


def end_of(chunk: runner_pb2.SampleChunk) -> int:
    """How much of its sample there is with it."""
    return chunk.position + max(1, len(chunk.token_ids))

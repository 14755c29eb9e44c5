"""The chunks of an execution: all unread ones, and as many of those already read as the limits allow."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from quire.v1 import runner_pb2

from service.budgets import COPIES, Budget
from service.caches.tenants import Tenant
from service.errors import ExecutionLost
from service.runtimes.base import SampleKey

# Chunks that one call of `take` visits at most: one or two milliseconds.
_MAX_VISITED = 2048
# The limit of a kept execution. The last bytes that were read are kept whatever else is held.
MAX_KEPT_BYTES = 16 << 20
LAST_READ_BYTES = 1 << 20
# The overhead of a chunk in memory, estimated.
_CHUNK_BYTES = 200
# The target size of a message, and while the budget of unread chunks is exceeded: what is sent counts there,
# too, until its reader asks for more.
_MESSAGE_BYTES, _LEAST_MESSAGE_BYTES = 1 << 18, 1 << 14
_Sized: TypeAlias = tuple[runner_pb2.SampleChunk, int]


class ReplayBudget:
    """Counts the bytes of chunks that buffers keep although they were read. Over the limit, they evict.

    Each tenant has an equal share, however many buffers it has.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        # The buffers that keep any chunks.
        self._buffers: dict[ReplayBuffer, None] = {}

    def count(self, buffer: ReplayBuffer, size_bytes: int) -> None:
        """A buffer keeps more bytes; or fewer, if negative. Over the limit, the largest evict."""
        self.used_bytes += size_bytes
        if not buffer.read_bytes:
            self._buffers.pop(buffer, None)
            return
        self._buffers[buffer] = None
        if size_bytes > 0 and self.used_bytes > self.max_bytes:
            by_tenant = defaultdict[Tenant | None, list[ReplayBuffer]](list)
            for each in self._buffers:
                by_tenant[each.tenant].append(each)
            # Down to half of the limit, so that this is rare.
            share_bytes = self.max_bytes // (2 * len(by_tenant))
            for buffers in by_tenant.values():
                for each in buffers:
                    each.evict_to(share_bytes // len(buffers))


class ReplayBuffer:
    """Owner of an execution's chunks. The budgets are shared by several buffers."""

    def __init__(
        self, unread: Budget, read: ReplayBudget, *, keeps: bool, tenant: Tenant | None = None
    ) -> None:
        """`keeps`: chunks stay after they were read, for a reader that resumes.

        `unread`: the share of the tenant.
        """
        self._keeps = keeps
        self.tenant = tenant
        self.unread_bytes = 0
        # What the message takes that is being sent.
        self._sent_bytes = 0
        self._unread: deque[_Sized] = deque()
        self._unread_budget = unread
        # Older than what is unread.
        self._read: deque[_Sized] = deque()
        self.read_bytes = 0
        self._read_budget = read
        # Per sample: the end position of the chunks dropped, and the position that the reader already has.
        self._dropped: dict[SampleKey, int] = {}
        self._progress: Mapping[SampleKey, int] = {}
        self._is_closed = False

    def add(self, chunks: Iterable[runner_pb2.SampleChunk]) -> None:
        added_bytes = 0
        for chunk in chunks:
            size_bytes = chunk.ByteSize() + _CHUNK_BYTES
            self._unread.append((chunk, size_bytes))
            added_bytes += size_bytes
        self._count_unread(added_bytes)
        self.evict_to(self._most_read_bytes)

    @property
    def has_unread(self) -> bool:
        return bool(self._unread)

    def take(self) -> list[runner_pb2.SampleChunk]:
        """The chunks of the next message, without those that the reader has. May be empty before the end.

        They count as unread, as often as they are in memory then, until the next call or `sent`.
        """
        self.sent()
        chunks: list[runner_pb2.SampleChunk] = []
        message_bytes = _LEAST_MESSAGE_BYTES if self._unread_budget.is_exceeded else _MESSAGE_BYTES
        left_bytes, taken_bytes = message_bytes, 0
        for _ in range(min(len(self._unread), _MAX_VISITED)):
            if left_bytes <= 0:
                break
            chunk, size_bytes = taken = self._unread.popleft()
            taken_bytes += size_bytes
            if self._keeps and not self._is_closed:
                self._read.append(taken)
            if not self._progress or not self._is_known(chunk):
                chunks.append(chunk)
                left_bytes -= size_bytes
        self._count_unread(-taken_bytes)
        if not self._is_closed:
            self._sent_bytes = COPIES * (message_bytes - left_bytes)
            self._unread_budget.adjust(self._sent_bytes)
        if self._read and taken_bytes:
            self.read_bytes += taken_bytes
            self._read_budget.count(self, taken_bytes)
            self.evict_to(self._most_read_bytes)
        return chunks

    def sent(self) -> None:
        """The message that was taken last has been sent, or its reader has left."""
        self._unread_budget.adjust(-self._sent_bytes)
        self._sent_bytes = 0

    def _is_known(self, chunk: runner_pb2.SampleChunk) -> bool:
        position = self._progress.get((chunk.item_id, chunk.sample), 0)
        # A reader that claims more than there is gets the last chunk again.
        is_beyond_end = bool(chunk.finish_reason) and position > end_of(chunk)
        return chunk.position < position and not is_beyond_end

    def read_again(self, progress: Mapping[SampleKey, int]) -> None:
        """Makes all chunks unread, for a new reader that already has `progress` of the samples.

        Raises ExecutionLost if a chunk that it lacks was dropped.
        """
        if any(progress.get(key, 0) < position for key, position in self._dropped.items()):
            raise ExecutionLost
        self._progress = progress
        read, size_bytes = self._read, self.read_bytes
        self._read, self.read_bytes = deque(), 0
        self._read_budget.count(self, -size_bytes)
        self._unread.extendleft(reversed(read))
        self._count_unread(size_bytes)

    @property
    def _most_read_bytes(self) -> int:
        return max(LAST_READ_BYTES, MAX_KEPT_BYTES - self.unread_bytes)

    def evict_to(self, size_bytes: int) -> None:
        """Drops the oldest chunks that were read, until at most `size_bytes` of them are left."""
        before_bytes = self.read_bytes
        while self.read_bytes > size_bytes:
            chunk, chunk_bytes = self._read.popleft()
            self._dropped[chunk.item_id, chunk.sample] = end_of(chunk)
            self.read_bytes -= chunk_bytes
        if self.read_bytes < before_bytes:
            self._read_budget.count(self, self.read_bytes - before_bytes)

    def close(self) -> None:
        """Gives back the budgets. Unread chunks can still be taken."""
        self.evict_to(0)
        self.sent()
        self._unread_budget.adjust(-self.unread_bytes)
        self._is_closed = True

    def _count_unread(self, size_bytes: int) -> None:
        self.unread_bytes += size_bytes
        if not self._is_closed:
            self._unread_budget.adjust(size_bytes)


def end_of(chunk: runner_pb2.SampleChunk) -> int:
    """The position after a chunk in its sample."""
    return chunk.position + max(1, len(chunk.token_ids))

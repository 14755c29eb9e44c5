"""Moves a cache to another worker: its KV is copied, or replayed where that is expected to take less time.

Nothing else runs on the cache meanwhile. A copy goes in chunks of whole pages, a few at a time: the source
exports one, and the target imports it. The source keeps the KV until the target has confirmed all of it. If
the copy fails, the target keeps what it has confirmed, and the rest is replayed there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from service.caches.answers import CommandFailed, Event, KvExported
from service.caches.effects import ExportKv, ImportKv, ReleaseSequences
from service.caches.entries import Change, Copy, Operation, WorkerView
from service.caches.kind import BaseKind, Parts
from service.caches.requests import Move, Moved, Result
from service.caches.states import COPYING
from service.errors import NoWorker, QuireError, SequenceQuarantined, SequenceTooLong

# About the size of a chunk, which is at least a page; how many chunks of a copy are under way; and how many
# copies. So between two steps a worker reads or writes some 8 MB, which takes it a few milliseconds.
_CHUNK_BYTES = 1 << 20
_CHUNKS_AT_ONCE = 4
_MOST_COPIES = 2
# Larger pages would exceed the limits of messages.
_MOST_PAGE_BYTES = 8 << 20
# A copy of which nothing is heard for so long has failed.
_STALL_S = 5.0
# Until they are measured: the speed of copies, and how long a token takes to replay.
_FIRST_BYTES_PER_S = 64e6
_FIRST_TOKEN_S = 1e-4
# The weight of the last copy in the measured speed.
_NEWS = 0.3


def copy_pays(size_bytes: int, bytes_per_s: float, replay_s: float) -> bool:
    """Whether to copy so many bytes is expected to take less time than to replay."""
    return size_bytes / bytes_per_s < replay_s


class Moves(BaseKind[Move]):
    """Owns the running copies."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._context = parts.context
        # By op id: the copy, and the tokens of the chunk.
        self.sent: dict[int, tuple[Copy, int, int]] = {}
        self.under_way: dict[Copy, None] = {}
        self.chunk_bytes = _CHUNK_BYTES
        self._bytes_per_s = _FIRST_BYTES_PER_S

    def _begin(self, operation: Operation, request: Move) -> Change | None:
        entry, now_s = operation.entry, self._context.now_s
        target = self._parts.workers.named(request.worker_id)
        if target is None or target.draining or target.weights != entry.state.weights:
            raise NoWorker
        if entry.quarantined:
            raise SequenceQuarantined
        if entry.length > target.capacity_tokens:
            raise SequenceTooLong(entry.length, target.capacity_tokens)
        copy = operation.copy = Copy(operation, entry.worker, target, entry.kv_len, now_s, now_s)
        if self._is_to_be_copied(copy):
            operation.state = COPYING
            self.under_way[copy] = None
            self._export(copy)
            return None
        if copy.source is not target:
            self._place(copy)
        return self._moved(copy) if self._compute_rest(operation) else None

    def computed(self, operations: Sequence[Operation]) -> list[Change]:
        return [self._moved(operation.copy) for operation in operations if operation.copy is not None]

    def stopped(self, operation: Operation) -> None:
        copy = operation.copy
        if copy is not None and copy in self.under_way:
            self._forget(copy)
            self._release(copy)

    # What comes of a copy.

    def answered(self, events: Iterable[Event]) -> Iterator[Operation]:
        """Workers answered. Yields the moves for which nothing more is to be computed.

        What concerns no copy, or one that is over, is ignored.
        """
        for op_id, answer in events:
            found = self.sent.pop(op_id, None)
            if found is not None and self._is_over(*found, answer):
                yield found[0].operation

    def _is_over(self, copy: Copy, first: int, end: int, answer: object) -> bool:
        """Goes on after the tokens from `first` to `end` were exported or imported, or could not be."""
        state, copy.heard_s = copy.operation.entry.state, self._context.now_s
        if isinstance(answer, CommandFailed):
            return self._ended(copy)
        if isinstance(answer, KvExported):
            copy.copied_bytes += answer.size_bytes
            tokens, number = state.tokens.between(first, end), self._context.number()
            self.sent[number] = copy, first, end
            command = ImportKv(number, state.number, tokens, state.salt, answer.pages)
            self._context.send(copy.target, command)
            return False
        copy.imported = end
        if end < copy.end:
            self._export(copy)
            return False
        took_s = self._context.now_s - copy.began_s
        if copy.copied_bytes >= self.chunk_bytes and took_s > 0:
            self._bytes_per_s += _NEWS * (copy.copied_bytes / took_s - self._bytes_per_s)
        return self._ended(copy)

    def workers_lost(self, workers: Collection[WorkerView]) -> Iterator[Operation]:
        """Ends the copies from and to lost workers."""
        for copy in [c for c in self.under_way if c.source in workers or c.target in workers]:
            # The end of another may have stopped it.
            if copy in self.under_way and self._ended(copy):
                yield copy.operation

    def tick(self) -> Iterator[Operation]:
        """Ends the copies that are stuck."""
        for copy in [c for c in self.under_way if self._context.now_s - c.heard_s >= _STALL_S]:
            if copy in self.under_way and self._ended(copy):
                yield copy.operation

    def _is_to_be_copied(self, copy: Copy) -> bool:
        source, target = copy.source, copy.target
        if source is None or source is target or not copy.end or len(self.under_way) >= _MOST_COPIES:
            return False
        pages = source.page_tokens, source.page_bytes
        if pages != (target.page_tokens, target.page_bytes) or not 0 < source.page_bytes <= _MOST_PAGE_BYTES:
            return False
        size_bytes = source.pages_for(copy.end) * source.page_bytes
        # What the target has not measured yet, the source may have.
        replay_s = target.load.compute_s(copy.end, source.load.token_s or _FIRST_TOKEN_S)
        return copy_pays(size_bytes, self._bytes_per_s, replay_s)

    def _export(self, copy: Copy) -> None:
        """Asks for the next chunks."""
        source, state = copy.source, copy.operation.entry.state
        assert source is not None
        tokens = max(1, self.chunk_bytes // source.page_bytes) * source.page_tokens
        while copy.next < min(copy.end, copy.imported + _CHUNKS_AT_ONCE * tokens):
            first, copy.next = copy.next, min(copy.next + tokens, copy.end)
            number = self._context.number()
            self.sent[number] = copy, first, copy.next
            self._context.send(source, ExportKv(number, state.number, first, copy.next, state.salt))

    def _ended(self, copy: Copy) -> bool:
        """Goes on with what the target has: replays what is missing. Returns whether nothing is."""
        operation = copy.operation
        self._forget(copy)
        if not copy.target.is_ready:
            return self._parts.attempts.failed(operation, NoWorker())
        self._place(copy)
        try:
            return self._compute_rest(operation)
        except QuireError as error:
            return self._parts.attempts.failed(operation, error)

    def _forget(self, copy: Copy) -> None:
        del self.under_way[copy]
        for number in [number for number, (its, _, _) in self.sent.items() if its is copy]:
            del self.sent[number]

    def _release(self, copy: Copy) -> None:
        numbers = (copy.operation.entry.number,)
        self._context.send(copy.target, ReleaseSequences(self._context.number(), numbers))

    def _place(self, copy: Copy) -> None:
        """The cache has the target now, and the source nothing of it."""
        entry, kv = copy.operation.entry, self._parts.kv
        kv.drop(entry)
        kv.assign(entry, copy.target, copy.imported)
        if copy.next:
            # More may have been imported than was confirmed.
            kv.sent(entry)
        self._parts.workers.affinity.record(entry.state.tokens.copy(), copy.target, entry.state.salt)

    def _compute_rest(self, operation: Operation) -> bool:
        state = operation.entry.state
        return self._parts.attempts.begin(operation, state.length, state.prompt_len)

    def _moved(self, copy: Copy) -> Result | QuireError:
        operation, worker = copy.operation, copy.operation.entry.worker
        # It may have been lost since, or had no room.
        if worker is None or worker.worker_id != copy.target.worker_id:
            return NoWorker()
        took_s = self._context.now_s - copy.began_s
        return Moved(copy.imported, operation.replayed_tokens, copy.copied_bytes, took_s)

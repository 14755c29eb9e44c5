"""Which forwards run in the next step, and how many tokens of each.

Two classes. *Short* forwards (decodes, verifies, the end of a prefill) go first, because a caller waits for
every one of their tokens; *long* forwards (prefills) are cut into chunks that fill what is left of the step.
In each class callers take turns by what their forwards cost, so that it does not matter to the others how
much one of them has queued; see `forward_queue.Lane`. Who is alone may fill a step with short forwards;
beside others he gets a share that does not make it much longer for them; see `step_shares`. Neither class can
starve the other:

- While a long forward waits, short ones may use only three quarters of the step: a quarter of the tokens
  and rows, and one item, are held back for the first long one, as far as it can use them. A quarter
  bounds what a prefill costs running decodes, and still finishes a prefill under permanent overload.
- A step too small to be divided (a quarter of it is nothing) is taken in turns: a long forward that
  got nothing goes first in the next step.

Forwards of one sequence run one after the other, in order of arrival.

This module does not know about pages, tensors or clocks, and never changes a sequence or what runs; `begin`
and the engine do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workers.forward_queue import SHORT_TOKENS, ForwardQueue, Lane, QueuedForward
from workers.operations import Forward, Kind
from workers.prefill_share import PrefillShare
from workers.running import Behind, Chunk, RunningForward
from workers.step_shares import StepShares

# Starts a forward: what it has become, or what it waits for first, or None if it could not begin, which is
# answered already.
Begin = Callable[[Forward], RunningForward | Behind | None]

# One n-th of a step is held back for the first long forward.
LONG_SHARE = 4

# So many forwards that wait for others may be found in a step, in each lane: to see that of one costs as much
# as its prompt is long, and all others wait meanwhile.
_MOST_FOUND_WAITING = 16

# So many steps longer than without priorities somebody may have to wait for those of higher priority.
HEAD_START_STEPS = 64
# A token and a row.
_DECODE_COST = 2


# Their callers wait for every single token.
_DECODES = (Kind.DECODE, Kind.VERIFY)


@dataclass(frozen=True, slots=True)
class Batch:
    """One step, in order of arrival within its classes; and what came too late to be begun.

    Short forwards come first, and among them those of a single token: a GPU has a kernel of its own for them.

    The expired forwards have left the scheduler. Owned by the caller.
    """

    chunks: list[Chunk]
    expired: list[Forward]


@dataclass(slots=True)
class _Budget:
    """What is left of a step, or of a part of it."""

    tokens: int
    items: int
    rows: int  # by their weight

    def take(self, chunk: Chunk, row_weight: int) -> None:
        self.tokens -= chunk.count
        self.items -= 1
        self.rows -= chunk.rows * row_weight

    def add(self, other: _Budget) -> None:
        self.tokens += other.tokens
        self.items += other.items
        self.rows += other.rows


class Scheduler:
    """Holds forwards from `add` until they are done, failed, aborted or expired.

    One cycle: `next_batch`, run it, then `advance` or `remove` for each chunk. A chunk that is neither is
    offered again. Not thread-safe and not reentrant: `begin` must not call it. A step costs
    O(callers + batch * log(held)) and, for each forward that enters or leaves, a memmove of a lane (8 bytes
    each); and a glance at each short forward of callers who have had their share of it.
    """

    def __init__(
        self,
        max_batch_tokens: int,
        max_batch_items: int,
        max_rows: int,
        page_size: int = 16,
        max_mixed_prefill_tokens: int | None = None,
    ) -> None:
        """Set the bounds of a step.

        `max_mixed_prefill_tokens` bounds the tokens of long forwards in a step that also decodes, or follows
        one that did, and so what a prefill adds to the time between two tokens of the others. None: learnt,
        for the sake of other callers only; see `prefill_share`.
        """
        for name, value in (
            ("max_batch_tokens", max_batch_tokens),
            ("max_batch_items", max_batch_items),
            ("max_rows", max_rows),
            ("page_size", page_size),
            ("max_mixed_prefill_tokens", max_mixed_prefill_tokens or max_batch_tokens),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self.max_batch_tokens = max_batch_tokens
        self.max_batch_items = max_batch_items
        self.max_rows = max_rows
        self.page_size = page_size
        # Not more than what is held back: so the rows of any forward fit into a step, one by one.
        self._most_weight = max(1, max_rows // LONG_SHARE)
        self._queue = ForwardQueue(
            HEAD_START_STEPS * _DECODE_COST * max_batch_items, HEAD_START_STEPS * max_batch_tokens
        )
        self._shares = StepShares()
        self._prefill_share = PrefillShare(max_mixed_prefill_tokens, max_batch_tokens)
        self._steps = 0
        self._long_goes_first = False

    def __len__(self) -> int:
        """Return how many forwards are held, begun or not."""
        return len(self._queue)

    @property
    def has_long(self) -> bool:
        """Whether a long forward (a prefill) has something to run."""
        return bool(self._queue.long.line)

    @property
    def protects_decodes(self) -> bool:
        """Whether long forwards are bounded for the sake of those who decode."""
        return self._prefill_share.protects(self._queue.long.present)

    @property
    def in_flight(self) -> int:
        """Forwards begun and not done."""
        return self._queue.begun

    def add(self, op: Forward) -> None:
        """Queue `op`. Raises ValueError for an op_id that is held, or an op without tokens for its rows."""
        if self._queue.get(op.op_id) is not None:
            raise ValueError(f"operation {op.op_id} is queued already")
        if not op.token_ids or not 0 <= op.wanted_rows <= len(op.token_ids):
            raise ValueError(
                f"operation {op.op_id} wants {op.wanted_rows} rows of {len(op.token_ids)} tokens"
            )
        self._queue.add(op, min(op.row_weight, self._most_weight))

    def remove(self, op_id: int) -> QueuedForward | None:
        """Drop a forward that is aborted or failed, and return its entry; None if it is not held (any more).

        Of a chunk of the running step it takes the place of `advance`. The caller rolls back what runs.
        """
        entry = self._queue.get(op_id)
        if entry is not None:
            self._queue.leave(entry)
        return entry

    def clear(self) -> list[QueuedForward]:
        """Drop every forward and return their entries. The caller rolls back what runs."""
        entries = self._queue.entries()
        for entry in entries:
            self._queue.leave(entry)
        return entries

    def next_batch(self, now_ns: int, begin: Begin) -> Batch:
        """Choose the next step. Empty if nothing is held, or forwards failed to begin.

        `begin(op)` is called once for each forward, when there is budget for its first token. It must leave a
        token to compute. If it returns None the forward leaves the scheduler; if what it is behind, it is
        called again when that is computed; if it raises, nothing is lost and the forward is begun again in a
        later step.
        """
        expired = self._queue.expire(now_ns)
        self._steps += 1
        self._shares.next_step(self._queue.short)
        left = _Budget(self.max_batch_tokens, self.max_batch_items, self.max_rows)
        chunks: list[tuple[QueuedForward, Chunk]] = []
        held_back = self._hold_back(left)
        long_had_turn = self._long_goes_first and self._fill(self._queue.long, held_back, begin, chunks)
        self._fill(self._queue.short, left, begin, chunks)
        left.add(held_back)
        # Also in the steps after one that decoded: its callers are about to come back, and would wait for it.
        self._prefill_share.stepped([entry.caller for entry, chunk in chunks if chunk.op.kind in _DECODES])
        if self._queue.long.line:
            spare_tokens = max(0, left.tokens - self._prefill_share.tokens(self._queue.long.present))
            left.tokens -= spare_tokens
            long_had_turn |= self._fill(self._queue.long, left, begin, chunks)
            left.tokens += spare_tokens
        # What was held back and not used after all.
        self._fill(self._queue.short, left, begin, chunks)
        self._long_goes_first = bool(self._queue.long.line) and not long_had_turn

        chunks.sort(key=lambda pair: (pair[0].lane is self._queue.long, pair[1].count > 1, pair[0].arrival))
        return Batch([chunk for _, chunk in chunks], expired)

    def took(self, chunks: Sequence[Chunk], took_ns: int) -> None:
        """Note how long a step took: what callers may have beside others depends on what it costs them."""
        longest = cost = prompt_tokens = 0
        for chunk in chunks:
            longest = max(longest, chunk.count)
            cost += chunk.count + chunk.rows * chunk.op.row_weight
            if chunk.op.kind not in _DECODES:
                prompt_tokens += chunk.count
        if longest <= SHORT_TOKENS:
            self._shares.learn(cost, took_ns)
        self._prefill_share.learn(prompt_tokens, took_ns)

    def advance(self, chunk: Chunk) -> bool:
        """Note that a chunk has run, which `computed` says already; return whether the forward is done.

        A forward that is done leaves. Raises ValueError for a chunk that is not the last that ran of it.
        """
        entry, running = self._queue.get(chunk.op.op_id), chunk.running
        if entry is None or entry.running is not running or running.computed != chunk.start + chunk.count:
            raise ValueError(f"operation {chunk.op.op_id}: tokens from {chunk.start} on were not due")
        if chunk.is_last:
            self._queue.leave(entry)
            return True
        self._queue.reclassify(entry)
        return False

    def _hold_back(self, step: _Budget) -> _Budget:
        """Split off what long forwards are sure of: some of a step, or all of a tiny one in their turn."""
        if not self._queue.long.line:
            return _Budget(0, 0, 0)
        first = self._queue.long.line[0]
        least = int(self._long_goes_first)
        tokens = min(step.tokens // LONG_SHARE, first.remaining)
        before_rows = max(0, first.remaining - first.op.wanted_rows)
        wanted_rows = max(0, tokens - before_rows) * first.row_weight
        part = _Budget(
            tokens=max(least, tokens),
            items=max(least, int(step.items > 1)),
            rows=max(least, min(step.rows // LONG_SHARE, wanted_rows)),
        )
        step.tokens -= part.tokens
        step.items -= part.items
        step.rows -= part.rows
        return part

    def _fill(
        self,
        lane: Lane,
        budget: _Budget,
        begin: Begin,
        chunks: list[tuple[QueuedForward, Chunk]],
    ) -> bool:
        """Put chunks of `lane` into the step until one does not fit; return whether any did.

        Takes from `budget`, adds to `chunks`, moves to the short lane what `begin` made short.

        Those behind one that does not fit wait, even if they would: the lane's order holds, and the cost
        stays that of the batch.
        """
        placed_before = len(chunks)
        i = found_waiting = 0
        while i < len(lane.line):
            entry = lane.line[i]
            if entry.step == self._steps or (lane is self._queue.short and self._shares.is_spent(entry)):
                i += 1
                continue
            if entry.behind is not None and self._waits(entry, entry.behind):
                i += 1
                continue
            if self._fit(entry, budget) == 0:
                break
            running = entry.running or self._begin(entry, begin)
            if running is None:
                # It has left, or it waits.
                i += entry.behind is not None
                found_waiting += entry.behind is not None
                if found_waiting == _MOST_FOUND_WAITING:
                    break
                continue
            count = self._fit(entry, budget)
            if count == 0:
                break  # All that is left of it wants rows, and there is none.
            chunk = Chunk(running, running.computed, count)
            entry.step = self._steps
            chunks.append((entry, chunk))
            budget.take(chunk, entry.row_weight)
            if lane is self._queue.short:
                self._shares.spend(entry)
            i += entry.lane is lane
        return len(chunks) > placed_before

    def _begin(self, entry: QueuedForward, begin: Begin) -> RunningForward | None:
        """Begin `entry`, which may change lanes by that. None: it waits, or it failed and has left."""
        running = begin(entry.op)
        if isinstance(running, Behind):
            entry.behind = running
            return None
        entry.lane.turn(entry.tag, entry.cost)  # Also of one that fails to begin.
        if running is None:
            self._queue.leave(entry)
        elif running.computed >= len(running.op.token_ids):
            self._queue.leave(entry)
            raise ValueError(f"operation {entry.op.op_id} was begun with no tokens left to compute")
        else:
            self._queue.mark_begun(entry, running)
        return running

    def _waits(self, entry: QueuedForward, behind: Behind) -> bool:
        """Whether another forward has still to compute what this one can use."""
        first = self._queue.get(behind.op_id)
        if first is None or first.running is None or first.running.computed >= behind.computed:
            entry.behind = None
        return entry.behind is not None

    def _fit(self, entry: QueuedForward, budget: _Budget) -> int:
        """Return how many tokens of `entry` fit into `budget`: 0 if none."""
        if budget.items < 1:
            return 0
        op, remaining = entry.op, entry.remaining
        before_rows = max(0, remaining - op.wanted_rows)
        count = min(remaining, budget.tokens, before_rows + budget.rows // entry.row_weight)
        if count < remaining:
            # End on a page if that leaves anything: the page can be shared from now on, and the
            # next chunk begins with a page of its own.
            start = op.position + len(op.token_ids) - remaining
            aligned = (start + count) // self.page_size * self.page_size - start
            count = aligned if aligned > 0 else count
        return count

    def check_invariants(self) -> None:
        """Assert that what is held is consistent. For tests; O(held)."""
        self._queue.check_invariants()

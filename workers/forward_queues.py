"""The queued forwards, and which of them fill a step with how many tokens.

    sequence 7   [ op 3 | op 9 ]         short  [ op 3, op 4 ]   at most SHORT_TOKENS to go
    sequence 8   [ op 4 ]                long   [ op 5 ]         more tokens to go
    sequence 9   [ op 5 | op 6 ]

Forwards of one sequence run one after the other, in order of arrival. The first of each sequence is also in
the queue of its service class. *Short* forwards (decodes, verifies, the end of a prefill) go first, because a
caller waits for each of their tokens. *Long* forwards (prefills) are cut into chunks that fill the rest of
the step. In each class, callers take turns by the cost of their forwards: start-time fair queueing (Goyal,
Vin and Cheng, 1996; ADRs 8 and 10). If others want it, too, a caller gets only a share of a step
(`caller_limits`). Neither class can starve the other:

- While a long forward waits, a quarter of the step (tokens and rows, and one item) is reserved for the first
  one, as far as it can use that. So prefills finish under permanent overload, and decodes continue.
- If a step is too small to be divided (a quarter of it is zero), the classes alternate: a long forward that
  got nothing goes first in the next step.

Most plain decodes are never queued: see `scheduler`. No pages, tensors or clocks here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from workers.caller_limits import CallerLimits
from workers.decodes import DECODE_COST, NEVER
from workers.operations import Chunk, Forward, Kind
from workers.service_class import ServiceClass

# Begins a forward and returns whether it has begun. If not, it either waits (`waits_for` is set), or it has
# failed and is answered already.
Begin = Callable[[Forward], bool]

# A forward with at most this many remaining tokens is short.
SHORT_TOKENS = 16
# The fraction 1 / LONG_SHARE of a step is reserved for the first long forward.
LONG_SHARE = 4
# A step stops looking for forwards of a class after this many were found to wait for others. Each such check
# takes time proportional to the prompt's length, and delays the step.
_MAX_WAITING_FOUND = 16
# The head start of a priority, in full steps of work.
HEAD_START_STEPS = 64
# The kinds whose callers wait for each token.
DECODES = (Kind.DECODE, Kind.VERIFY)

# The order of chunks in a step. Chunks with the same adapter follow each other.
_in_order = attrgetter("forward.is_long", "has_many", "forward.lora_slot", "forward.arrival")


def cost_of(forward: Forward, tokens: int) -> int:
    """The cost of the last `tokens` tokens of a forward: these tokens, and their rows by weight."""
    return tokens + min(forward.wanted_rows, tokens) * forward.row_weight


@dataclass(slots=True)
class Capacity:
    """The capacity that is left in a step, or in a part of it."""

    tokens: int
    items: int
    rows: int  # by weight


class ForwardQueues:
    """Holds forwards from `add` until they are done, failed, aborted or expired.

    Choosing a step takes O(callers + batch * log(held)), plus O(1) for each short forward of callers that
    have used up their share.

    Attributes:
        forwards: By op_id, in order of arrival.
        short: The service class of short forwards.
        long: The service class of long forwards.
    """

    def __init__(self, step: Capacity, page_size: int, limits: CallerLimits) -> None:
        """`step`: the capacity of an empty step. `limits`: of the scheduler."""
        self._page_size = page_size
        self._limits = limits
        # At most the reserved share, so that any forward gets at least one row into a step.
        self._max_row_budget = max(1, step.rows // LONG_SHARE)
        self.short = ServiceClass(HEAD_START_STEPS * DECODE_COST * step.items)
        self.long = ServiceClass(HEAD_START_STEPS * step.tokens)
        self.forwards: dict[int, Forward] = {}
        self.by_sequence: dict[int, OrderedDict[int, Forward]] = {}
        # No forward that has not begun has an earlier deadline.
        self._earliest_ns = NEVER
        self._steps = 0
        self._long_first = False

    def add(self, forward: Forward) -> None:
        """Put a forward into the queues of its sequence and its class, behind those that arrived before."""
        if not self.forwards:
            # The queues were empty: no long forward has waited.
            self._long_first = False
        self.forwards[forward.op_id] = forward
        tokens = len(forward.token_ids)
        forward.row_budget = min(forward.row_weight, self._max_row_budget)
        forward.is_long = tokens > SHORT_TOKENS
        forward.cost = cost_of(forward, tokens)
        service_class = self.long if forward.is_long else self.short
        service_class.add(forward)
        queue = self.by_sequence.setdefault(forward.sequence, OrderedDict())
        queue[forward.op_id] = forward
        if len(queue) == 1:
            service_class.enqueue(forward)
        if forward.deadline_ns is not None:
            self._earliest_ns = min(self._earliest_ns, forward.deadline_ns)

    def remove(self, op_id: int) -> Forward | None:
        """As `Scheduler.remove`."""
        forward = self.forwards.pop(op_id, None)
        if forward is None:
            return None
        (self.long if forward.is_long else self.short).remove(forward)
        queue = self.by_sequence[forward.sequence]
        del queue[op_id]
        if not queue:
            del self.by_sequence[forward.sequence]
            return forward
        first = next(iter(queue.values()))
        if not first.is_enqueued:
            (self.long if first.is_long else self.short).enqueue(first)
        return forward

    def expire(self, now_ns: int) -> list[Forward]:
        """Drop and return the forwards that have not begun by their deadline, earliest deadline first."""
        if self._earliest_ns >= now_ns:
            return []
        expired, self._earliest_ns = [], NEVER
        for forward in self.forwards.values():
            deadline_ns = forward.deadline_ns
            if deadline_ns is None or forward.has_begun:
                continue
            if deadline_ns < now_ns:
                expired.append((deadline_ns, forward.arrival, forward))
            elif deadline_ns < self._earliest_ns:
                self._earliest_ns = deadline_ns
        # Arrival numbers differ, so forwards themselves are never compared.
        in_order = [forward for *_, forward in sorted(expired)]
        for forward in in_order:
            self.remove(forward.op_id)
        return in_order

    def advance(self, chunk: Chunk) -> bool:
        """Note that a chunk has run and is counted in `computed`. Return whether the forward is done.

        A forward that is done leaves. Raises ValueError for a chunk that is not the latest of its forward.
        """
        forward = chunk.forward
        if self.forwards.get(forward.op_id) is not forward or forward.computed != chunk.start + chunk.count:
            raise ValueError(f"operation {forward.op_id}: tokens from {chunk.start} on were not due")
        if chunk.is_last:
            self.remove(forward.op_id)
            return True
        self._reclassify(forward)
        return False

    def _reclassify(self, forward: Forward) -> None:
        """Move a forward to the other class if its remaining tokens belong there."""
        remaining = forward.remaining
        if forward.is_long != (remaining > SHORT_TOKENS):
            before, after = (self.long, self.short) if forward.is_long else (self.short, self.long)
            before.remove(forward)
            forward.is_long = not forward.is_long
            forward.cost = cost_of(forward, remaining)
            after.transfer_in(forward)

    def fill(
        self, left: Capacity, begin: Begin, shares: dict[int, int], plain: Mapping[int, int] | None
    ) -> list[Chunk]:
        """Choose the chunks of a step; see `Scheduler.next_batch`. Mutates `left` and `shares`.

        Args:
            left: The capacity of the step without its plain decodes.
            shares: For each caller whose short forwards are limited, the cost that it may still use.
            plain: The cost of the step's plain decodes by caller. None: the step is launched behind the
                running one, and its decodes are counted when it runs.
        """
        self._steps += 1
        short, long = self.short, self.long
        chunks: list[Chunk] = []
        reserved = self._reserve_for_long(left)
        long_had_turn = self._long_first and self._fill(long, reserved, begin, {}, chunks)
        self._fill(short, left, begin, shares, chunks)
        left.tokens += reserved.tokens
        left.items += reserved.items
        left.rows += reserved.rows
        if plain is not None:
            # Decodes limit the prompts of the next steps, too: their callers' next requests would wait for
            # these.
            self._limits.record_decodes(_cost_of_decodes(chunks, plain))
        if long.queue:
            spare_tokens = max(0, left.tokens - self._limits.max_prompt_tokens(long.active_callers))
            left.tokens -= spare_tokens
            long_had_turn |= self._fill(long, left, begin, {}, chunks)
            left.tokens += spare_tokens
        # Short forwards can use the rest of the reserved capacity.
        self._fill(short, left, begin, shares, chunks)
        self._long_first = bool(long.queue) and not long_had_turn
        chunks.sort(key=_in_order)
        return chunks

    def _reserve_for_long(self, step: Capacity) -> Capacity:
        """Split off the part reserved for long forwards: a share, or in their turn all of a tiny step."""
        if not self.long.queue:
            return Capacity(0, 0, 0)
        first = self.long.queue[0]
        least = int(self._long_first)
        tokens = min(step.tokens // LONG_SHARE, first.remaining)
        before_rows = max(0, first.remaining - first.wanted_rows)
        wanted_rows = max(0, tokens - before_rows) * first.row_budget
        part = Capacity(
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
        service_class: ServiceClass,
        budget: Capacity,
        begin: Begin,
        shares: dict[int, int],
        chunks: list[Chunk],
    ) -> bool:
        """Put chunks of a class into the step until one does not fit. Return whether any was put.

        Mutates `budget` and `chunks`. Forwards of which `begin` leaves few tokens move to the short class.

        Forwards behind one that does not fit wait, too: this keeps the order, and takes O(batch).
        """
        chunks_before = len(chunks)
        queue, is_long = service_class.queue, service_class is self.long
        i = found_waiting = 0
        while i < len(queue):
            forward = queue[i]
            if (
                forward.step == self._steps
                or shares.get(forward.caller, 1) <= 0
                or (forward.waits_for is not None and _still_waits(forward, forward.waits_for))
            ):
                i += 1
                continue
            count = self._tokens_that_fit(forward, budget)
            if count and not forward.has_begun:
                if not self._begin(forward, service_class, begin):
                    # It waits for another forward, or it has left the queue.
                    i += forward.waits_for is not None
                    found_waiting += forward.waits_for is not None
                    if found_waiting == _MAX_WAITING_FOUND:
                        break
                    continue
                if forward.computed:
                    count = self._tokens_that_fit(forward, budget)
            if count == 0:
                break  # The budget is used up, or has no row left for the forward's next token.
            chunk = Chunk(forward, forward.computed, count)
            forward.step = self._steps
            chunks.append(chunk)
            budget.tokens -= count
            budget.items -= 1
            budget.rows -= chunk.rows * forward.row_budget
            if forward.caller in shares:
                shares[forward.caller] -= forward.cost
            i += forward.is_long == is_long
        return len(chunks) > chunks_before

    def _begin(self, forward: Forward, service_class: ServiceClass, begin: Begin) -> bool:
        """Begin a forward, which may change its class. False: it waits, or it failed and left."""
        if not begin(forward):
            if forward.waits_for is None:
                service_class.dispatch(forward)
                self.remove(forward.op_id)
            return False
        service_class.dispatch(forward)
        if forward.computed:
            if not forward.remaining:
                self.remove(forward.op_id)
                raise ValueError(f"operation {forward.op_id} was begun with no tokens left to compute")
            self._reclassify(forward)  # Reused pages may have made it short.
        return True

    def _tokens_that_fit(self, forward: Forward, budget: Capacity) -> int:
        """Return how many tokens of a forward fit into `budget`."""
        if budget.items < 1:
            return 0
        remaining = len(forward.token_ids) - forward.computed
        before_rows = max(0, remaining - forward.wanted_rows)
        count = min(remaining, budget.tokens, before_rows + budget.rows // forward.row_budget)
        if count < remaining:
            # End at a page boundary if that leaves a token: only full pages can be shared.
            start = forward.position + forward.computed
            aligned = (start + count) // self._page_size * self._page_size - start
            count = aligned if aligned > 0 else count
        return count


def _still_waits(forward: Forward, first: Forward) -> bool:
    """Whether a forward still has to wait for `first`. Clears `waits_for` if not."""
    # `is_enqueued` is False once a forward that has begun has left the scheduler.
    if first.is_enqueued and first.has_begun and first.computed < forward.waits_until:
        return True
    forward.waits_for = None
    return False


def _cost_of_decodes(chunks: Sequence[Chunk], plain: Mapping[int, int]) -> dict[int, int]:
    """The cost of a step's decodes by caller: of those in these chunks, and of plain ones."""
    costs = dict(plain)
    for chunk in chunks:
        if chunk.forward.kind in DECODES:
            costs[chunk.forward.caller] = costs.get(chunk.forward.caller, 0) + chunk.cost
    return costs

"""Which forwards run in the next step, and how many tokens of each.

    sequence 7   [ op 3 | op 9 ]         short  [ op 3, op 4 ]   at most SHORT_TOKENS to go
    sequence 8   [ op 4 ]                long   [ op 5 ]         more tokens to go
    sequence 9   [ op 5 | op 6 ]

Forwards of one sequence run one after the other, in order of arrival. The first of each sequence is also in
the queue of its service class. *Short* forwards (decodes, verifies, the end of a prefill) go first, because a
caller waits for each of their tokens. *Long* forwards (prefills) are cut into chunks that fill the rest of
the step. In each class callers take turns by the cost of their forwards: start-time fair queueing (Goyal, Vin
and Cheng, 1996; ADRs 8 and 10). Beside others a caller gets a share of a step (`caller_limits`). Neither
class can starve the other:

- While a long forward waits, a quarter of the step (tokens and rows, and one item) is reserved for the first
  one, as far as it can use that. So prefills finish under permanent overload, and decodes continue.
- If a step is too small to be divided (a quarter of it is zero), the classes alternate: a long forward that
  got nothing goes first in the next step.

Plain decodes come as columns (`decodes`), and are in no queue unless there is something to choose: a step
that has room for all short forwards, and limits no caller, takes all of them at once (ADRs 31 and 34).

No pages, tensors or clocks here.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from workers.caller_limits import CallerLimits
from workers.decodes import (
    ADAPTER,
    DECODE_COST,
    LORA_SLOT,
    NO_DECODES,
    OP_ID,
    SEQUENCE,
    Decodes,
    Mask,
    WaitingDecodes,
)
from workers.operations import Chunk, Forward, Kind
from workers.service_class import ServiceClass

# Begins a forward and returns whether it has begun. If not, it either waits (`waits_for` is set), or it has
# failed and is answered already.
Begin = Callable[[Forward], bool]
# Begins those of some plain decodes that it can without further ado, and returns which. The others wait in
# the queue, and are begun one by one.
BeginAll = Callable[[Decodes], Mask]


def _begin_all(decodes: Decodes) -> Mask:
    return np.ones(decodes.size, np.bool_)


# A forward with at most so many tokens to go is short.
SHORT_TOKENS = 16
# One n-th of a step is reserved for the first long forward.
LONG_SHARE = 4
# In each step and class, at most so many forwards are found to wait for others. Each such check takes time
# proportional to the prompt's length, and delays the step.
_MAX_WAITING_FOUND = 16
# A head start of a priority is the work of so many full steps.
HEAD_START_STEPS = 64
# Their callers wait for each token.
_DECODES = (Kind.DECODE, Kind.VERIFY)

# Chunks with the same adapter follow each other.
_in_order = attrgetter("forward.is_long", "has_many", "forward.lora_slot", "forward.arrival")


def cost_of(forward: Forward, tokens: int) -> int:
    """The cost of the last `tokens` of a forward: its tokens, and its rows by their weight."""
    return tokens + min(forward.wanted_rows, tokens) * forward.row_weight


@dataclass(slots=True)
class _Budget:
    """The capacity that is left of a step, or of a part of it."""

    tokens: int
    items: int
    rows: int  # by their weight


class Scheduler:
    """Holds forwards from `add` until they are done, failed, aborted or expired.

    One cycle: `next_batch`, run it, then `advance` or `remove` for each chunk. A chunk that is neither is
    offered again. Not thread-safe and not reentrant: `begin` must not call it. Choosing a step takes
    O(callers + batch * log(held)), plus O(1) for each short forward of callers that have used up their share.
    """

    def __init__(
        self,
        max_batch_tokens: int,
        max_batch_items: int,
        max_rows: int,
        page_size: int = 16,
        max_mixed_prefill_tokens: int | None = None,
    ) -> None:
        """Set the limits of a step.

        `max_mixed_prefill_tokens` limits the tokens of long forwards in a step that also decodes, or follows
        one that did, and so how much a prefill adds to the inter-token latency of others. None: learned, and
        applied only if other callers decode; see `caller_limits`.
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
        # At most the reserved share, so that any forward gets at least one row into a step.
        self._max_row_budget = max(1, max_rows // LONG_SHARE)
        self._short = ServiceClass(HEAD_START_STEPS * DECODE_COST * max_batch_items)
        self._long = ServiceClass(HEAD_START_STEPS * max_batch_tokens)
        # By op_id, in order of arrival.
        self._forwards: dict[int, Forward] = {}
        self._by_sequence: dict[int, OrderedDict[int, Forward]] = {}
        # Plain decodes that are in no queue.
        self._waiting = WaitingDecodes()
        # Those of the running step, which `next_batch` has begun; the cost of these by caller.
        self.running = NO_DECODES
        self._running_costs: dict[int, int] = {}
        # A heap of (deadline_ns, arrival, op_id). Obsolete entries are removed lazily, so it must not refer
        # to the forwards themselves, whose answers may be large.
        self._deadlines: list[tuple[int, int, int]] = []
        self._arrivals = 0
        self._limits = CallerLimits(max_mixed_prefill_tokens, max_batch_tokens)
        # The cost that is left in this step to each caller whose short forwards are limited.
        self._shares: dict[int, int] = {}
        self._steps = 0
        self._long_first = False

    def __len__(self) -> int:
        """The number of forwards, begun or not."""
        return len(self._forwards) + len(self._waiting.op_ids) + self.running.size

    def adapters(self) -> set[int]:
        """The adapters of all forwards, and 0 if some have none."""
        queued = {forward.adapter for forward in self._forwards.values()}
        return queued | self._waiting.adapters() | set(self.running.column(ADAPTER))

    @property
    def may_delay_step(self) -> bool:
        """Whether a step may be delayed for requests that are about to arrive: one that is not full yet.

        A prefill does not wait for decodes, unless it is limited because of them.
        """
        return len(self) < self.max_batch_items and (
            not self._long.queue or self._limits.limits_prompts(self._long.active_callers)
        )

    def add(self, forward: Forward) -> None:
        """Queue a forward behind the others of its sequence.

        Raises ValueError for a duplicate op_id, no tokens, or more rows than tokens.
        """
        if forward.op_id in self._forwards or forward.op_id in self._waiting.op_ids:
            raise ValueError(f"operation {forward.op_id} is queued already")
        rows, tokens = forward.wanted_rows, len(forward.token_ids)
        if not tokens or not 0 <= rows <= tokens:
            raise ValueError(f"operation {forward.op_id} wants {rows} rows of {tokens} tokens")
        if forward.sequence in self._waiting.sequences:
            for earlier in self._waiting.remove(SEQUENCE, [forward.sequence]).forwards():
                self._queue(earlier)
        forward.arrival = self._arrivals
        self._arrivals += 1
        forward.flow = forward.caller or -1 - forward.arrival
        self._queue(forward)

    def add_decodes(self, decodes: Decodes) -> bool:
        """As `add`, for plain decodes: they are in no queue until there is something to choose.

        False, without an effect: one of them has to wait for another of its sequence, or its op_id is queued.
        """
        is_new = self._forwards.keys().isdisjoint(decodes.column(OP_ID)) and (
            self._by_sequence.keys().isdisjoint(decodes.sequences)
        )
        if not (is_new and self._waiting.add(decodes, self._arrivals)):
            return False
        self._arrivals += decodes.size
        return True

    def _queue(self, forward: Forward) -> None:
        """Put a forward into the queues of its sequence and its class."""
        self._forwards[forward.op_id] = forward
        tokens = len(forward.token_ids)
        forward.row_budget = min(forward.row_weight, self._max_row_budget)
        forward.is_long = tokens > SHORT_TOKENS
        forward.cost = cost_of(forward, tokens)
        service_class = self._long if forward.is_long else self._short
        service_class.add(forward)
        queue = self._by_sequence.setdefault(forward.sequence, OrderedDict())
        queue[forward.op_id] = forward
        if len(queue) == 1:
            service_class.enqueue(forward)
        if forward.deadline_ns is not None:
            heapq.heappush(self._deadlines, (forward.deadline_ns, forward.arrival, forward.op_id))
            if len(self._deadlines) > 2 * len(self._forwards) + 64:
                self._deadlines = [entry for entry in self._deadlines if self._if_expirable(entry)]
                heapq.heapify(self._deadlines)

    def remove(self, op_id: int) -> Forward | None:
        """Drop and return a forward that is aborted or failed. None if it is not (or no longer) here.

        For a chunk of the running step this replaces `advance`. The caller rolls back what has begun.
        """
        if op_id in self._waiting.op_ids:
            return self._waiting.remove(OP_ID, [op_id]).forward(0)
        forward = self._forwards.pop(op_id, None)
        if forward is None:
            return None
        (self._long if forward.is_long else self._short).remove(forward)
        queue = self._by_sequence[forward.sequence]
        del queue[op_id]
        if not queue:
            del self._by_sequence[forward.sequence]
            return forward
        first = next(iter(queue.values()))
        if not first.is_enqueued:
            (self._long if first.is_long else self._short).enqueue(first)
        return forward

    def remove_all(self, op_ids: Collection[int]) -> list[Forward]:
        """As `remove`, for several. Returns only those that have begun, which the caller rolls back."""
        if not self._waiting.op_ids.isdisjoint(op_ids):
            self._waiting.remove(OP_ID, op_ids)
        removed = [self.remove(op_id) for op_id in op_ids if op_id in self._forwards]
        return [forward for forward in removed if forward is not None and forward.has_begun]

    def clear(self) -> list[Forward]:
        """Drop every forward. Returns those that have begun, which the caller rolls back."""
        return self.remove_all([*self._waiting.op_ids, *self._forwards])

    def expire(self, now_ns: int) -> list[Forward]:
        """Drop and return the forwards that have not begun by their deadline, earliest deadline first."""
        expired = self._waiting.expire(now_ns)
        while self._deadlines and self._deadlines[0][0] < now_ns:
            waiting = self._if_expirable(heapq.heappop(self._deadlines))
            if waiting is not None:
                self.remove(waiting.op_id)
                expired.append(waiting)
        return expired

    def _if_expirable(self, deadline: tuple[int, int, int]) -> Forward | None:
        """The forward of a deadline, if it still waits to begin."""
        _, arrival, op_id = deadline
        forward = self._forwards.get(op_id)
        is_waiting = forward is not None and forward.arrival == arrival and not forward.has_begun
        return forward if is_waiting else None

    def next_batch(self, begin: Begin, begin_all: BeginAll = _begin_all) -> list[Chunk]:
        """Choose the next step: these chunks, and `running`. Both are empty if none has begun.

        Short forwards come first, single tokens, for which a GPU has its own kernel. Otherwise in order of
        arrival. The caller ends a step with `running` by `finish_decodes`.

        `begin(forward)` is called once for each forward, when there is budget for its first token. It must
        leave a token to compute. A forward that fails to begin leaves the scheduler. For one that waits it
        is called again later. If it raises, the forward stays and is begun again in a later step.
        """
        self._steps += 1
        self.running, self._running_costs = self._take_waiting(begin_all, 0)
        if self._running_costs:
            self._short.dispatch_all(self._running_costs)
        if not self._forwards:
            self._limits.record_decodes(self._running_costs)
            self._long_first = False
            return []
        return self._next_chunks(begin, self.running.size, self._limits.record_decodes)

    def next_chunks(self, begin: Begin, plain: int) -> list[Chunk]:
        """As `next_batch`, for a step with so many plain decodes that is launched behind the running one."""
        self._steps += 1
        self._shares = {}
        return self._next_chunks(begin, plain + len(self._waiting.op_ids), lambda _: None)

    def _next_chunks(
        self, begin: Begin, plain: int, record_decodes: Callable[[Mapping[int, int]], None]
    ) -> list[Chunk]:
        short, long = self._short, self._long
        left = _Budget(self.max_batch_tokens - plain, self.max_batch_items - plain, self.max_rows - plain)
        chunks: list[Chunk] = []
        reserved = self._reserve_for_long(left)
        long_had_turn = self._long_first and self._fill(long, reserved, begin, chunks)
        self._fill(short, left, begin, chunks)
        left.tokens += reserved.tokens
        left.items += reserved.items
        left.rows += reserved.rows
        # The limit also holds for the steps after decodes: their callers' next requests would wait for them.
        record_decodes(_cost_of_decodes(chunks, self._running_costs))
        if long.queue:
            spare_tokens = max(0, left.tokens - self._limits.max_prompt_tokens(long.active_callers))
            left.tokens -= spare_tokens
            long_had_turn |= self._fill(long, left, begin, chunks)
            left.tokens += spare_tokens
        # With the rest of the reserved budget.
        self._fill(short, left, begin, chunks)
        self._long_first = bool(long.queue) and not long_had_turn
        chunks.sort(key=_in_order)
        return chunks

    def _take_waiting(self, begin_all: BeginAll, beside: int) -> tuple[Decodes, dict[int, int]]:
        """Begin all plain decodes that are in no queue, in a step with so many others, and set its shares.

        Returns them and their costs by caller. Queues those that do not begin so: all, if there is no room
        for all short forwards, or a caller is limited. A decode that is begun here goes before none that
        waits.
        """
        if not self._waiting.op_ids:
            self._shares = self._limits.shares(self._short.wanted())
            return NO_DECODES, {}
        decodes = self._waiting.take()
        costs, wanted = decodes.costs(), self._short.wanted()
        for caller, cost in costs.items() if wanted else ():
            wanted[caller] = wanted.get(caller, 0) + cost
        self._shares = self._limits.shares(wanted or costs)
        has_room = not self._shares and self._has_room(beside + decodes.size)
        begun = begin_all(decodes) if has_room else np.zeros(decodes.size, np.bool_)
        if not all(begun.tolist()):
            for forward in decodes.take(~begun).forwards():
                self._queue(forward)
            decodes = decodes.take(begun)
            costs = decodes.costs()
        if any(decodes.columns[ADAPTER].tolist()):
            # As chunks: those with the same adapter follow each other.
            decodes = decodes.in_order(decodes.columns[LORA_SLOT].argsort(kind="stable"))
        return decodes, costs

    def _has_room(self, plain: int) -> bool:
        """Whether so many plain decodes fit, beside all short forwards and the reserved part."""
        short, share = self._short, LONG_SHARE if self._long.queue else 0
        tokens, rows = self.max_batch_tokens, self.max_rows
        if share:
            tokens, rows = tokens - tokens // share, rows - rows // share
        items = self.max_batch_items - bool(share)
        return plain + len(short.queue) <= items and plain + short.cost <= min(tokens, rows)

    @property
    def has_others(self) -> bool:
        """Whether there are forwards that are not in `running`."""
        return bool(self._forwards or self._waiting.op_ids)

    @property
    def has_queued(self) -> bool:
        """Whether there are others than plain decodes that may join a step which is launched."""
        return bool(self._forwards) or not self._waiting.may_be_launched

    def may_run_on(self, plain: int) -> bool:
        """Whether a step of so many plain decodes may be followed by the next one, whatever else waits.

        That is so if only plain decodes and long forwards wait, and have room beside. Results of short ones
        are read in the step that computes them, so that is not launched.
        """
        has_room = self._has_room(plain + len(self._waiting.op_ids))
        return has_room and self._waiting.may_be_launched and not self._short.queue

    def take_joining(self, begin_all: BeginAll, plain: int) -> Decodes:
        """Begin the plain decodes that wait, to be run with so many of `run_next`.

        Those that do not begin are queued. If the others are not run, `add_decodes` takes them back.
        """
        return self._take_waiting(begin_all, plain)[0]

    def run_next(self, decodes: Decodes) -> None:
        """Note that a step of plain decodes was launched beside `next_batch`: it is the running one now."""
        self.running, self._running_costs = decodes, decodes.costs()
        self._limits.record_decodes(self._running_costs)
        self._short.dispatch_all(self._running_costs)

    def finish_decodes(self) -> None:
        """Note that the plain decodes of the step have run."""
        self.running = NO_DECODES

    def queue_begun(self, forwards: Sequence[Forward]) -> None:
        """Queue those of `running`, which have begun: the step has failed, and they run one by one.

        They count twice in their callers' turns.
        """
        self.running = NO_DECODES
        for forward in forwards:
            self.add(forward)
            self._short.dispatch(forward)

    def advance(self, chunk: Chunk) -> bool:
        """Note that a chunk has run, and is counted in `computed`. Return whether the forward is done.

        A forward that is done leaves. Raises ValueError for a chunk that is not the last one that has run.
        """
        forward = chunk.forward
        if self._forwards.get(forward.op_id) is not forward or forward.computed != chunk.start + chunk.count:
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
            before, after = (self._long, self._short) if forward.is_long else (self._short, self._long)
            before.remove(forward)
            forward.is_long = not forward.is_long
            forward.cost = cost_of(forward, remaining)
            after.transfer_in(forward)

    def record_step(self, chunks: Sequence[Chunk], took_ns: int) -> None:
        """Note how long a step took. The limits of callers are learned from that."""
        decodes_cost, prompts_cost, prompt_tokens = sum(self._running_costs.values()), 0, 0
        has_long_prompt = False
        for chunk in chunks:
            if chunk.forward.kind in _DECODES:
                decodes_cost += chunk.cost
            else:
                prompts_cost += chunk.cost
                prompt_tokens += chunk.count
                has_long_prompt |= len(chunk.forward.token_ids) > SHORT_TOKENS
        if not has_long_prompt:
            self._limits.times.add(decodes_cost + prompts_cost, took_ns)
        if prompt_tokens:
            self._limits.times.add_prompts(prompt_tokens, decodes_cost, took_ns)

    def _reserve_for_long(self, step: _Budget) -> _Budget:
        """Split off the part reserved for long forwards: a share, or in their turn all of a tiny step."""
        if not self._long.queue:
            return _Budget(0, 0, 0)
        first = self._long.queue[0]
        least = int(self._long_first)
        tokens = min(step.tokens // LONG_SHARE, first.remaining)
        before_rows = max(0, first.remaining - first.wanted_rows)
        wanted_rows = max(0, tokens - before_rows) * first.row_budget
        part = _Budget(
            tokens=max(least, tokens),
            items=max(least, int(step.items > 1)),
            rows=max(least, min(step.rows // LONG_SHARE, wanted_rows)),
        )
        step.tokens -= part.tokens
        step.items -= part.items
        step.rows -= part.rows
        return part

    def _fill(self, service_class: ServiceClass, budget: _Budget, begin: Begin, chunks: list[Chunk]) -> bool:
        """Put chunks of a class into the step until one does not fit. Return whether any did.

        Takes from `budget`, adds to `chunks`, and moves forwards that `begin` made short to the short class.

        Forwards behind one that does not fit wait too: this keeps the order, and the time O(batch).
        """
        chunks_before = len(chunks)
        queue, is_long = service_class.queue, service_class is self._long
        shares = {} if is_long else self._shares
        i = found_waiting = 0
        while i < len(queue):
            forward = queue[i]
            if (
                forward.step == self._steps
                or shares.get(forward.flow, 1) <= 0
                or (forward.waits_for is not None and _still_waits(forward, forward.waits_for))
            ):
                i += 1
                continue
            count = self._tokens_that_fit(forward, budget)
            if count and not forward.has_begun:
                if not self._begin(forward, service_class, begin):
                    # It waits, or it has left the queue.
                    i += forward.waits_for is not None
                    found_waiting += forward.waits_for is not None
                    if found_waiting == _MAX_WAITING_FOUND:
                        break
                    continue
                if forward.computed:
                    count = self._tokens_that_fit(forward, budget)
            if count == 0:
                break  # There is no budget left, or none for rows and the forward's next token needs one.
            chunk = Chunk(forward, forward.computed, count)
            forward.step = self._steps
            chunks.append(chunk)
            budget.tokens -= count
            budget.items -= 1
            budget.rows -= chunk.rows * forward.row_budget
            if forward.flow in shares:
                shares[forward.flow] -= forward.cost
            i += forward.is_long == is_long
        return len(chunks) > chunks_before

    def _begin(self, forward: Forward, service_class: ServiceClass, begin: Begin) -> bool:
        """Begin a forward, which may change its class. False: it waits, or it has failed and left."""
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

    def _tokens_that_fit(self, forward: Forward, budget: _Budget) -> int:
        """Return how many tokens of a forward fit into `budget`."""
        if budget.items < 1:
            return 0
        remaining = len(forward.token_ids) - forward.computed
        before_rows = max(0, remaining - forward.wanted_rows)
        count = min(remaining, budget.tokens, before_rows + budget.rows // forward.row_budget)
        if count < remaining:
            # End at a page boundary if any token is left then: only full pages can be shared.
            start = forward.position + forward.computed
            aligned = (start + count) // self.page_size * self.page_size - start
            count = aligned if aligned > 0 else count
        return count


def _still_waits(forward: Forward, first: Forward) -> bool:
    """Whether a forward still has to wait for `first`. Clears `waits_for` if not."""
    # A forward that has begun is enqueued until it leaves the scheduler.
    if first.is_enqueued and first.has_begun and first.computed < forward.waits_until:
        return True
    forward.waits_for = None
    return False


def _cost_of_decodes(chunks: Sequence[Chunk], plain: Mapping[int, int]) -> dict[int, int]:
    """By caller, the cost of its decodes in a step: of these chunks, and of plain ones."""
    costs = dict(plain)
    for chunk in chunks:
        if chunk.forward.kind in _DECODES:
            costs[chunk.forward.flow] = costs.get(chunk.forward.flow, 0) + chunk.cost
    return costs

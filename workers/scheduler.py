"""Chooses what runs in the next step: plain decodes, and chunks of queued forwards.

Plain decodes come as columns (`decodes`). If a step has room for all short forwards and limits no caller, it
takes all plain decodes at once, and they are never queued (ADRs 31 and 34). Everything else is queued
(`forward_queues`): prompts, which are cut into chunks; forwards with several rows; and plain decodes that
have to wait for another forward of their sequence, for their turn, or for pages.

No pages, tensors or clocks here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from workers.caller_limits import CallerLimits
from workers.decodes import NEVER, NO_DECODES, Column, Decodes, Mask
from workers.forward_queues import DECODES, LONG_SHARE, SHORT_TOKENS, Begin, Capacity, ForwardQueues
from workers.operations import Chunk, Forward

# Begins plain decodes, and returns which of them have begun. The others are queued, and begin one by one.
BeginAll = Callable[[Decodes], Mask]


class _WaitingDecodes:
    """Plain decodes that are not queued, because the next step will most likely take all of them.

    At most one for each sequence.
    """

    def __init__(self) -> None:
        self._parts: list[Decodes] = []
        self.sequences: set[int] = set()
        self.op_ids: set[int] = set()
        self._earliest_ns = NEVER

    @property
    def may_be_launched(self) -> bool:
        return all(part.may_be_launched for part in self._parts)

    def adapters(self) -> set[int]:
        """Their adapters, and 0 if some have none."""
        return {adapter for part in self._parts for adapter in part.column(Column.ADAPTER)}

    def add(self, decodes: Decodes, arrivals: int) -> bool:
        """Add decodes, and number them from `arrivals` on.

        False, without an effect, if the op_id or the sequence of one of them is here already.
        """
        op_ids, sequences = set(decodes.column(Column.OP_ID)), set(decodes.sequences)
        is_new = self.op_ids.isdisjoint(op_ids) and self.sequences.isdisjoint(sequences)
        if not is_new or len(sequences) < decodes.size or len(op_ids) < decodes.size:
            return False
        decodes.columns[Column.ARRIVAL] = np.arange(arrivals, arrivals + decodes.size)
        self._parts.append(decodes)
        self._earliest_ns = min(self._earliest_ns, *decodes.column(Column.DEADLINE))
        self.op_ids |= op_ids
        self.sequences |= sequences
        return True

    def take(self) -> Decodes:
        """Remove and return all."""
        decodes = Decodes.joined(self._parts) if self._parts else NO_DECODES
        self._parts, self.sequences, self.op_ids, self._earliest_ns = [], set(), set(), NEVER
        return decodes

    def remove(self, column: int, values: Collection[int]) -> Decodes:
        """Remove and return those with these values in a column."""
        decodes, removed = self.take(), set(values)
        is_removed = np.array([value in removed for value in decodes.column(column)])
        self._keep(decodes.take(~is_removed))
        return decodes.take(is_removed)

    def expire(self, now_ns: int) -> list[Forward]:
        """Remove and return those whose deadline has passed, earliest deadline first."""
        if self._earliest_ns >= now_ns:
            return []
        decodes = self.take()
        late = decodes.columns[Column.DEADLINE] < now_ns
        self._keep(decodes.take(~late))
        return sorted(decodes.take(late).forwards(), key=lambda one: (one.deadline_ns, one.arrival))

    def _keep(self, decodes: Decodes) -> None:
        if decodes.size:
            self._parts, self.sequences = [decodes], set(decodes.sequences)
            self.op_ids = set(decodes.column(Column.OP_ID))
            self._earliest_ns = int(decodes.columns[Column.DEADLINE].min())


class Scheduler:
    """Holds forwards from `add` until they are done, failed, aborted or expired.

    One cycle: `next_batch`, run it, then `advance` or `remove` for each chunk. A chunk that is neither is
    offered again. Not thread-safe and not reentrant: `begin` must not call it.
    """

    def __init__(
        self,
        max_batch_tokens: int,
        max_batch_items: int,
        max_rows: int,
        page_size: int = 16,
    ) -> None:
        """Set the limits of a step. What prompts get beside decodes of others is learned: `caller_limits`."""
        for name, value in (
            ("max_batch_tokens", max_batch_tokens),
            ("max_batch_items", max_batch_items),
            ("max_rows", max_rows),
            ("page_size", page_size),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self.max_batch_tokens = max_batch_tokens
        self.max_batch_items = max_batch_items
        self.max_rows = max_rows
        self._limits = CallerLimits(max_batch_tokens)
        step = Capacity(max_batch_tokens, max_batch_items, max_rows)
        self._queues = ForwardQueues(step, page_size, self._limits)
        # Plain decodes that are not queued.
        self._waiting = _WaitingDecodes()
        # The plain decodes of the running step, which `next_batch` has begun; and their cost by caller.
        self.running = NO_DECODES
        self._running_costs: dict[int, int] = {}
        self._arrivals = 0
        # For each caller whose short forwards are limited, the cost that it may still use in this step.
        self._shares: dict[int, int] = {}

    def __len__(self) -> int:
        """The number of forwards, begun or not."""
        return len(self._queues.forwards) + len(self._waiting.op_ids) + self.running.size

    def adapters(self) -> set[int]:
        """The adapters of all forwards, and 0 if some have none."""
        queued = {forward.adapter for forward in self._queues.forwards.values()}
        return queued | self._waiting.adapters() | set(self.running.column(Column.ADAPTER))

    @property
    def may_delay_step(self) -> bool:
        """Whether the next step may wait for requests that are about to arrive. A full step does not wait.

        Neither does a prefill, unless decodes limit it.
        """
        return len(self) < self.max_batch_items and (
            not self._queues.long.queue or self._limits.limits_prompts(self._queues.long.active_callers)
        )

    def add(self, forward: Forward) -> None:
        """Queue a forward behind the others of its sequence.

        Raises ValueError for a duplicate op_id, no tokens, or more rows than tokens.
        """
        if forward.op_id in self._queues.forwards or forward.op_id in self._waiting.op_ids:
            raise ValueError(f"operation {forward.op_id} is queued already")
        rows, tokens = forward.wanted_rows, len(forward.token_ids)
        if not tokens or not 0 <= rows <= tokens:
            raise ValueError(f"operation {forward.op_id} wants {rows} rows of {tokens} tokens")
        if forward.sequence in self._waiting.sequences:
            for earlier in self._waiting.remove(Column.SEQUENCE, [forward.sequence]).forwards():
                self._queues.add(earlier)
        forward.arrival = self._arrivals
        self._arrivals += 1
        self._queues.add(forward)

    def add_decodes(self, decodes: Decodes) -> bool:
        """As `add`, for plain decodes, which are only queued if a step cannot take all of them.

        False, without an effect, if one has to wait for another forward of its sequence, or its op_id is
        known.
        """
        is_new = self._queues.forwards.keys().isdisjoint(decodes.column(Column.OP_ID)) and (
            self._queues.by_sequence.keys().isdisjoint(decodes.sequences)
        )
        if not (is_new and self._waiting.add(decodes, self._arrivals)):
            return False
        self._arrivals += decodes.size
        return True

    def remove(self, op_id: int) -> Forward | None:
        """Drop and return a forward that is aborted or failed. None if it is not (or no longer) here.

        For a chunk of the running step this replaces `advance`. The caller rolls back what has begun.
        """
        if op_id in self._waiting.op_ids:
            return self._waiting.remove(Column.OP_ID, [op_id]).forward(0)
        return self._queues.remove(op_id)

    def remove_all(self, op_ids: Collection[int]) -> list[Forward]:
        """As `remove`, for several. Returns only those that have begun, which the caller rolls back."""
        if not self._waiting.op_ids.isdisjoint(op_ids):
            self._waiting.remove(Column.OP_ID, op_ids)
        removed = [self.remove(op_id) for op_id in op_ids if op_id in self._queues.forwards]
        return [forward for forward in removed if forward is not None and forward.has_begun]

    def clear(self) -> list[Forward]:
        """Drop every forward. Returns those that have begun, which the caller rolls back."""
        return self.remove_all([*self._waiting.op_ids, *self._queues.forwards])

    def expire(self, now_ns: int) -> list[Forward]:
        """Drop and return the forwards that have not begun by their deadline."""
        expired = self._waiting.expire(now_ns)
        if self._queues.forwards:
            expired += self._queues.expire(now_ns)
        return expired

    def next_batch(self, begin: Begin, begin_all: BeginAll) -> list[Chunk]:
        """Choose the next step: the returned chunks, and `running`. Both are empty if nothing has begun.

        Order of the chunks: short forwards first, and among these single tokens, for which a GPU has its own
        kernel; then by arrival. The caller ends a step with `running` by `finish_decodes`.

        `begin(forward)` is called once for each forward, when there is budget for its first token. It must
        leave a token to compute. A forward that fails to begin leaves the scheduler. For one that waits, it
        is called again later. If it raises, the forward stays and is begun again in a later step.
        """
        self.running, self._running_costs = self._take_waiting(begin_all, 0)
        if self._running_costs:
            self._queues.short.dispatch_all(self._running_costs)
        if not self._queues.forwards:
            self._limits.record_decodes(self._running_costs)
            return []
        left = self._beside(self.running.size)
        return self._queues.fill(left, begin, self._shares, self._running_costs)

    def next_chunks(self, begin: Begin, plain: int) -> list[Chunk]:
        """As `next_batch`, for a step with `plain` plain decodes that is launched behind the running step."""
        left = self._beside(plain + len(self._waiting.op_ids))
        return self._queues.fill(left, begin, {}, None)

    def _beside(self, plain: int) -> Capacity:
        """The capacity that is left in a step with `plain` plain decodes."""
        return Capacity(self.max_batch_tokens - plain, self.max_batch_items - plain, self.max_rows - plain)

    def _take_waiting(self, begin_all: BeginAll, beside: int) -> tuple[Decodes, dict[int, int]]:
        """Begin the plain decodes that are not queued, in a step with `beside` others. Sets its shares.

        Returns the decodes that have begun, and their costs by caller. Queues the others: all of them, if
        there is no room for all short forwards or a caller is limited. So no decode overtakes one that is
        queued.
        """
        if not self._waiting.op_ids:
            self._shares = self._limits.shares(self._queues.short.wanted())
            return NO_DECODES, {}
        decodes = self._waiting.take()
        costs, wanted = decodes.costs(), self._queues.short.wanted()
        for caller, cost in costs.items() if wanted else ():
            wanted[caller] = wanted.get(caller, 0) + cost
        self._shares = self._limits.shares(wanted or costs)
        has_room = not self._shares and self._has_room(beside + decodes.size)
        begun = begin_all(decodes) if has_room else np.zeros(decodes.size, np.bool_)
        if not all(begun.tolist()):
            for forward in decodes.take(~begun).forwards():
                self._queues.add(forward)
            decodes = decodes.take(begun)
            costs = decodes.costs()
        if any(decodes.columns[Column.ADAPTER].tolist()):
            # Those with the same adapter follow each other, as chunks do.
            decodes = decodes.select(decodes.columns[Column.LORA_SLOT].argsort(kind="stable"))
        return decodes, costs

    def _has_room(self, plain: int) -> bool:
        """Whether `plain` plain decodes fit beside all short forwards and the part reserved for long ones."""
        short, share = self._queues.short, LONG_SHARE if self._queues.long.queue else 0
        tokens, rows = self.max_batch_tokens, self.max_rows
        if share:
            tokens, rows = tokens - tokens // share, rows - rows // share
        items = self.max_batch_items - bool(share)
        return plain + len(short.queue) <= items and plain + short.cost <= min(tokens, rows)

    @property
    def has_others(self) -> bool:
        """Whether there are forwards outside `running`."""
        return bool(self._queues.forwards or self._waiting.op_ids)

    @property
    def has_queued(self) -> bool:
        """Whether there are forwards that cannot join a launched step as plain decodes do."""
        return bool(self._queues.forwards) or not self._waiting.may_be_launched

    def may_run_on(self, plain: int) -> bool:
        """Whether the next step of `plain` plain decodes may be launched before the running one is done.

        Only if nothing but plain decodes and long forwards wait, and there is room for them. Short forwards
        run in a step whose results are read at once, which is not launched ahead.
        """
        has_room = self._has_room(plain + len(self._waiting.op_ids))
        return has_room and self._waiting.may_be_launched and not self._queues.short.queue

    def take_joining(self, begin_all: BeginAll, plain: int) -> Decodes:
        """Begin the waiting plain decodes, to be run beside `plain` others in the step of `run_next`.

        Those that do not begin are queued. If the step is not run, `add_decodes` takes the others back.
        """
        return self._take_waiting(begin_all, plain)[0]

    def run_next(self, decodes: Decodes) -> None:
        """Note that a launched step of plain decodes, not one of `next_batch`, is the running one now."""
        self.running, self._running_costs = decodes, decodes.costs()
        self._limits.record_decodes(self._running_costs)
        self._queues.short.dispatch_all(self._running_costs)

    def finish_decodes(self) -> None:
        """Note that the plain decodes of the step have run."""
        self.running = NO_DECODES

    def queue_begun(self, forwards: Sequence[Forward]) -> None:
        """Queue the decodes of `running`, which have begun: the step failed, and they run one by one.

        They are charged to their callers twice.
        """
        self.running = NO_DECODES
        for forward in forwards:
            self.add(forward)
            self._queues.short.dispatch(forward)

    def advance(self, chunk: Chunk) -> bool:
        """As `ForwardQueues.advance`."""
        return self._queues.advance(chunk)

    def record_step(self, chunks: Sequence[Chunk], took_ns: int) -> None:
        """Note how long a step took, from which the limits of callers are learned."""
        decodes_cost, prompts_cost, prompt_tokens = sum(self._running_costs.values()), 0, 0
        has_long_prompt = False
        for chunk in chunks:
            if chunk.forward.kind in DECODES:
                decodes_cost += chunk.cost
            else:
                prompts_cost += chunk.cost
                prompt_tokens += chunk.count
                has_long_prompt |= len(chunk.forward.token_ids) > SHORT_TOKENS
        if not has_long_prompt:
            self._limits.times.add(decodes_cost + prompts_cost, took_ns)
        if prompt_tokens:
            self._limits.times.add_prompts(prompt_tokens, decodes_cost, took_ns)

"""Accounting of recurrent states: which slot has the state of which sequence, and which are snapshots.

A recurrent layer (Mamba, the gated delta rule, a short convolution) keeps a fixed-size state of all tokens so
far instead of keys and values. A *state* here is that of all such layers after some number of tokens. It is
in a slot, and is never changed there: a forward reads one slot and writes others.

    tokens     [ ..................| the last forward ]
    held                         base               tip     of each sequence
    snapshots  ...|........|........|........|              every `spacing` tokens, by the digest of the page

So the last forward is undone by dropping the tip, and forks share slots. After any other truncation the
sequence has the state of the last snapshot before its end, which is *behind* the sequence. The next forward
also computes the tokens in between again if they are few (`MAX_BEHIND`). Otherwise the sequence has to be
replayed, as after an eviction of its pages. A prefix can only be reused up to a snapshot.

All slots but those of running forwards are a cache: the least recently used one is evicted first. A snapshot
that was stored on disk is read back into such a slot. Not thread-safe; the `KvTable` owns it. The memory is
in `state_tensors`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workers.kv.page_pool import IntegrityError, state_digest
from workers.kv.sequence import KvSequence

# In place of a slot: the state before the first token, which needs none.
EMPTY = -1
# A forward computes at most this many tokens again. They do not count in a step's budget.
MAX_BEHIND = 64
# The most slots that a forward needs: one to read, one to return to, one to write.
SLOTS_PER_FORWARD = 3


@dataclass(frozen=True, slots=True)
class Held:
    """The state after `position` tokens, in a slot. EMPTY: there is none before the first token."""

    position: int
    slot: int


FROM_START = Held(0, EMPTY)


@dataclass(frozen=True, slots=True)
class StateRun:
    """The states that one item of a step reads and writes.

    Attributes:
        source: The state that it reads.
        before: The tokens between that state and the item's first token, which are computed again. Their keys
            and values are in the pages.
        writes: The states to write, by position; the last one is at the end of the item.
    """

    source: Held
    before: Sequence[int]
    writes: Sequence[Held]


class StateSlots:
    """Slots 0 to num_slots - 1. **free + used == num_slots**, between any two calls."""

    def __init__(self, num_slots: int, spacing: int, page_size: int) -> None:
        """`spacing`: the tokens from one snapshot to the next, a multiple of the page size."""
        if num_slots < SLOTS_PER_FORWARD:
            raise ValueError(f"num_slots must be at least {SLOTS_PER_FORWARD}, not {num_slots}")
        if spacing < 1 or spacing % page_size:
            raise ValueError(f"spacing must be a multiple of {page_size}, not {spacing}")
        self.num_slots = num_slots
        self.spacing = spacing
        self._page_size = page_size
        self._free = list(range(num_slots - 1, -1, -1))
        # Least recently used first.
        self._used: OrderedDict[int, None] = OrderedDict()
        # The states of each sequence by key, ordered by position, without `FROM_START`; and the sequences
        # that hold each slot.
        self._held: dict[int, list[Held]] = {}
        self._holders: list[set[int]] = [set() for _ in range(num_slots)]
        # The snapshots: digests and slots are one-to-one.
        self._slot_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        # The sequences whose forward has begun and is not done; and the runs of the running step, by
        # sequence.
        self._begun: set[int] = set()
        self._running: dict[int, StateRun] = {}
        # The slots that the running step writes, and those into which snapshots are read.
        self._written: set[int] = set()
        self._reading: set[int] = set()
        # Called with the digest of each snapshot that is dropped.
        self.on_discard: Callable[[bytes], None] | None = None

    # What a forward does.

    @property
    def room(self) -> int:
        """How many more forwards may begin."""
        return (self.num_slots - len(self._reading)) // SLOTS_PER_FORWARD - len(self._begun)

    def is_near(self, seq: KvSequence) -> bool:
        """Whether a forward can continue from the state of a sequence, which is not too far behind."""
        return len(seq) - self._last(seq.key).position <= MAX_BEHIND

    def begin(self, seq: KvSequence) -> None:
        """Note that a forward begins. Its state stays until `end`, so that the forward can be rolled back."""
        last = self._last(seq.key)
        self._set(seq.key, [last])
        self._begun.add(seq.key)
        self._touch(last.slot)

    def run(self, items: Sequence[tuple[KvSequence, int]]) -> list[StateRun]:
        """Allocate slots for the next step. `items`: begun sequences, with their number of tokens in it.

        Slots of an earlier step that were not `appended` become free.
        """
        self._forget_running()
        written = self._written
        taken = [[self._take(written) for _ in range(1 + self._is_behind(seq))] for seq, _ in items]
        runs = []
        for (seq, count), slots in zip(items, taken, strict=True):
            source, length = self._last(seq.key), len(seq)
            ends = [length, length + count][-len(slots) :]
            borders = range(source.position // self.spacing * self.spacing, length + count, self.spacing)
            for border in borders:
                slot = EMPTY if border <= source.position or border in ends else self._take(written)
                if slot != EMPTY:
                    ends.append(border)
                    slots.append(slot)
            writes = sorted(map(Held, ends, slots), key=lambda held: held.position)
            before = seq.token_ids[source.position : length]
            run = self._running[seq.key] = StateRun(source, before, writes)
            for held in writes:
                self._touch(held.slot)
            runs.append(run)
        return runs

    def appended(self, seq: KvSequence, *, is_shared: bool) -> Sequence[int]:
        """The tokens of the running step were appended to a sequence: keep the states that were written.

        Returns the positions that have a snapshot now: none without `is_shared`.
        """
        run = self._running.pop(seq.key, None)
        if run is None:
            return ()
        begin = run.source.position + len(run.before)
        first = next((held for held in run.writes if held.position == begin), None)
        base = first or next(iter(self._held.get(seq.key, ())), FROM_START)
        self._written.difference_update(held.slot for held in run.writes)
        self._set(seq.key, [base, run.writes[-1]])
        snapshots = []
        for held in run.writes:
            if is_shared and held.slot != EMPTY and held.position % self.spacing == 0:
                self._index(held.slot, seq.digests[held.position // self._page_size - 1])
                snapshots.append(held.position)
            self._free_if_unused(held.slot)
        return snapshots

    def _index(self, slot: int, digest: bytes) -> None:
        if digest not in self._slot_of:
            self._slot_of[digest], self._digest_of[slot] = slot, digest

    def end(self, key: int) -> None:
        """Note that a forward is done: others may take its slots."""
        self._begun.discard(key)

    # Called by the table when sequences and pages change.

    def has_snapshot(self, digest: bytes) -> bool:
        """Whether there is a snapshot after the page of this digest."""
        return digest in self._slot_of

    def snapshot(self, digest: bytes) -> int | None:
        """The slot of the snapshot after the page of this digest."""
        return self._slot_of.get(digest)

    def matched(self, seq: KvSequence) -> None:
        """A sequence was extended by shared pages, up to a snapshot."""
        slot = self._slot_of[seq.digests[-1]]
        self._set(seq.key, [Held(len(seq), slot)])
        self._touch(slot)

    def truncated(self, seq: KvSequence) -> None:
        """A sequence was cut. A forward of it is over."""
        self._begun.discard(seq.key)
        length = len(seq)
        kept = [held for held in self._held.get(seq.key, ()) if held.position <= length]
        last = kept[-1].position if kept else 0
        for border in range(length // self.spacing * self.spacing, last, -self.spacing):
            slot = self._slot_of.get(seq.digests[border // self._page_size - 1])
            if slot is not None:
                kept.append(Held(border, slot))
                break
        self._set(seq.key, kept)

    def forked(self, key: int, children: Sequence[int]) -> None:
        """Sequences were added with the same tokens."""
        for child in children:
            self._set(child, self._held.get(key, []))

    def released(self, key: int) -> None:
        """A sequence was removed."""
        self._begun.discard(key)
        self._set(key, [])

    def forget_snapshots(self) -> None:
        """Drop all snapshots, which were made by other weights. Sequences keep the states they hold."""
        for digest in list(self._slot_of):
            self.discarded(digest)

    def discarded(self, digest: bytes) -> None:
        """The page of this digest is overwritten: drops the snapshot after it."""
        slot = self._slot_of.pop(digest, None)
        if slot is not None:
            if self.on_discard is not None:
                self.on_discard(state_digest(digest))
            del self._digest_of[slot]
            self._free_if_unused(slot)

    # Snapshots that are read from disk.

    @property
    def may_read(self) -> bool:
        """Whether one more snapshot can be read, leaving enough slots for running forwards."""
        most = (self.num_slots - len(self._reading) - 1) // SLOTS_PER_FORWARD
        return most >= max(1, len(self._begun))

    def begin_read(self) -> int:
        """A slot to read a snapshot into, until `end_read`. Only between two steps, and if `may_read`."""
        self._forget_running()
        return self._take(self._reading)

    def end_read(self, slot: int, digest: bytes | None) -> None:
        """The slot has the state after the page of this digest now. None: it could not be read."""
        self._reading.discard(slot)
        if digest is not None:
            self._index(slot, digest)
            self._touch(slot)
        self._free_if_unused(slot)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless each slot is free or used, and holders and snapshots are consistent."""
        if sorted([*self._free, *self._used]) != list(range(self.num_slots)):
            raise IntegrityError("a state slot is neither free nor used, or both")
        holders: list[set[int]] = [set() for _ in range(self.num_slots)]
        for key, states in self._held.items():
            for held in states:
                holders[held.slot].add(key)
        if holders != self._holders:
            raise IntegrityError("the holders of state slots are not the sequences that hold them")
        if {slot: digest for digest, slot in self._slot_of.items()} != self._digest_of:
            raise IntegrityError("digests and snapshots are not one to one")
        if EMPTY in self._digest_of:
            raise IntegrityError("a snapshot has no slot")
        for slot in self._used:
            if not (holders[slot] or slot in self._digest_of or slot in self._written | self._reading):
                raise IntegrityError(f"state slot {slot} is used by nothing")

    def _last(self, key: int) -> Held:
        states = self._held.get(key)
        return states[-1] if states else FROM_START

    def _is_behind(self, seq: KvSequence) -> bool:
        return self._last(seq.key).position < len(seq)

    def _set(self, key: int, states: Sequence[Held]) -> None:
        """Let a sequence hold these states and no others."""
        before = self._held.pop(key, [])
        kept = [held for held in states if held.slot != EMPTY]
        for held in before:
            self._holders[held.slot].discard(key)
        for held in kept:
            self._holders[held.slot].add(key)
        if kept:
            self._held[key] = kept
        for held in before:
            self._free_if_unused(held.slot)

    def _touch(self, slot: int) -> None:
        if slot != EMPTY:
            self._used.move_to_end(slot)

    def _take(self, taken: set[int]) -> int:
        """A free slot, or the least recently used one that no running forward needs. Adds it to `taken`.

        EMPTY: there is none.
        """
        if not self._free:
            busy = self._written | self._reading
            for slot in self._used:
                if slot not in busy and self._holders[slot].isdisjoint(self._begun):
                    self._evict(slot)
                    break
            else:
                return EMPTY
        slot = self._free.pop()
        self._used[slot] = None
        taken.add(slot)
        return slot

    def _evict(self, slot: int) -> None:
        digest = self._digest_of.get(slot)
        if digest is not None:
            self.discarded(digest)
        for key in list(self._holders[slot]):
            self._set(key, [held for held in self._held[key] if held.slot != slot])

    def _free_if_unused(self, slot: int) -> None:
        is_used = self._holders[slot] or slot in self._digest_of
        is_taken = slot in self._written or slot in self._reading
        if not is_used and not is_taken and slot in self._used:
            del self._used[slot]
            self._free.append(slot)

    def _forget_running(self) -> None:
        written, self._written, self._running = self._written, set(), {}
        for slot in written:
            self._free_if_unused(slot)

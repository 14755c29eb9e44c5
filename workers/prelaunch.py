"""Forwards that are computed before they are requested.

A caller that generates text appends in each step the token that the last step chose. The request for that
takes some milliseconds: the result goes to the gateway, is made durable there, and goes to the caller, whose
next append comes back. If a forward says that it will be continued so (`prelaunch`), the next forward is
queued at once as a *prelaunched* forward. The request, when it arrives, consumes the result. So there is no
pause between two steps, and the round trip overlaps with the computation.

Callers with a loop of their own do not set `prelaunch`. After several such appends in a row, the next one is
prelaunched too, if that is enabled. On a CPU it is slower: steps compete with the senders of requests.

A prelaunched forward is queued, or runs already, then ready, then consumed or dropped; a sequence has at most
one. A request for one that runs takes it over, and is answered with its step (`consume_running`). Nothing is
sent of it before it is requested, so no client sees a token that the journal does not have. Any other command
for its sequence first drops it, and then has the same effect as if there had been none.

Those of a step are prelaunched and consumed together: all are plain decodes (`decodes`). Who asks for more of
a row, such as its logits, chooses the next token by what he reads there.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np

from workers.decodes import (
    ARRIVAL,
    ARRIVED_NS,
    BATCH_ITEMS,
    CHOSEN,
    COMPUTE_NS,
    DEADLINE,
    NEVER,
    NO_DECODES,
    OP_ID,
    POSITION,
    PRELAUNCH,
    PROMPT_LEN,
    TOKEN,
    Decodes,
    Mask,
)
from workers.executors.engine import Engine
from workers.operations import Accept, Forward, Kind, OutputSpec, RowOutput
from workers.scheduler import Scheduler

# A result that is not requested within this time is dropped. Until then its sequence holds one more token.
HOLD_TIMEOUT_S = 1.0
# After so many appends of the chosen token in a row, the next one is prelaunched without `prelaunch`.
_REPEATS_BEFORE_PRELAUNCH = 3

# What a request must have: position, token, output and prompt_len. The priority does not matter any more.
_Expected = tuple[int, int, OutputSpec, int]


class _Ready(NamedTuple):
    """The result of a prelaunched forward, which was computed at `since_ns`."""

    position: int
    token_id: int
    output: RowOutput | None
    compute_ns: int
    batch_items: int
    since_ns: int


class Prelauncher:
    """Owner of the prelaunched forwards. Those that are queued are in the scheduler, under their callers."""

    def __init__(
        self, engine: Engine, scheduler: Scheduler, max_seq_tokens: int, *, prelaunch_unrequested: bool
    ) -> None:
        """`max_seq_tokens`: no forward beyond it is prelaunched; the gateway checks those that are requested.

        `prelaunch_unrequested`: also prelaunch without the caller's `prelaunch`, after enough repeats.
        """
        self._engine = engine
        self._scheduler = scheduler
        self._max_seq_tokens = max_seq_tokens
        self.prelaunch_unrequested = prelaunch_unrequested
        self._next_id = -1
        # All by sequence. What its next request has to be; and how many in a row were so.
        self.expected: dict[int, _Expected] = {}
        self._repeats: dict[int, int] = {}
        # Its prelaunched forward is in one of these, and its request is expected: the op id, from when it is
        # queued or launched until its result is there or it is requested; or the result, the oldest first.
        self.queued: dict[int, int] = {}
        self.ready: dict[int, _Ready] = {}
        # One that has begun in this step, and so holds pages.
        self._begun: Forward | None = None
        # A requested forward needs pages of prelaunched ones: none begins in this step, or in the next.
        self._is_paused = self._pauses_next_step = False

    def may_follow(self, *, wanted: bool) -> bool:
        """Whether `follow` may have an effect. `wanted`: whether one of its decodes wants it."""
        return wanted or self.prelaunch_unrequested or bool(self.expected)

    def follow(self, decodes: Decodes, launched: Decodes = NO_DECODES) -> Collection[int]:
        """Queue the decodes that are expected after answers. Returns the sequences for which none is queued.

        `launched`: those of `next_decodes`, if they run already.
        """
        sequences = decodes.sequences
        self._forget_expected(sequences)
        following, is_followed = self._following(decodes), self._followed(decodes)
        is_expected = is_followed
        if self.prelaunch_unrequested:
            # Whether a caller appends the chosen token is learned from each request.
            is_expected = decodes.columns[POSITION] + 1 < self._max_seq_tokens
        self._expect(following.take(is_expected))
        for sequence in decodes.take(~is_expected).sequences if self._repeats else ():
            self._repeats.pop(sequence, None)
        queued = launched if launched.size else self._queue(following.take(is_followed))
        self.queued.update(zip(queued.sequences, queued.column(OP_ID), strict=True))
        return [sequence for sequence in sequences if sequence not in self.queued]

    def _queue(self, decodes: Decodes) -> Decodes:
        """Queue as many as the next step has room for. Returns these.

        The requests for others would arrive first, and their callers pay for both.
        """
        room = max(0, self._scheduler.max_batch_items - len(self._scheduler))
        queued = decodes.take(np.arange(decodes.size) < room)
        if queued.size and not self._scheduler.add_decodes(queued):
            for forward in queued.forwards():
                self._scheduler.add(forward)
        return queued

    def next_decodes(self, decodes: Decodes) -> Decodes:
        """The next decodes, where they are prelaunched, of sequences whose decodes run and were requested.

        Their tokens are not known yet.
        """
        return self._following(decodes).take(self._followed(decodes))

    def _followed(self, decodes: Decodes) -> Mask:
        """Which have a next one that is prelaunched: as the caller wants it, or after enough repeats."""
        wanted = decodes.columns[PRELAUNCH] != 0
        if self.prelaunch_unrequested:
            repeats = [self._repeats.get(sequence, 0) for sequence in decodes.sequences]
            wanted |= np.array(repeats) >= _REPEATS_BEFORE_PRELAUNCH
        followed: Mask = wanted & (decodes.columns[POSITION] + 1 < self._max_seq_tokens)
        return followed

    def consume_running(self, running: Decodes, requests: Decodes) -> bool:
        """Let prelaunched decodes that run become those of requests.

        False, without an effect: not all of these are among them, and as they were expected.
        """
        sequences = requests.sequences
        if list(map(self.expected.get, sequences)) != list(_requests(requests)):
            return False
        places = dict(zip(running.sequences, range(running.size), strict=True))
        at = [places.get(sequence, -1) for sequence in sequences if sequence in self.queued]
        if len(at) < requests.size or -1 in at or len(set(at)) < len(at):
            return False
        columns = requests.columns.copy()
        columns[ARRIVED_NS], columns[ARRIVAL] = 0, running.columns[ARRIVAL, at]
        running.columns[:, at] = columns
        for sequence in sequences:
            del self.queued[sequence]
        if self.prelaunch_unrequested:
            self._count_repeats(sequences)
        return True

    def _count_repeats(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            self._repeats[sequence] = self._repeats.get(sequence, 0) + 1

    def _following(self, decodes: Decodes) -> Decodes:
        """The next decodes of these sequences, with the tokens that were chosen, if they are known."""
        columns = decodes.columns.copy()
        columns[OP_ID] = self._new_ids(decodes.size)
        columns[POSITION] += 1
        columns[TOKEN] = columns[CHOSEN]
        columns[PRELAUNCH] = columns[ARRIVED_NS] = 0
        columns[DEADLINE] = NEVER
        return Decodes(columns, decodes.outputs)

    def _new_ids(self, count: int) -> Sequence[int]:
        first, self._next_id = self._next_id, self._next_id - count
        return range(first, self._next_id, -1)

    def _expect(self, decodes: Decodes) -> None:
        self.expected.update(zip(decodes.sequences, _requests(decodes), strict=True))

    def _forget_expected(self, sequences: Sequence[int]) -> None:
        """Expect nothing of sequences that are answered. They were queued while something was expected."""
        for sequence in sequences if self.expected else ():
            self.expected.pop(sequence, None)
        if self.queued or self.ready:
            # It continues an earlier state of the sequence.
            self._cancel(sequences)

    def next_step(self) -> None:
        """Note that a step begins."""
        self._begun = None
        self._is_paused, self._pauses_next_step = self._pauses_next_step, False

    def all_requested(self) -> None:
        """Note that all decodes that run are requested: nobody waits for their pages."""
        self._begun = None

    @property
    def has_to_wait(self) -> bool:
        """Whether no prelaunched forward may begin in the next step."""
        return self._pauses_next_step

    def may_begin(self, prelaunched: Forward) -> bool:
        """Whether a prelaunched forward may take pages now. If so, it counts as begun."""
        if not self._is_paused:
            self._begun = prelaunched
        return not self._is_paused

    def begin(self, decodes: Decodes) -> Mask:
        """As `Engine.begin_decodes`, without prelaunched ones while these may not take pages."""
        prelaunched = decodes.prelaunched
        allowed = ~prelaunched if self._is_paused else np.ones(decodes.size, np.bool_)
        begun = self._engine.begin_decodes(decodes, allowed)
        which = (begun & prelaunched).nonzero()[0]
        if len(which):
            self._begun = decodes.forward(int(which[0]))
        return begun

    def mark_ready(self, decodes: Decodes) -> None:
        """Keep the results of prelaunched decodes."""
        now_ns, sequences = time.monotonic_ns(), decodes.sequences
        for sequence in sequences:
            del self.queued[sequence]
        columns = decodes.columns[[POSITION, CHOSEN, COMPUTE_NS, BATCH_ITEMS]].tolist()
        positions, tokens, compute_ns, items = columns
        outputs = decodes.row_outputs or repeat(None)
        results = map(_Ready, positions, tokens, outputs, compute_ns, items, repeat(now_ns))
        self.ready.update(zip(sequences, results, strict=False))

    def forget(self, prelaunched: Forward) -> None:
        """Forget a prelaunched forward that has left the scheduler and holds nothing."""
        del self.queued[prelaunched.sequence]

    def consume(self, decodes: Decodes) -> tuple[Decodes, Decodes]:
        """The requested decodes that were prelaunched and are ready, with their results; and the others.

        There is no prelaunched forward of the sequences of the others afterwards.
        """
        sequences, requests = decodes.sequences, list(_requests(decodes))
        known = list(map(self.expected.get, sequences))
        if self.prelaunch_unrequested:
            zipped = zip(sequences, known, requests, strict=True)
            self._count_repeats([sequence for sequence, one, request in zipped if one == request])
        if known != requests:
            zipped = zip(sequences, known, requests, strict=True)
            self.drop([sequence for sequence, one, request in zipped if one and one != request])
        # Those that are left are as they were expected.
        ready = [sequence in self.ready for sequence in sequences]
        found = np.array(ready, np.bool_)
        if not all(ready):
            self._cancel([each for each, is_ready in zip(sequences, ready, strict=True) if not is_ready])
            if not any(ready):
                return NO_DECODES, decodes
        results = [self.ready.pop(each) for each, is_ready in zip(sequences, ready, strict=True) if is_ready]
        done, others = decodes.take(found), decodes.take(~found)
        _, tokens, outputs, compute_ns, items, _ = zip(*results, strict=True)
        done.columns[[CHOSEN, COMPUTE_NS, BATCH_ITEMS]] = tokens, compute_ns, items
        if any(outputs):
            done.row_outputs = [
                RowOutput(token) if output is None else output
                for token, output in zip(tokens, outputs, strict=True)
            ]
        self._engine.count_decodes(done)
        return done, others

    def drop(self, sequences: Iterable[int]) -> None:
        """Undo what was prelaunched for these sequences, and expect no further forwards of them."""
        sequences = list(sequences)
        for sequence in sequences:
            self.expected.pop(sequence, None)
            self._repeats.pop(sequence, None)
        self._cancel(sequences)

    def drop_all(self) -> None:
        """As `drop`, for all sequences."""
        self.drop(self.expected)

    def free_pages(self) -> bool:
        """Drop everything that is ready, to free its pages. Returns whether there was any.

        Queued forwards stay: the scheduler may be in the middle of a step.
        """
        ready, self.ready = self.ready, {}
        for sequence, result in ready.items():
            self._engine.undo(sequence, result.position)
        return bool(ready)

    def wait_for_pages(self, op: Forward) -> bool:
        """Let a forward wait for pages that prelaunched forwards of this step hold. False: none holds any.

        In the next step it gets those pages before any prelaunched forward does.
        """
        if self._begun is None:
            return False
        self._pauses_next_step = True
        op.waits_for, op.waits_until = self._begun, 1
        return True

    def drop_expired(self, now_ns: int) -> None:
        """Drop results that were not requested in time."""
        timeout_ns = int(HOLD_TIMEOUT_S * 1e9)
        while self.ready:
            sequence, result = next(iter(self.ready.items()))
            if now_ns - result.since_ns < timeout_ns:
                return
            self.drop([sequence])

    def _cancel(self, sequences: Sequence[int]) -> None:
        """Undo what was prelaunched for these sequences."""
        queued: list[int] = []
        for sequence in sequences if self.ready or self.queued else ():
            result = self.ready.pop(sequence, None)
            if result is not None:
                self._engine.undo(sequence, result.position)
            op_id = self.queued.pop(sequence, None)
            if op_id is not None:
                queued.append(op_id)
        for forward in self._scheduler.remove_all(queued) if queued else ():
            self._engine.roll_back(forward)


def _requests(decodes: Decodes) -> Iterable[_Expected]:
    """What a request has to be to be that of one of these."""
    column = decodes.column
    return zip(column(POSITION), column(TOKEN), decodes.outputs, column(PROMPT_LEN), strict=True)


def may_be_continued(op: Forward) -> bool:
    """Whether the caller of a forward may append the token that it chose.

    Not if it asks for logits or hidden states: such a caller chooses tokens itself, and rows are large.
    """
    return (
        op.output.is_plain
        and op.kind in (Kind.PREFILL, Kind.DECODE)
        and op.wanted_rows == 1
        and op.accept is Accept.ALL
        and not op.ephemeral
        and not op.choices
        and not op.sample_seeds
        and not op.draft_tokens
    )

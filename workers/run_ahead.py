"""Forwards that begin before they are asked for.

Who generates a text appends at each step the token that the last one chose. The command for that is some
milliseconds on its way: the result goes to the gateway, which has it written down before it tells anybody,
and to a caller, whose next append comes back. Where a forward says that this is how it goes on (`run_ahead`),
the next one begins at once, as a *guess*; the command, when it comes, claims what was computed. So steps
follow each other without a pause, and the way to the gateway and back is gone beside them.

Of callers who drive a loop of their own nobody says so. Where a sequence has gone on so several times, its
next one is guessed too, if that is wanted: where steps take the cores that bring the callers' commands, it
makes them slower.

A guess is queued, then held, then claimed or dropped. Nothing is said of one before it is claimed, so nobody
is told what the journal does not have. Whatever else is to happen to a sequence drops its guess first: it is
then as if there had been none. There is at most one for each sequence.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from dataclasses import dataclass

from workers.executors.engine import Engine
from workers.operations import Accept, Forward, ForwardDone, Kind
from workers.running import Behind, RunningForward
from workers.scheduler import Scheduler

# Who has not claimed by then does something else. Meanwhile a token more is held of the sequence.
PATIENCE_S = 1.0
# After so many appends of the chosen token, the next is guessed without being told.
_HABIT = 3


@dataclass(frozen=True, slots=True)
class _Expected:
    """What a sequence would go on with, and how often in a row that has come."""

    next: Forward
    times: int


@dataclass(frozen=True, slots=True)
class _Held:
    """A guess that is computed."""

    running: RunningForward
    batch_items: int
    since_ns: int


def is_guess(op: Forward) -> bool:
    """Whether nobody has asked for a forward."""
    return op.op_id < 0


class RunAhead:
    """Owner of the guesses. Those that are queued stand in the scheduler, as forwards of their callers."""

    def __init__(
        self, engine: Engine, scheduler: Scheduler, max_seq_tokens: int, *, guesses_untold: bool
    ) -> None:
        """`max_seq_tokens`: nothing is guessed beyond; commands are checked by the gateway.

        `guesses_untold`: also for those who have gone on so several times.
        """
        self._engine = engine
        self._scheduler = scheduler
        self._max_seq_tokens = max_seq_tokens
        self._guesses_untold = guesses_untold
        self._next_id = -1
        # All by their sequences; what is held, the oldest first. A sequence with a guess is in `_expected`.
        self._expected: dict[int, _Expected] = {}
        self._queued: dict[int, Forward] = {}
        self._held: dict[int, _Held] = {}
        # Those of the queued that have begun, and so have pages.
        self._begun: dict[int, Forward] = {}
        # Somebody waits for pages of guesses: none begins in this step, or in the next.
        self._pausing = self._pauses_next = False

    @property
    def holds_any(self) -> bool:
        """Whether a guess is computed and not claimed."""
        return bool(self._held)

    def follow(self, op: Forward, done: ForwardDone) -> bool:
        """Queues what is expected after an answer; returns whether anything is."""
        before = self._expected.pop(op.sequence, None)
        if before is not None:
            # One that was queued behind this forward, after another before it, knows nothing of it.
            self._take_back(op.sequence)
        is_wanted = op.run_ahead or self._guesses_untold
        if not is_wanted or not _goes_on(op) or op.position + len(op.token_ids) >= self._max_seq_tokens:
            return False
        guess = Forward(
            op_id=self._next_id,
            sequence=op.sequence,
            position=op.position + len(op.token_ids),
            token_ids=(done.outputs[-1].token_id,),
            output=op.output,
            kind=Kind.DECODE,
            caller=op.caller,
            prompt_len=op.prompt_len,
            priority=op.priority,
        )
        self._next_id -= 1
        times = 0 if before is None else before.times
        self._expected[op.sequence] = _Expected(guess, times)
        if not op.run_ahead and not (self._guesses_untold and times >= _HABIT):
            return False
        if len(self._scheduler) >= self._scheduler.max_batch_items:
            # The next step is full without it. The command would find it waiting, and he would pay for both.
            return False
        self._queued[op.sequence] = guess
        self._scheduler.add(guess)
        return True

    def next_step(self) -> None:
        """A step begins."""
        self._pausing, self._pauses_next = self._pauses_next, False

    def may_begin(self, guess: Forward) -> bool:
        """Whether a guess whose turn it is may have pages; if so, it has begun."""
        if not self._pausing:
            self._begun[guess.sequence] = guess
        return not self._pausing

    def hold(self, running: RunningForward, batch_items: int) -> None:
        """A guess was computed."""
        del self._queued[running.op.sequence]
        del self._begun[running.op.sequence]
        self._held[running.op.sequence] = _Held(running, batch_items, time.monotonic_ns())

    def forget(self, guess: Forward) -> None:
        """A guess has left the scheduler, and nothing is left of it."""
        del self._queued[guess.sequence]
        self._begun.pop(guess.sequence, None)

    def claim(self, op: Forward) -> ForwardDone | None:
        """The answer of what is asked for now, if it was guessed and is computed. Else no guess is left."""
        expected = self._expected.get(op.sequence)
        if expected is None:
            return None
        if not _is_same(expected.next, op):
            self.drop([op.sequence])
            return None
        self._expected[op.sequence] = _Expected(expected.next, expected.times + 1)
        held = self._held.pop(op.sequence, None)
        if held is None:
            self._take_back(op.sequence)
            return None
        running = held.running
        # The time that it was held was spent on others.
        running.started_ns += time.monotonic_ns() - held.since_ns
        done = self._engine.complete(running, held.batch_items)
        return dataclasses.replace(done, op_id=op.op_id)

    def drop(self, sequences: Iterable[int]) -> None:
        """Leaves these sequences as if nothing had been guessed, and expects nothing of them."""
        for sequence in sequences:
            self._expected.pop(sequence, None)
            self._take_back(sequence)

    def drop_all(self) -> None:
        """As `drop`, for all sequences."""
        self.drop(list(self._expected))

    def make_room(self) -> bool:
        """Drops what is held, so that its pages can be had; returns whether that was anything.

        What is queued stays: the scheduler may be in the middle of a step.
        """
        held, self._held = self._held, {}
        for guess in held.values():
            self._engine.roll_back(guess.running)
        return bool(held)

    def wait_for_room(self) -> Behind | None:
        """What a forward waits for whose pages guesses of the running step may have; None: none has any.

        Then it is offered those pages before a guess is.
        """
        guess = next(iter(self._begun.values()), None)
        if guess is None:
            return None
        self._pauses_next = True
        return Behind(guess.op_id, len(guess.token_ids))

    def drop_unclaimed(self, now_ns: int) -> None:
        """Drops what was held for too long."""
        patience_ns = int(PATIENCE_S * 1e9)
        while self._held:
            sequence, oldest = next(iter(self._held.items()))
            if now_ns - oldest.since_ns < patience_ns:
                return
            self.drop([sequence])

    def _take_back(self, sequence: int) -> None:
        queued, held = self._queued.pop(sequence, None), self._held.pop(sequence, None)
        self._begun.pop(sequence, None)
        running = None if held is None else held.running
        if queued is not None:
            entry = self._scheduler.remove(queued.op_id)
            running = None if entry is None else entry.running
        if running is not None:
            self._engine.roll_back(running)


def _goes_on(op: Forward) -> bool:
    """Whether a forward may be one of those that go on with what they chose.

    Not where rows of logits or hidden states are asked for: who reads them chooses by himself, and they are
    large.
    """
    return (
        op.kind in (Kind.PREFILL, Kind.DECODE)
        and op.wanted_rows == 1
        and op.accept is Accept.ALL
        and not op.ephemeral
        and not op.choices
        and not op.sample_seeds
        and op.output.row_weight == 1
    )


def _is_same(guess: Forward, op: Forward) -> bool:
    """Whether a forward that was asked for is what was guessed. Who goes first does not matter any more."""
    return (
        op.position == guess.position
        and tuple(op.token_ids) == guess.token_ids
        and op.kind is Kind.DECODE
        and op.output == guess.output
        and op.prompt_len == guess.prompt_len
        and _goes_on(op)
    )

"""Forwards that are computed before they are requested.

A caller that generates text appends in each step the token that the last step chose. The request for that
takes some milliseconds: the result goes to the gateway, is made durable there, and goes to the caller, whose
next append comes back. If a forward says that it will be continued so (`prelaunch`), the next forward is
queued at once as a *prelaunched* forward. The request, when it arrives, consumes the result. So there is no
pause between two steps, and the round trip overlaps with the computation.

Callers with a loop of their own do not set `prelaunch`. After several such appends in a row, the next one is
prelaunched too, if that is enabled. On a CPU it is slower: steps compete with the senders of requests.

A prelaunched forward is queued, then ready, then consumed or dropped; a sequence has at most one. Nothing is
sent of it before it is consumed, so no client sees a token that the journal does not have. Any other command
for its sequence first drops it, and then has the same effect as if there had been none.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from workers.executors.engine import Engine
from workers.operations import Accept, Forward, Kind
from workers.scheduler import Scheduler

# A result that is not requested within this time is dropped. Until then its sequence holds one more token.
HOLD_TIMEOUT_S = 1.0
# After so many appends of the chosen token in a row, the next one is prelaunched without `prelaunch`.
_REPEATS_BEFORE_PRELAUNCH = 3


@dataclass(slots=True)
class _Expected:
    """The expected next forward of a sequence, and how many expected ones have come in a row."""

    next: Forward
    repeats: int


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
        # All by sequence. A sequence with a prelaunched forward is in `expected`.
        self.expected: dict[int, _Expected] = {}
        self._queued: dict[int, Forward] = {}
        # Computed, and since when in time.monotonic_ns(); the oldest first.
        self.ready: dict[int, tuple[Forward, int]] = {}
        # The queued ones that have begun, and so hold pages.
        self._begun: dict[int, Forward] = {}
        # A requested forward needs pages of prelaunched ones: none begins in this step, or in the next.
        self._is_paused = self._pauses_next_step = False

    def prelaunch_next(self, op: Forward) -> bool:
        """Queue the forward that is expected after an answer. Returns whether there is one."""
        sequence, end = op.sequence, op.position + len(op.token_ids)
        before = self.expected.pop(sequence, None)
        if sequence in self._queued or sequence in self.ready:
            # It continues an earlier state of the sequence: `op` was queued meanwhile.
            self._cancel(sequence)
        is_wanted = op.prelaunch or self.prelaunch_unrequested
        if not is_wanted or not _may_be_continued(op) or end >= self._max_seq_tokens:
            return False
        prelaunched = Forward(
            op_id=self._next_id,
            sequence=sequence,
            position=end,
            token_ids=(op.outputs[-1].token_id,),
            output=op.output,
            kind=Kind.DECODE,
            caller=op.caller,
            prompt_len=op.prompt_len,
            priority=op.priority,
            adapter=op.adapter,
            lora_slot=op.lora_slot,
            is_prelaunched=True,
        )
        self._next_id -= 1
        repeats = 0 if before is None else before.repeats
        self.expected[sequence] = _Expected(prelaunched, repeats)
        if not op.prelaunch and not (self.prelaunch_unrequested and repeats >= _REPEATS_BEFORE_PRELAUNCH):
            return False
        if len(self._scheduler) >= self._scheduler.max_batch_items:
            # The next step is full already. Its request would arrive first, and the caller pay for both.
            return False
        self._queued[sequence] = prelaunched
        if prelaunched.is_plain:
            self._scheduler.add_plain(prelaunched)
        else:
            self._scheduler.add(prelaunched)
        return True

    @property
    def is_idle(self) -> bool:
        """Whether nothing is prelaunched, unless a forward asks for it."""
        return not self.expected and not self.prelaunch_unrequested

    def next_step(self) -> None:
        """Note that a step begins."""
        self._is_paused, self._pauses_next_step = self._pauses_next_step, False

    def may_begin(self, prelaunched: Forward) -> bool:
        """Whether a prelaunched forward may take pages now. If so, it counts as begun."""
        if not self._is_paused:
            self._begun[prelaunched.sequence] = prelaunched
        return not self._is_paused

    def allowed(self, forwards: list[Forward]) -> list[Forward]:
        """Those that may take pages now: without prelaunched ones while these are paused."""
        return [one for one in forwards if not one.is_prelaunched] if self._is_paused else forwards

    def note_begun(self, forwards: Iterable[Forward]) -> None:
        """Note which forwards have begun, prelaunched ones and others."""
        self._begun.update({one.sequence: one for one in forwards if one.is_prelaunched})

    def mark_ready(self, prelaunched: Iterable[Forward]) -> None:
        """Keep prelaunched forwards that were computed."""
        now_ns = time.monotonic_ns()
        for forward in prelaunched:
            sequence = forward.sequence
            del self._queued[sequence], self._begun[sequence]
            self.ready[sequence] = forward, now_ns

    def forget(self, prelaunched: Forward) -> None:
        """Forget a prelaunched forward that has left the scheduler and holds nothing."""
        del self._queued[prelaunched.sequence]
        self._begun.pop(prelaunched.sequence, None)

    def consume(self, op: Forward) -> bool:
        """Complete a requested forward from the prelaunched one, if that is the same and ready.

        If not, there is no prelaunched forward of the sequence afterwards.
        """
        expected = self.expected.get(op.sequence)
        if expected is None:
            return False
        if not _matches(expected.next, op):
            self.drop([op.sequence])
            return False
        expected.repeats += 1
        prelaunched, since_ns = self.ready.pop(op.sequence, (None, 0))
        if prelaunched is None:
            self._cancel(op.sequence)
            return False
        self._engine.consume(prelaunched, op, held_ns=time.monotonic_ns() - since_ns)
        return True

    def drop(self, sequences: Iterable[int]) -> None:
        """Undo what was prelaunched for these sequences, and expect no further forwards of them."""
        for sequence in sequences:
            self.expected.pop(sequence, None)
            self._cancel(sequence)

    def drop_all(self) -> None:
        """As `drop`, for all sequences."""
        self.drop(list(self.expected))

    def free_pages(self) -> bool:
        """Drop everything that is ready, to free its pages. Returns whether there was any.

        Queued forwards stay: the scheduler may be in the middle of a step.
        """
        ready, self.ready = self.ready, {}
        for prelaunched, _ in ready.values():
            self._engine.roll_back(prelaunched)
        return bool(ready)

    def wait_for_pages(self, op: Forward) -> bool:
        """Let a forward wait for pages that prelaunched forwards of this step hold. False: none holds any.

        In the next step it gets those pages before any prelaunched forward does.
        """
        prelaunched = next(iter(self._begun.values()), None)
        if prelaunched is None:
            return False
        self._pauses_next_step = True
        op.waits_for, op.waits_until = prelaunched, len(prelaunched.token_ids)
        return True

    def drop_expired(self, now_ns: int) -> None:
        """Drop results that were not requested in time."""
        timeout_ns = int(HOLD_TIMEOUT_S * 1e9)
        while self.ready:
            sequence, (_, since_ns) = next(iter(self.ready.items()))
            if now_ns - since_ns < timeout_ns:
                return
            self.drop([sequence])

    def _cancel(self, sequence: int) -> None:
        prelaunched, _ = self.ready.pop(sequence, (None, 0))
        queued = self._queued.pop(sequence, None)
        self._begun.pop(sequence, None)
        if queued is not None:
            prelaunched = self._scheduler.remove(queued.op_id)
        if prelaunched is not None and prelaunched.has_begun:
            self._engine.roll_back(prelaunched)


def _may_be_continued(op: Forward) -> bool:
    """Whether the caller of a forward may append the token that it chose.

    Not if it asks for logits or hidden states: such a caller chooses tokens itself, and rows are large.
    """
    return op.output.row_weight == 1 and (
        op.is_plain
        or (
            op.kind in (Kind.PREFILL, Kind.DECODE)
            and op.wanted_rows == 1
            and op.accept is Accept.ALL
            and not op.ephemeral
            and not op.choices
            and not op.sample_seeds
        )
    )


def _matches(prelaunched: Forward, op: Forward) -> bool:
    """Whether a request asks for what was prelaunched. The priority does not matter any more."""
    return (
        op.position == prelaunched.position
        and tuple(op.token_ids) == prelaunched.token_ids
        and op.kind is Kind.DECODE
        and (op.output is prelaunched.output or op.output == prelaunched.output)
        and op.prompt_len == prelaunched.prompt_len
        and _may_be_continued(op)
    )

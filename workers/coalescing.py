"""How long to wait for callers who are about to come back, before starting a step without them.

After a step its callers get their tokens and most of them send the next one within a millisecond or two. They
do not come at the same instant, and a step that starts with the first of them costs as much as one with all.
So the loop waits for those it has just answered, under three bounds:

- never longer than a share of the last step, and never longer than a fixed time;
- never for a caller who did not come back in time the last time (agents, people, finished loops);
- not at all for a lone caller, nor while a prefill has work to run.

Pure bookkeeping: no clock, no queue.
"""

from __future__ import annotations

from collections.abc import Iterable

# A step is at most this much later than it could have been.
_MAX_SHARE = 0.25
_MAX_WAIT_NS = 20_000_000


class CoalescingWindow:
    """Remembers who was answered by the last step and who is known to come back. Times in ns."""

    def __init__(self) -> None:
        # Answered by the last step, not back yet, and waited for.
        self._expected: set[int] = set()
        # Answered by the last step, not back yet, and not waited for.
        self._unhurried: set[int] = set()
        # Came back in time after their last answer.
        self._prompt: set[int] = set()
        self._closes_ns = 0

    def opened(self, answered: Iterable[int], now_ns: int, step_ns: int) -> None:
        """A step has answered these sequences and took `step_ns`; those of the step before are given up."""
        self._prompt -= self._expected
        self._expected.clear()
        self._unhurried.clear()
        for sequence in answered:
            (self._expected if sequence in self._prompt else self._unhurried).add(sequence)
        self._closes_ns = now_ns + min(int(step_ns * _MAX_SHARE), _MAX_WAIT_NS)

    def arrived(self, sequence: int, now_ns: int) -> None:
        """A sequence has its next operation. If it was answered just now, it will be waited for next time."""
        answered_last = sequence in self._expected or sequence in self._unhurried
        if answered_last and now_ns <= self._closes_ns:
            self._prompt.add(sequence)
        self._expected.discard(sequence)
        self._unhurried.discard(sequence)

    def forget(self, sequence: int) -> None:
        """A sequence is gone."""
        self._expected.discard(sequence)
        self._unhurried.discard(sequence)
        self._prompt.discard(sequence)

    def remaining_ns(self, now_ns: int, waiting: int) -> int:
        """How much longer to wait, with `waiting` operations at hand; 0: start the step."""
        if not self._expected or not waiting:
            # Without anything to run there is nothing to hold back: the first arrival ends the idling.
            return 0
        return max(0, self._closes_ns - now_ns)

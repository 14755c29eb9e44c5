"""How long to wait for callers who are about to come back, before starting a step without them.

After a step its callers get their tokens and most of them send the next one within a millisecond or two. They
do not come at the same instant, and a step that starts with the first of them costs as much as one with all.
So the loop waits for those it has just answered, under these bounds:

- never longer than a share of the last step (but for the next paragraph), nor than a fixed time;
- never for a caller who did not come back in time the last time (agents, people, finished loops);
- not at all for a lone caller, or with a full step at hand. (The step loop sees to the latter, and does not
  wait while a prefill has work to run.)

Where steps are so short that answers take longer to travel than to compute, no caller is back within such a
share. Steps would run with whoever came first, and take the cores from those who bring the others. So when
messages with new operations follow each other closely, a step waits for more, for two milliseconds at most.

Pure bookkeeping: no clock, no queue.
"""

from __future__ import annotations

from collections.abc import Iterable

# A step is at most this much later than it could have been.
_MAX_SHARE = 0.25
_MAX_WAIT_NS = 20_000_000
# Or, with many callers and short steps, this much; worth it if a message is to come meanwhile.
_BUSY_WAIT_NS = 2_000_000
_BUSY_GAP_NS = _BUSY_WAIT_NS
# How many messages the mean gap between two of them remembers, about.
_GAP_MEMORY = 8
_LONGEST_GAP_NS = 10_000_000
# More sequences than are answered within a few steps.
_REMEMBERED = 1 << 14


class CoalescingWindow:
    """Remembers who was answered by the last steps and who is known to come back. Times in ns."""

    def __init__(self) -> None:
        # Answered by the last step, not back yet, and waited for.
        self._expected: set[int] = set()
        # Answered by the last step, not back yet, and not waited for.
        self._unhurried: set[int] = set()
        # Came back in time after their last answer.
        self._prompt: set[int] = set()
        # Answered by the last steps and not taken since: until when it would have been back in time.
        self._in_time: dict[int, int] = {}
        # Answered a moment ago and not back yet, by when that was, the oldest first.
        self._away: dict[int, int] = {}
        self._closes_ns = 0
        self._busy_closes_ns = 0
        self._last_message_ns = 0
        self._mean_gap_ns = _LONGEST_GAP_NS

    def opened(self, answered: Iterable[int], now_ns: int, step_ns: int) -> None:
        """A step has answered these sequences and took `step_ns`; those of the step before are given up."""
        self._prompt -= self._expected
        self._expected.clear()
        self._unhurried.clear()
        for sequence in list(self._away):
            if self._away[sequence] > now_ns - _MAX_WAIT_NS:
                break
            del self._away[sequence]
        self._closes_ns = now_ns + min(int(step_ns * _MAX_SHARE), _MAX_WAIT_NS)
        for sequence in answered:
            (self._expected if sequence in self._prompt else self._unhurried).add(sequence)
            self._away[sequence] = now_ns
            self._in_time[sequence] = self._closes_ns
        # Who has gone for good is not remembered for long.
        while len(self._in_time) > _REMEMBERED:
            del self._in_time[next(iter(self._in_time))]
        self._busy_closes_ns = now_ns + _BUSY_WAIT_NS

    def message(self, now_ns: int) -> None:
        """New operations have come, one or several at once."""
        gap_ns = min(now_ns - self._last_message_ns, _LONGEST_GAP_NS)
        self._mean_gap_ns += (gap_ns - self._mean_gap_ns) // _GAP_MEMORY
        self._last_message_ns = now_ns

    def arrived(self, sequence: int, came_ns: int) -> None:
        """A sequence has its next operation, which came then. If in time, it is waited for next time.

        It may have been taken a step later than it came: callers in two halves, each of which comes back
        while the other's step runs, would otherwise never share one.
        """
        if came_ns <= self._in_time.pop(sequence, 0):
            self._prompt.add(sequence)
        self._expected.discard(sequence)
        self._unhurried.discard(sequence)
        self._away.pop(sequence, None)

    def forget(self, sequence: int) -> None:
        """A sequence is gone."""
        self._expected.discard(sequence)
        self._unhurried.discard(sequence)
        self._prompt.discard(sequence)
        self._in_time.pop(sequence, None)
        self._away.pop(sequence, None)

    def remaining_ns(self, now_ns: int, waiting: int) -> int:
        """How much longer to wait, with `waiting` operations at hand; 0: start the step."""
        if not waiting:
            # Without anything to run there is nothing to hold back: the first arrival ends the idling.
            return 0
        closes_ns = self._closes_ns if self._expected else 0
        if self._away and self._mean_gap_ns <= _BUSY_GAP_NS:
            closes_ns = max(closes_ns, self._busy_closes_ns)
        return max(0, closes_ns - now_ns)

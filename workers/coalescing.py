"""How long a step waits for callers that are about to send their next request (ADR 6).

After a step its callers get their tokens, and most send the next request within a millisecond or two, but not
at the same instant. A step that starts with the first request costs as much as one with all of them. So the
loop waits for the callers that it has just answered, within these bounds:

- at most a share of the last step's time, and never longer than a fixed time;
- not for a caller that was too late the last time (agents, people, finished loops);
- not for a caller that is alone. (See also `Scheduler.may_delay_step`.)

If steps are shorter than the round trip to callers, no caller is back within that share. Steps would run with
a few requests each, and take CPU time from the senders of others. So while messages with new requests follow
each other closely, a step waits for more of them, at most two milliseconds.

Bookkeeping only: no clock, no queue.
"""

from __future__ import annotations

from collections.abc import Collection

# The wait as a share of the last step's time.
_MAX_SHARE = 0.25
_MAX_WAIT_NS = 20_000_000
# The wait while messages follow each other closely, if the next one is expected within that time.
_BUSY_WAIT_NS = 2_000_000
_BUSY_GAP_NS = _BUSY_WAIT_NS
# The moving average of the gap between messages covers about this many messages.
_GAP_MEMORY = 8
_LONGEST_GAP_NS = 10_000_000
# The most answered sequences to remember: more than are answered within a few steps.
_REMEMBERED = 1 << 14
_NEVER = 0, -1


class CoalescingWindow:
    """Tracks which sequences were answered by the last steps, and which come back in time. Times in ns."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        # Answered sequences without a new request yet: (answered_ns, the new request is in time until).
        # Oldest first.
        self._answered: dict[int, tuple[int, int]] = {}
        # Sequences whose last request was in time.
        self._punctual: set[int] = set()
        # Punctual sequences that the last step has answered and that have no new request yet.
        self._expected: set[int] = set()
        self._opened_ns = 0
        self._closes_ns = 0
        self._last_message_ns = 0
        self._mean_gap_ns = _LONGEST_GAP_NS

    def step_done(self, answered: Collection[int], now_ns: int, step_ns: int) -> None:
        """Note that a step took `step_ns` and answered these sequences. Stop waiting for earlier ones."""
        self._punctual -= self._expected
        self._expected = self._punctual.intersection(answered)
        self._opened_ns = now_ns
        self._closes_ns = now_ns + min(int(step_ns * _MAX_SHARE), _MAX_WAIT_NS)
        if not self._answered.keys().isdisjoint(answered):
            for sequence in answered:
                self._answered.pop(sequence, None)
        self._answered.update(dict.fromkeys(answered, (now_ns, self._closes_ns)))
        while len(self._answered) > _REMEMBERED:
            del self._answered[next(iter(self._answered))]

    def requests_arrived(self, sequences: Collection[int], arrived_ns: int) -> None:
        """Note requests for sequences. A sequence whose request is in time will be waited for the next time.

        `arrived_ns` is when the message arrived, even if the requests were only taken a step later. Otherwise
        two halves of the callers, each arriving during the other's step, would never share a step. All
        requests of a message have the same time.
        """
        if arrived_ns != self._last_message_ns:
            gap_ns = min(arrived_ns - self._last_message_ns, _LONGEST_GAP_NS)
            self._mean_gap_ns += (gap_ns - self._mean_gap_ns) // _GAP_MEMORY
            self._last_message_ns = arrived_ns
        pop = self._answered.pop
        self._punctual.update([each for each in sequences if arrived_ns <= pop(each, _NEVER)[1]])
        self._expected.difference_update(sequences)

    def forget(self, sequence: int) -> None:
        """Note that a sequence was released."""
        self._answered.pop(sequence, None)
        self._punctual.discard(sequence)
        self._expected.discard(sequence)

    def remaining_ns(self, now_ns: int, waiting: int) -> int:
        """How much longer to wait while `waiting` requests are queued. 0: start the step."""
        if not waiting:
            # There is nothing to delay: the loop waits for the first request anyway.
            return 0
        closes_ns = self._closes_ns if self._expected else 0
        if self._answered and self._mean_gap_ns <= _BUSY_GAP_NS:
            last_ns, _ = self._answered[next(reversed(self._answered))]
            if last_ns > self._opened_ns - _MAX_WAIT_NS:
                closes_ns = max(closes_ns, self._opened_ns + _BUSY_WAIT_NS)
        return max(0, closes_ns - now_ns)

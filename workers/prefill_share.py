"""How many prompt tokens a step may hold while others decode.

Who decodes waits for every step whole, and a step full of prompt tokens takes many times as long as one of
decodes alone. So beside decodes of other callers a step gets so many prompt tokens as make it about twice as
long. Who comes back at once waits twice as long as alone, and who comes back in the middle of a step also for
the rest of that. Half of the time is the prompts'. Who decodes and prefills himself knows what he asks for,
and is not held back by himself.

How long steps take is learnt. A number that was set instead holds for all, whoever they are.

No clock: times are given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

# What prompt tokens may add to a step of decodes, in lengths of such a step.
_MOST_ADDED = 1.0
# So many steps after his last decode a caller is expected back.
_REMEMBERED_STEPS = 8
# A page: prompts go on, whatever a step seems to take.
_LEAST_TOKENS = 16
# Of a step, until it is known how long steps take.
_UNKNOWN_SHARE = 8
# How much of what was learnt an older step still counts for, at the next.
_MEMORY = 0.95


class PrefillShare:
    """The bound of one step after the other. Owned by the scheduler."""

    def __init__(self, fixed: int | None, max_batch_tokens: int) -> None:
        """Set the bound once and for all, or leave it to be learnt.

        Args:
            fixed: Most prompt tokens of a step that decodes, or follows one that did; None: learnt.
            max_batch_tokens: Most tokens of any step.
        """
        self._fixed = fixed
        self._most = max_batch_tokens
        # Who decoded in each of the last steps.
        self._decoded: deque[frozenset[int]] = deque(maxlen=2 if fixed else _REMEMBERED_STEPS)
        self._decode_ns = _Mean()  # a step of decodes alone
        self._token_ns = _Mean()  # what each prompt token adds to a step

    def stepped(self, decoding: Iterable[int]) -> None:
        """Note who decodes in the step that is put together. Comes before `tokens`."""
        self._decoded.append(frozenset(decoding))

    def protects(self, prefilling: Collection[int]) -> bool:
        """Whether prompts of these callers are held back for the sake of somebody who decodes."""
        if self._fixed is not None:
            return self._fixed < self._most
        return any(set(prefilling) != {caller} for decoding in self._decoded for caller in decoding)

    def tokens(self, prefilling: Collection[int]) -> int:
        """Most prompt tokens in the step, with prompts of these callers at hand."""
        if not any(self._decoded) or not self.protects(prefilling):
            return self._most
        if self._fixed is not None:
            return self._fixed
        if not (self._decode_ns.known and self._token_ns.known):
            return max(_LEAST_TOKENS, self._most // _UNKNOWN_SHARE)
        added = _MOST_ADDED * self._decode_ns.value / self._token_ns.value
        return int(min(max(added, _LEAST_TOKENS), self._most))

    def learn(self, prompt_tokens: int, took_ns: int) -> None:
        """Note how long a step took that had so many prompt tokens."""
        if not prompt_tokens:
            self._decode_ns.add(took_ns, 1)
        elif prompt_tokens >= _LEAST_TOKENS:
            # A step costs something without them, but never nearly all of what it takes with them.
            added_ns = max(took_ns - self._decode_ns.value, took_ns / 4)
            self._token_ns.add(added_ns, prompt_tokens)


class _Mean:
    """A mean in which older values count less."""

    def __init__(self) -> None:
        self.value = 0.0
        self._weight = 0.0
        self._sum = 0.0

    @property
    def known(self) -> bool:
        return self._weight > 0

    def add(self, total: float, count: int) -> None:
        self._sum = self._sum * _MEMORY + total
        self._weight = self._weight * _MEMORY + count
        self.value = self._sum / self._weight

"""Speculative decoding of one sample: which tokens are drafted, and how many.

A step verifies a draft together with the next token. A draft token is kept only if the model chooses the same
one there (VERIFY_ACCEPT_SAMPLED), so a wrong draft costs time, but never changes the text. There are two
sources. Prompt lookup: what followed an earlier occurrence of the last tokens is likely to follow again, as
in edits of code, answers that quote their prompt, or lists. And a draft model, whose tokens come with the
answer to an append that asks for them. Pure: times are arguments.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Final

# Looks for the last four tokens, then for the last three. Two often occur again by chance.
_NGRAMS: Final = (4, 3)
# Earlier tokens are forgotten: a lookup takes 0.05 ms, and at worst half a millisecond.
_MAX_TOKENS: Final = 8_192
_TOKEN_BYTES: Final = 4
_MAX_BYTES: Final = _MAX_TOKENS * _TOKEN_BYTES
# The most tokens of a draft, and by default; how many are drafted at first, and at least.
MAX_DRAFT_TOKENS: Final = 63
DEFAULT_DRAFT_TOKENS: Final = 15
_FIRST_LENGTH: Final = 4
_MIN_LENGTH: Final = 2
# The weight of the last step in averages.
_WEIGHT: Final = 0.3
# After a draft that did not pay off: how many tokens are decoded without drafts.
_MIN_PAUSE, _MAX_PAUSE = 16, 512
# The time that drafts may lose, as a share of the time of decoding without them in pauses.
_MAX_LOSS: Final = 0.02
# So often a draft model is asked in vain before a pause. It may have a long prompt to compute first.
_MAX_MISSED: Final = 8


class PromptLookup:
    """Owner of the last tokens of a sequence."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._tokens = bytearray(array("I", token_ids[-_MAX_TOKENS:]).tobytes())

    @property
    def token_ids(self) -> Sequence[int]:
        return array("I", bytes(self._tokens))

    def push(self, token_id: int) -> None:
        self._tokens += token_id.to_bytes(_TOKEN_BYTES, "little")
        if len(self._tokens) > _MAX_BYTES:
            del self._tokens[: _MAX_BYTES // 8]

    def draft(self, length: int) -> Sequence[int]:
        """`length` tokens that may follow, or none. A text that repeats itself is continued so."""
        begin = self._followed_before()
        if begin is None:
            return ()
        known = array("I", bytes(self._tokens[begin : begin + length * _TOKEN_BYTES]))
        period = len(known)
        for index in range(period, length):
            known.append(known[index - period])
        return known

    def _followed_before(self) -> int | None:
        """The byte offset of what followed the latest earlier occurrence of the last tokens."""
        tokens = self._tokens
        for ngram in _NGRAMS:
            size = ngram * _TOKEN_BYTES
            if len(tokens) <= size:
                continue
            last = bytes(tokens[-size:])
            # Its beginning is before that of the last tokens, which it may overlap.
            end = len(tokens) - _TOKEN_BYTES
            while (found := tokens.rfind(last, 0, end)) >= 0:
                if found % _TOKEN_BYTES == 0:
                    return found + size
                end = found + size - 1
        return None


class DraftLength:
    """How many tokens are drafted: more while they are accepted, and none while drafts do not pay off.

    What counts is the time of steps with and without drafts as the sample has seen it, so also what other
    callers' rows in the step cost. A try after a pause shows whether that has changed.

    What tries have lost against decoding is made up for in pauses, unless later tries gain it back: a pause
    is so long that the loss is at most `_MAX_LOSS` of its time. What is more than the longest pause makes up
    for is left to the next ones.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._length = min(_FIRST_LENGTH, most)
        self._pause = _MIN_PAUSE
        self._paused_tokens = 0
        # Averages: the seconds of a step that decodes and of one that verifies, and the tokens of the latter.
        self._decode_s: float | None = None
        self._verify_s: float | None = None
        self._verified: float = 0.0
        # What tries have lost, and neither other tries nor pauses have made up for.
        self._lost_s: float = 0.0

    @property
    def current(self) -> int:
        """The length of the next draft. 0: none, also until a step without one was measured."""
        return 0 if self._paused_tokens or self._decode_s is None else self._length

    @property
    def is_next(self) -> bool:
        """Whether there is one after another step without."""
        return self._paused_tokens <= 1

    def pause(self) -> None:
        """No drafts for a while: for longer than the last time, unless some have paid off since."""
        paused, self._pause = self._pause, min(2 * self._pause, _MAX_PAUSE)
        if self._decode_s:
            made_up_s = _MAX_LOSS * self._decode_s
            paused = min(max(paused, math.ceil(self._lost_s / made_up_s)), _MAX_PAUSE)
            self._lost_s = max(0.0, self._lost_s - paused * made_up_s)
        self._paused_tokens = paused
        # The next try is judged by itself: the text may have changed.
        self._verify_s = None

    def decoded(self, took_s: float) -> None:
        """A step without a draft."""
        self._decode_s = _average(self._decode_s, took_s)
        self._paused_tokens = max(0, self._paused_tokens - 1)

    def tried(self, tokens: int, took_s: float) -> None:
        """A step of so many tokens that verified a draft, or in which one was made."""
        assert self._decode_s is not None
        self._lost_s = max(0.0, self._lost_s + took_s - tokens * self._decode_s)

    def verified(self, drafted: int, accepted: int, took_s: float) -> None:
        """A step with a draft, of which some tokens were accepted."""
        self.tried(1 + accepted, took_s)
        is_first = self._verify_s is None
        self._verify_s = _average(self._verify_s, took_s)
        self._verified = _average(None if is_first else self._verified, 1.0 + accepted)
        if accepted == drafted:
            self._length = min(2 * self._length, self._most)
        else:
            self._length = min(max(accepted + 1, _MIN_LENGTH), self._most)
        if accepted and self._pays_off:
            self._pause = _MIN_PAUSE
        else:
            self.pause()

    @property
    def _pays_off(self) -> bool:
        assert self._decode_s is not None and self._verify_s is not None
        return self._verified * self._decode_s > self._verify_s


class Drafter:
    """The drafts of one sample."""

    def __init__(self, prompt: Sequence[int], most: int, *, has_model: bool = False) -> None:
        """`most`: the most tokens of a draft. `has_model`: a draft model has them, and not the prompt."""
        self._lookup = None if has_model else PromptLookup(prompt)
        self._length = DraftLength(most)
        # The draft model's tokens after the last one; and how often in a row there were none.
        self._offered: Sequence[int] = ()
        self._missed = 0
        self._is_accepted = False
        # Tokens of drafts, and those that were accepted.
        self.drafted = self.accepted = 0

    @property
    def expects_draft(self) -> bool:
        """Whether the append after one that decodes will probably be none that decodes as well."""
        return self._is_accepted if self._lookup is not None else self._length.is_next

    def push(self, token_id: int) -> None:
        """The sample has one more token."""
        if self._lookup is not None:
            self._lookup.push(token_id)

    def wanted(self, room: int) -> int:
        """How many tokens the draft model is to draft after that which the next append chooses."""
        return self.most(room) if self._lookup is None else 0

    def most(self, room: int) -> int:
        """How many tokens are drafted now: at most `room`."""
        return max(0, min(self._length.current, room))

    def draft(self, room: int) -> Sequence[int]:
        """The tokens that are verified after the last one, as many as `most` says or fewer."""
        length = self.most(room)
        if not length:
            return ()
        return self._offered[:length] if self._lookup is None else self._lookup.draft(length)

    def stepped(
        self, drafted: int, kept: int, took_s: float, *, wanted: int = 0, offered: Sequence[int] = ()
    ) -> None:
        """The sample has taken a step.

        drafted: How many tokens of a draft it verified; 0: it decoded.
        kept: How many tokens it appended, the one before the draft among them.
        wanted, offered: How many tokens the draft model was to draft, and what it expects.
        """
        if drafted:
            self._length.verified(drafted, kept - 1, took_s)
            self.drafted += drafted
            self.accepted += kept - 1
        elif wanted:
            self._length.tried(1, took_s)
        else:
            self._length.decoded(took_s / kept)
        self._is_accepted = drafted > 0 and kept > 1
        self._offered = offered
        if wanted:
            self._missed = 0 if offered else self._missed + 1
            if self._missed == _MAX_MISSED:
                self._missed = 0
                self._length.pause()


def _average(before: float | None, value: float) -> float:
    return value if before is None else before + _WEIGHT * (value - before)

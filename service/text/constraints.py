"""Constraints of callers as masks of tokens: JSON Schema, regular expressions, Lark grammars.

A grammar is tried in one process before another makes masks of it, so that what takes long to be refused does
not keep those waiting whose grammars are in use. Both are asked in threads that do nothing else. All who want
a grammar wait for one trial of it, which once begun goes on to its end, whoever leaves, and is remembered.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass

from service.errors import Draining, InvalidArgument, QuireError
from service.printable import escaped
from service.text.grammar_engine import ConstraintFailed, Grammar, GrammarEngine, SampleState, Vocabulary
from service.text.matcher import Matcher

MAX_GRAMMAR_BYTES = 64 << 10
MAX_REMEMBERED = 256
MAX_REMEMBERED_BYTES = 4 << 20
IDLE_S = 300.0
_MAX_REASON_CHARACTERS = 300
# Those who want masks take turns in so many threads: the process answers one at a time.
_MASK_THREADS = 4


class Constraints:
    """Those of one model. Used from one event loop; what it hands out in any thread."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        """`vocab_size`: of the model's logits, which may be more or less than the tokenizer's tokens."""
        self._vocab_size = vocab_size
        self._nothing = bytes(-(-vocab_size // 8))
        tokens = vocabulary.tokens[:vocab_size]
        self._num_tokens = len(tokens)
        special_ids = [token_id for token_id in vocabulary.special_ids if token_id < len(tokens)]
        known = Vocabulary(tokens, special_ids)
        self._trial, self._masks = GrammarEngine(known), GrammarEngine(known)
        # A grammar is tried at a time.
        self._trial_thread = ThreadPoolExecutor(1, "trial")
        self.mask_threads = ThreadPoolExecutor(_MASK_THREADS, "mask")
        self._trials: dict[Grammar, _Trial] = {}
        # What became of each grammar: None, or why it is refused.
        self._tried: OrderedDict[Grammar, str | None] = OrderedDict()
        self._tried_bytes = 0
        self._watch: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def factory(self, kind: str, text: str, end_ids: frozenset[int]) -> Callable[[], Matcher]:
        """What makes a matcher for each sample. `kind` is a field of Constraint.

        One that was tried before waits for nobody. Raises InvalidArgument, or Draining at the end.
        """
        size = len(text.encode())
        if size > MAX_GRAMMAR_BYTES:
            raise _bad(kind, f"at most {MAX_GRAMMAR_BYTES} bytes are taken, got {size}")
        key = hashlib.sha256(f"{kind}\n{text}".encode()).hexdigest()
        grammar = Grammar(key, kind, text)
        if grammar in self._tried:
            self._tried.move_to_end(grammar)
            reason = self._tried[grammar]
        else:
            reason = await self._try(grammar)
        if reason is not None:
            raise _bad(kind, reason)
        return lambda: GrammarMatcher(self, SampleState(grammar), end_ids)

    def mask(self, state: SampleState, end_ids: frozenset[int]) -> tuple[bool, bytes]:
        """Whether nothing may follow, and the mask. Blocks. Raises ConstraintFailed."""
        may_end, bits = self._masks.mask(state)
        mask = bytearray(self._nothing)
        used = -(-self._num_tokens // 8)
        mask[:used] = bits[:used].ljust(used, b"\0")
        # Behind the tokens there is the library's own, for the end.
        if self._num_tokens % 8:
            mask[used - 1] &= (1 << self._num_tokens % 8) - 1
        ends = [end_id for end_id in end_ids if end_id < self._vocab_size]
        for end_id in ends:
            mask[end_id >> 3] &= ~(1 << (end_id & 7))
        is_over = mask == self._nothing
        if is_over and not may_end:
            raise ConstraintFailed("none of the model's tokens can follow")
        if may_end:
            for end_id in ends:
                mask[end_id >> 3] |= 1 << (end_id & 7)
        return is_over, bytes(mask)

    def close(self) -> None:
        """Ends the processes. May be called again."""
        self._is_closed = True
        if self._watch is not None:
            self._watch.cancel()
        self._trial_thread.shutdown(wait=False, cancel_futures=True)
        self.mask_threads.shutdown(wait=False)
        # Whoever is still answered is told that there is nothing to ask.
        self._trial.close()
        self._masks.close()

    async def _try(self, grammar: Grammar) -> str | None:
        """Finds out why a grammar is refused, if it is. Raises Draining."""
        trial = self._trials.get(grammar)
        if trial is None:
            trial = self._trials[grammar] = self._begin_trial(grammar)
        trial.num_waiting += 1
        try:
            return await asyncio.shield(trial.found)
        except asyncio.CancelledError:
            if trial.found.cancelled():
                raise Draining from None
            raise
        finally:
            trial.num_waiting -= 1
            if not trial.num_waiting and trial.asked.cancel():
                # It had not begun, and nobody wants to know any more.
                self._trials.pop(grammar, None)

    def _begin_trial(self, grammar: Grammar) -> _Trial:
        self._watch_for_idle()
        try:
            asked = self._trial_thread.submit(self._why_not, grammar)
        except RuntimeError:
            # The server ends, and its threads with it.
            raise Draining from None
        trial = _Trial(asked, asyncio.wrap_future(asked))
        # Before those who wait go on.
        trial.found.add_done_callback(lambda _: self._end_trial(grammar, trial))
        return trial

    def _end_trial(self, grammar: Grammar, trial: _Trial) -> None:
        if self._trials.get(grammar) is trial:
            del self._trials[grammar]
        if not trial.found.cancelled() and trial.found.exception() is None:
            self._remember(grammar, trial.found.result())

    def _why_not(self, grammar: Grammar) -> str | None:
        try:
            self._trial.compile(grammar)
        except ConstraintFailed as error:
            return _sanitized(error)
        return None

    def _remember(self, grammar: Grammar, reason: str | None) -> None:
        self._tried[grammar] = reason
        self._tried_bytes += len(grammar.text)
        while len(self._tried) > MAX_REMEMBERED or self._tried_bytes > MAX_REMEMBERED_BYTES:
            forgotten, _ = self._tried.popitem(last=False)
            self._tried_bytes -= len(forgotten.text)

    def _watch_for_idle(self) -> None:
        """Ends processes that nobody has wanted for a while, and looks again while there are others."""
        if self._watch is not None or self._is_closed:
            return
        self._watch = asyncio.get_running_loop().call_later(IDLE_S, self._end_idle)

    def _end_idle(self) -> None:
        self._watch = None
        are_ended = [engine.end_if_idle(IDLE_S) for engine in (self._trial, self._masks)]
        if not all(are_ended):
            self._watch_for_idle()


@dataclass(eq=False, slots=True)
class _Trial:
    """A grammar that is being tried, or is to be."""

    asked: concurrent.futures.Future[str | None]
    # The same, in the event loop.
    found: asyncio.Future[str | None]
    num_waiting: int = 0


class GrammarMatcher:
    """One sample under a grammar. See `Matcher`."""

    def __init__(self, constraints: Constraints, state: SampleState, end_ids: frozenset[int]) -> None:
        self._constraints = constraints
        self._state = state
        self._end_ids = end_ids
        # Of the state as it is; None: not known.
        self._mask: bytes | None = None
        self._is_complete = False

    @property
    def threads(self) -> Executor:
        """See `Matcher`."""
        return self._constraints.mask_threads

    @property
    def is_complete(self) -> bool:
        """See `Matcher`."""
        return self._is_complete

    def take(self, token_id: int) -> None:
        """See `Matcher`."""
        mask = self._mask
        if mask is not None and not mask[token_id >> 3] >> (token_id & 7) & 1:
            raise ValueError(f"the constraint does not allow token {token_id}")
        self._mask, self._is_complete = None, False
        self._state.token_ids.append(token_id)

    def allowed(self) -> bytes:
        """See `Matcher`. Where nothing may follow and there is no end token, no bit is set."""
        if self._mask is None:
            kind = self._state.grammar.kind
            try:
                self._is_complete, self._mask = self._constraints.mask(self._state, self._end_ids)
            except ConstraintFailed as error:
                raise _bad(kind, _sanitized(error)) from None
            if not self._state.token_ids and not any(self._mask):
                raise _bad(kind, "only the empty text is allowed, and there is no token to end it with")
        return self._mask


def _bad(kind: str, reason: str) -> QuireError:
    return InvalidArgument("BAD_CONSTRAINT", f"constraint.{kind}", f"the constraint cannot be kept: {reason}")


def _sanitized(error: ConstraintFailed) -> str:
    """In one line, which others may have written."""
    return escaped(" ".join(str(error).split()))[:_MAX_REASON_CHARACTERS]

"""Constraints of callers as token masks: JSON Schema, regular expressions, Lark grammars.

One process checks new grammars, and another computes masks of those that passed, so a slow check does not
delay samples that run. Each process has its own threads. Callers of the same grammar share one check. A check
that has begun runs to its end, even if its callers leave, and its result is cached.
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

MAX_GRAMMAR_BYTES = 64 << 10
MAX_CACHED = 256
MAX_CACHED_BYTES = 4 << 20
IDLE_S = 300.0
_MAX_REASON_CHARACTERS = 300
# Threads that wait for masks. The process computes one at a time.
_MASK_THREADS = 4


class Constraints:
    """The constraints of one model. Used from one event loop; its matchers in any thread."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        """`vocab_size`: of the model's logits; may be more or less than the tokenizer's tokens."""
        self._vocab_size = vocab_size
        self._empty_mask = bytes(-(-vocab_size // 8))
        tokens = vocabulary.tokens[:vocab_size]
        self._num_tokens = len(tokens)
        special_ids = [token_id for token_id in vocabulary.special_ids if token_id < len(tokens)]
        usable = Vocabulary(tokens, special_ids)
        self._check_engine, self._mask_engine = GrammarEngine(usable), GrammarEngine(usable)
        # One grammar is checked at a time.
        self._check_thread = ThreadPoolExecutor(1, "check")
        self.mask_threads = ThreadPoolExecutor(_MASK_THREADS, "mask")
        self._checks: dict[Grammar, _Check] = {}
        # Results of checks, least recently used first: None, or why the grammar is refused.
        self._results: OrderedDict[Grammar, str | None] = OrderedDict()
        self._results_bytes = 0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def matcher_factory(self, kind: str, text: str, end_ids: frozenset[int]) -> Callable[[], Matcher]:
        """A function that makes a matcher for each sample. `kind` is a field of Constraint.

        Does not wait if the grammar was checked before. Raises InvalidArgument, or Draining once closed.
        """
        size = len(text.encode())
        if size > MAX_GRAMMAR_BYTES:
            raise _bad_constraint(kind, f"it may have at most {MAX_GRAMMAR_BYTES} bytes and has {size}")
        key = hashlib.sha256(f"{kind}\n{text}".encode()).hexdigest()
        grammar = Grammar(key, kind, text)
        if grammar in self._results:
            self._results.move_to_end(grammar)
            reason = self._results[grammar]
        else:
            reason = await self._check(grammar)
        if reason is not None:
            raise _bad_constraint(kind, reason)
        return lambda: Matcher(self, SampleState(grammar), end_ids)

    def mask(self, state: SampleState, end_ids: frozenset[int]) -> tuple[bool, bytes]:
        """Whether no further token may follow, and the mask. Blocks. Raises ConstraintFailed."""
        may_end, bits = self._mask_engine.mask(state)
        mask = bytearray(self._empty_mask)
        used = -(-self._num_tokens // 8)
        mask[:used] = bits[:used].ljust(used, b"\0")
        # Clears the bit of the token that the library appends for the end of a text.
        if self._num_tokens % 8:
            mask[used - 1] &= (1 << self._num_tokens % 8) - 1
        ends = [end_id for end_id in end_ids if end_id < self._vocab_size]
        for end_id in ends:
            mask[end_id >> 3] &= ~(1 << (end_id & 7))
        is_complete = mask == self._empty_mask
        if is_complete and not may_end:
            raise ConstraintFailed("none of the model's tokens can follow")
        if may_end:
            for end_id in ends:
                mask[end_id >> 3] |= 1 << (end_id & 7)
        return is_complete, bytes(mask)

    def close(self) -> None:
        """Ends the processes. Idempotent."""
        self._is_closed = True
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._check_thread.shutdown(wait=False, cancel_futures=True)
        self.mask_threads.shutdown(wait=False)
        # Tasks that still run in the threads fail.
        self._check_engine.close()
        self._mask_engine.close()

    async def _check(self, grammar: Grammar) -> str | None:
        """Why a grammar is refused; None: it is not. Raises Draining."""
        check = self._checks.get(grammar)
        if check is None:
            check = self._checks[grammar] = self._begin_check(grammar)
        check.num_waiting += 1
        try:
            return await asyncio.shield(check.result)
        except asyncio.CancelledError:
            if check.result.cancelled():
                raise Draining from None
            raise
        finally:
            check.num_waiting -= 1
            if not check.num_waiting and check.job.cancel():
                # It has not begun, and its last caller has left.
                self._checks.pop(grammar, None)

    def _begin_check(self, grammar: Grammar) -> _Check:
        self._set_idle_timer()
        try:
            job = self._check_thread.submit(self._run_check, grammar)
        except RuntimeError:
            # The thread has been shut down.
            raise Draining from None
        check = _Check(job, asyncio.wrap_future(job))
        # Runs before the waiting callers continue.
        check.result.add_done_callback(lambda _: self._end_check(grammar, check))
        return check

    def _run_check(self, grammar: Grammar) -> str | None:
        try:
            self._check_engine.compile(grammar)
        except ConstraintFailed as error:
            return _sanitized(error)
        return None

    def _end_check(self, grammar: Grammar, check: _Check) -> None:
        if self._checks.get(grammar) is check:
            del self._checks[grammar]
        if check.result.cancelled() or check.result.exception() is not None:
            return
        self._results[grammar] = check.result.result()
        self._results_bytes += len(grammar.text)
        while len(self._results) > MAX_CACHED or self._results_bytes > MAX_CACHED_BYTES:
            evicted, _ = self._results.popitem(last=False)
            self._results_bytes -= len(evicted.text)

    def _set_idle_timer(self) -> None:
        if self._idle_timer is not None or self._is_closed:
            return
        self._idle_timer = asyncio.get_running_loop().call_later(IDLE_S, self._end_idle)

    def _end_idle(self) -> None:
        self._idle_timer = None
        are_ended = [engine.end_if_idle(IDLE_S) for engine in (self._check_engine, self._mask_engine)]
        if not all(are_ended):
            self._set_idle_timer()


@dataclass(eq=False, slots=True)
class _Check:
    """A check of a grammar that is queued or runs."""

    job: concurrent.futures.Future[str | None]
    # The result of `job`, for the event loop.
    result: asyncio.Future[str | None]
    num_waiting: int = 0


class Matcher:
    """Applies a grammar to one sample, token by token."""

    def __init__(self, constraints: Constraints, state: SampleState, end_ids: frozenset[int]) -> None:
        self._constraints = constraints
        self._state = state
        self._end_ids = end_ids
        # The mask after the tokens so far; None: not computed yet.
        self._mask: bytes | None = None
        self._is_complete = False

    @property
    def threads(self) -> Executor:
        """Where to call `allowed`, so that it does not block the default executor."""
        return self._constraints.mask_threads

    @property
    def is_complete(self) -> bool:
        """Whether no further token may follow. Known after `allowed`; False after `take` until then."""
        return self._is_complete

    def take(self, token_id: int) -> None:
        """Appends the chosen token. Does not block. Raises ValueError if the last mask does not allow it."""
        mask = self._mask
        if mask is not None and not mask[token_id >> 3] >> (token_id & 7) & 1:
            raise ValueError(f"the constraint does not allow token {token_id}")
        self._mask, self._is_complete = None, False
        self._state.token_ids.append(token_id)

    def allowed(self) -> bytes:
        """Which tokens may follow, as TokenMask.packed. Blocks; may be called in any thread.

        No bit is set if no token may follow and there is no end token.

        Raises:
            QuireError: The constraint cannot be applied any further.
        """
        if self._mask is None:
            kind = self._state.grammar.kind
            try:
                self._is_complete, self._mask = self._constraints.mask(self._state, self._end_ids)
            except ConstraintFailed as error:
                raise _bad_constraint(kind, _sanitized(error)) from None
            if not self._state.token_ids and not any(self._mask):
                raise _bad_constraint(
                    kind, "it allows only the empty text, and there is no token to end that with"
                )
        return self._mask


def _bad_constraint(kind: str, reason: str) -> QuireError:
    return InvalidArgument(
        "BAD_CONSTRAINT", f"constraint.{kind}", f"the constraint cannot be applied: {reason}"
    )


def _sanitized(error: ConstraintFailed) -> str:
    """The error in one printable line: parts of it may come from the caller."""
    return escaped(" ".join(str(error).split()))[:_MAX_REASON_CHARACTERS]

"""Constraints of callers as token masks: JSON Schema, regular expressions, Lark grammars.

One process checks new grammars, and another computes masks of those that passed, so a slow check does not
delay samples that run. Each process has its own threads. A check that has begun runs to its end, even if its
caller leaves, and its result is kept for all callers.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

from service.errors import Draining, InvalidArgument, QuireError
from service.printable import escaped
from service.text.grammar_engine import ConstraintFailed, Grammar, GrammarEngine, SampleState

MAX_GRAMMAR_BYTES = 64 << 10
MAX_RESULTS = 256
_MAX_REASON_CHARACTERS = 300
# Threads that wait for masks. The process computes one at a time.
_MASK_THREADS = 4


class Constraints:
    """The constraints of one tokenizer. Used from one event loop; its matchers in any thread."""

    def __init__(self, tokens: Sequence[bytes], special_ids: Sequence[int]) -> None:
        """`tokens`, `special_ids`: as for GrammarEngine."""
        self.num_tokens = len(tokens)
        self._checks, self.masks = GrammarEngine(tokens, special_ids), GrammarEngine(tokens, special_ids)
        # One grammar is checked at a time.
        self._check_threads = ThreadPoolExecutor(1, "check")
        self.mask_threads = ThreadPoolExecutor(_MASK_THREADS, "mask")
        # By key of a grammar why it is refused, or nothing; the oldest first. Only the check's thread writes.
        self._results: dict[str, str] = {}
        self._is_closed = False

    async def matcher_factory(
        self, kind: str, text: str, end_ids: frozenset[int], vocab_size: int
    ) -> Callable[[], Matcher]:
        """A function that makes a matcher for each sample. `kind` is a field of Constraint.

        `vocab_size`: of the model's logits; may be more or less than the tokenizer's tokens.
        Does not wait if the grammar was checked before. Raises InvalidArgument, or Draining once closed.
        """
        size = len(text.encode())
        if size > MAX_GRAMMAR_BYTES:
            raise _bad_constraint(kind, f"it may have at most {MAX_GRAMMAR_BYTES} bytes and has {size}")
        grammar = Grammar(hashlib.sha256(f"{kind}\n{text}".encode()).hexdigest(), kind, text)
        reason = self._results.get(grammar.key)
        if reason is None:
            if self._is_closed:
                raise Draining
            loop = asyncio.get_running_loop()
            reason = await loop.run_in_executor(self._check_threads, self._check, grammar)
        if reason:
            raise _bad_constraint(kind, reason)
        return lambda: Matcher(self, grammar, end_ids, vocab_size)

    def close(self) -> None:
        """Ends the processes. Running and waiting checks and masks fail with Draining. Idempotent."""
        self._is_closed = True
        self._checks.close()
        self.masks.close()
        self._check_threads.shutdown(wait=False)
        self.mask_threads.shutdown(wait=False)

    def _check(self, grammar: Grammar) -> str:
        """Why a grammar is refused; empty: it is not. Raises Draining."""
        reason = self._results.get(grammar.key)
        if reason is None:
            try:
                self._checks.compile(grammar)
                reason = ""
            except ConstraintFailed as error:
                reason = _sanitized(error)
            self._results[grammar.key] = reason
            if len(self._results) > MAX_RESULTS:
                del self._results[next(iter(self._results))]
        return reason


class Matcher:
    """Applies a grammar to one sample, token by token."""

    def __init__(
        self, constraints: Constraints, grammar: Grammar, end_ids: frozenset[int], vocab_size: int
    ) -> None:
        self._constraints = constraints
        self._state = SampleState(grammar)
        self._end_ids = end_ids
        self._vocab_size = vocab_size
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
            QuireError: The constraint cannot be applied any further, or the server is stopping.
        """
        if self._mask is None:
            try:
                self._mask = self._compute_mask()
            except ConstraintFailed as error:
                raise _bad_constraint(self._state.grammar.kind, _sanitized(error)) from None
        return self._mask

    def _compute_mask(self) -> bytes:
        """Also sets `is_complete`. Raises ConstraintFailed or Draining."""
        may_end, bits = self._constraints.masks.mask(self._state)
        # As masks: bit n is token n. Without the token that the library appends for the end of a text. Not
        # kept: for each of many samples they are as large as its mask.
        tokens = (1 << min(self._constraints.num_tokens, self._vocab_size)) - 1
        ends = sum(1 << end_id for end_id in self._end_ids if end_id < self._vocab_size)
        allowed = int.from_bytes(bits, "little") & tokens & ~ends
        self._is_complete = not allowed
        if may_end:
            allowed |= ends
        elif self._is_complete:
            raise ConstraintFailed("none of the model's tokens can follow")
        if not allowed and not self._state.token_ids:
            raise ConstraintFailed("it allows only the empty text, and there is no token to end that with")
        return allowed.to_bytes(-(-self._vocab_size // 8), "little")


def _bad_constraint(kind: str, reason: str) -> QuireError:
    return InvalidArgument(
        "BAD_CONSTRAINT", f"constraint.{kind}", f"the constraint cannot be applied: {reason}"
    )


def _sanitized(error: ConstraintFailed) -> str:
    """The error in one printable line: parts of it may come from the caller."""
    return escaped(" ".join(str(error).split()))[:_MAX_REASON_CHARACTERS]

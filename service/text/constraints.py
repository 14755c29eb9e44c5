"""Constraints of callers as token masks: JSON Schema, regular expressions, Lark grammars.

Sandboxed processes (`grammar_process.py`), which may crash, compile grammars and compute masks. One checks
new grammars, and another computes masks of those that passed, so a slow check does not delay samples that
run. After a crash a new process gets what the old one knew: a sample is defined by its grammar and its
tokens. A grammar that ends the process is refused.

A check that has begun runs to its end, even if its caller leaves, and its result is kept for all callers.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeVar

from service.errors import InvalidArgument, QuireError
from service.printable import escaped
from service.text import tasks
from service.text.task_pool import TaskPool
from service.text.task_process import TaskFailed, TaskProcess

MAX_GRAMMAR_BYTES = 64 << 10
MAX_RESULTS = 256
_MAX_REASON_CHARACTERS = 300
_sample_numbers = itertools.count()
_Result = TypeVar("_Result")


class ConstraintFailed(Exception):
    """A grammar cannot be used, or a sample cannot continue. The text is not sanitized."""

    def __init__(self, reason: str, *, fails_again: bool = True) -> None:
        super().__init__(reason)
        self.fails_again = fails_again


@dataclass(frozen=True, slots=True)
class Grammar:
    """A caller's grammar. `kind` is a field of Constraint."""

    kind: str
    text: str


class _Allowed(NamedTuple):
    """A bit for each token that may follow, and whether the text is finished: only end tokens may."""

    allowed: int
    is_complete: bool


class Constraints:
    """The constraints of one tokenizer. Used from one event loop, as are its matchers."""

    def __init__(self, tokens: Sequence[bytes], special_ids: Sequence[int]) -> None:
        """`tokens`: the bytes of each; empty: no text. Special ones have the names that grammars use."""
        self.num_tokens = len(tokens)
        # JSON has no bytes: a character stands for each.
        texts = [token.decode("latin-1") for token in tokens]
        vocabulary = {"method": "set_vocabulary", "special_ids": special_ids, "tokens": texts}
        setup_task = json.dumps(vocabulary).encode()
        self._checks = TaskPool(tasks.COMPILE, setup_task)
        self.masks = TaskPool(tasks.MASK, setup_task)
        # By digest why a grammar is refused, or nothing; the oldest first.
        self._results: dict[bytes, str] = {}

    async def matcher_factory(
        self, kind: str, text: str, end_ids: frozenset[int], vocab_size: int, tenant: str = ""
    ) -> Callable[[], Matcher]:
        """A function that makes a matcher for each sample. `kind` is a field of Constraint.

        `vocab_size`: of the model's logits; may be more or less than the tokenizer's tokens.
        Does not wait if the grammar was checked before. Otherwise tenants take turns. Raises InvalidArgument,
        or Draining once closed.
        """
        size = len(text.encode())
        if size > MAX_GRAMMAR_BYTES:
            raise _bad_constraint(kind, f"it may have at most {MAX_GRAMMAR_BYTES} bytes and has {size}")
        grammar, digest = Grammar(kind, text), hashlib.sha256(f"{kind}\n{text}".encode()).digest()
        reason = self._results.get(digest)
        if reason is None:
            check = functools.partial(self._check, grammar, digest)
            reason = await self._checks.run(check, tenant)
        if reason:
            raise _bad_constraint(kind, reason)
        return lambda: Matcher(self, grammar, end_ids, vocab_size, tenant)

    def close(self) -> None:
        """Ends the processes. Running and waiting checks and masks fail with Draining. Idempotent."""
        self._checks.close()
        self.masks.close()

    async def _check(self, grammar: Grammar, digest: bytes, process: TaskProcess) -> str:
        """Why a grammar is refused; empty: it is not. Raises TaskFailed if the process should try again."""
        reason = self._results.get(digest)
        if reason is None:
            try:
                await _run(process, {"method": "compile", **asdict(grammar)})
                reason = ""
            except ConstraintFailed as error:
                reason = _sanitized(error)
                if not error.fails_again:
                    return reason
            self._results[digest] = reason
            if len(self._results) > MAX_RESULTS:
                del self._results[next(iter(self._results))]
        return reason


class Matcher:
    """Applies a grammar to one sample, token by token."""

    def __init__(
        self,
        constraints: Constraints,
        grammar: Grammar,
        end_ids: frozenset[int],
        vocab_size: int,
        tenant: str = "",
    ) -> None:
        self._constraints = constraints
        self._tenant = tenant
        self._grammar = grammar
        self._end_ids = end_ids
        self._vocab_size = vocab_size
        self._token_ids: list[int] = []
        # Identifies the sample in the process, which may know the first `_num_known` tokens.
        self._number = next(_sample_numbers)
        self._num_known = 0
        # The mask after the tokens so far; None: not computed yet.
        self._mask: bytes | None = None
        # Whether no further token may follow. Known after `allowed`; False after `take` until then.
        self.is_complete = False

    async def in_turn(self, work: Callable[[TaskProcess], Coroutine[Any, Any, _Result]]) -> _Result:
        """Calls `work`, which awaits `allowed` of matchers of this kind, when it is the tenant's turn.

        Perhaps again with another process. Raises what `work` raises; Draining if the server is stopping.
        """
        return await self._constraints.masks.run(work, self._tenant)

    def take(self, token_id: int) -> None:
        """Appends the chosen token. Does not block. Raises ValueError if the last mask does not allow it."""
        mask = self._mask
        if mask is not None and not mask[token_id >> 3] >> (token_id & 7) & 1:
            raise ValueError(f"the constraint does not allow token {token_id}")
        self._mask, self.is_complete = None, False
        self._token_ids.append(token_id)

    async def allowed(self, process: TaskProcess) -> bytes:
        """Which tokens may follow, as TokenMask.packed. `process`: of `in_turn`.

        No bit is set if no token may follow and there is no end token. Raises InvalidArgument if the
        constraint cannot be applied any further; TaskFailed if another process should try.
        """
        _, masks = await self.allowed_along(process, (), 0)
        return masks[0]

    async def allowed_along(
        self, process: TaskProcess, draft: Sequence[int], most: int
    ) -> tuple[Sequence[int], Sequence[bytes]]:
        """The tokens of a draft that are allowed, and then those that are forced: at most `most` in all.

        And which tokens may follow, as of `allowed`: now, and after each of these, of which none ends the
        text. Raises as `allowed`.
        """
        if not most and self._mask is not None:
            return (), (self._mask,)
        try:
            drafted, masks = await self._compute_masks(process, draft, most)
        except ConstraintFailed as error:
            raise _bad_constraint(self._grammar.kind, _sanitized(error)) from None
        self.is_complete = masks[0].is_complete
        # After one of these the model has no token: that is for its own mask to say.
        ahead = itertools.takewhile(lambda mask: not mask.is_complete, masks[1:])
        size = -(-self._vocab_size // 8)
        packed = [mask.allowed.to_bytes(size, "little") for mask in (masks[0], *ahead)]
        self._mask = packed[0]
        return drafted[: len(packed) - 1], packed

    async def _compute_masks(
        self, process: TaskProcess, draft: Sequence[int], most: int
    ) -> tuple[Sequence[int], list[_Allowed]]:
        """As `allowed_along`. Raises ConstraintFailed, or TaskFailed if another process should try."""
        result, bits = await _run(process, self._request(draft, most))
        if "is_missing" in result:
            self._num_known = 0
            result, bits = await _run(process, self._request(draft, most))
        self._num_known = len(self._token_ids)
        others, ends = _token_bits(self._constraints.num_tokens, self._end_ids, self._vocab_size)
        masks, size = list[_Allowed](), len(bits) // len(result["may_end"])
        for index, may_end in enumerate(result["may_end"]):
            mask = int.from_bytes(bits[size * index : size * (index + 1)], "little") & others
            masks.append(_Allowed(mask | ends if may_end else mask, is_complete=not mask))
        if masks[0].is_complete and not result["may_end"][0]:
            raise ConstraintFailed("none of the model's tokens can follow")
        if not masks[0].allowed and not self._token_ids:
            raise ConstraintFailed("it allows only the empty text, and there is no token to end that with")
        return result["draft"], masks

    def _request(self, draft: Sequence[int], most: int) -> Mapping[str, Any]:
        """The request for masks: with the grammar if the process knows nothing of the sample."""
        grammar = {} if self._num_known else asdict(self._grammar)
        token_ids = self._token_ids[self._num_known :]
        sample = {"sample": self._number, "begin": self._num_known, "token_ids": token_ids}
        drafted = {"draft": [*draft][:most], "draft_tokens": most}
        return {"method": "mask", **grammar, **sample, **drafted}


@functools.lru_cache(maxsize=16)
def _token_bits(num_tokens: int, end_ids: frozenset[int], vocab_size: int) -> tuple[int, int]:
    """Masks of the tokens that do not end a text, and of those that do; bit n is token n.

    Without the token that the library appends for the end of a text. Kept, since each is as large as a mask.
    """
    tokens = (1 << min(num_tokens, vocab_size)) - 1
    ends = sum(1 << end_id for end_id in end_ids if end_id < vocab_size)
    return tokens & ~ends, ends


async def _run(process: TaskProcess, request: Mapping[str, Any]) -> tuple[Mapping[str, Any], bytes]:
    """The result of a task, and the bytes after it.

    Raises ConstraintFailed, or TaskFailed if something other than this task ended the process.
    """
    try:
        output = await process.run(json.dumps(request).encode())
    except TaskFailed as error:
        if error.is_task_fault:
            raise ConstraintFailed(f"it {error}", fails_again=error.fails_again) from None
        raise
    line, _, mask = output.partition(b"\n")
    result = json.loads(line)
    if "error" in result:
        raise ConstraintFailed(result["error"])
    return result, mask


def _bad_constraint(kind: str, reason: str) -> QuireError:
    return InvalidArgument(
        "BAD_CONSTRAINT", f"constraint.{kind}", f"the constraint cannot be applied: {reason}"
    )


def _sanitized(error: ConstraintFailed) -> str:
    """The error in one printable line: parts of it may come from the caller."""
    return escaped(" ".join(str(error).split()))[:_MAX_REASON_CHARACTERS]

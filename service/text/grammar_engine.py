"""Grammars and masks from a process of their own (`grammar_process.py`), which may die of them.

Whatever it loses is told to the next one: a sample here is its grammar and its tokens. A grammar that a
process dies of is given up. This side blocks, and is called in threads.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from service.text.task_process import Bounds, TaskFailed, TaskProcess

# For a grammar to be compiled, and for a mask to be made: both take some milliseconds as a rule.
MAX_CPU_S = 2.0
# Of it a vocabulary of 150,000 tokens takes some 150 MiB.
MAX_MEMORY_BYTES = 1 << 30
_MAX_ANSWER_BYTES = 16 << 20
_samples = itertools.count()


class ConstraintFailed(Exception):
    """A grammar cannot be used, or not any further. The text may hold anything."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a caller has sent: `kind` is a field of Constraint. `key` names it to the process."""

    key: str
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The bytes of each token, by id; empty: it says nothing. Special tokens have names."""

    tokens: Sequence[bytes]
    special_ids: Sequence[int] = ()

    def task(self) -> bytes:
        """What a new process is told first."""
        lengths = array("I", map(len, self.tokens)).tobytes()
        asked = {"do": "use", "special_ids": list(self.special_ids), "lengths_bytes": len(lengths)}
        return b"".join((json.dumps(asked).encode(), b"\n", lengths, *self.tokens))


@dataclass(eq=False, slots=True)
class SampleState:
    """A sample: its tokens, and how many of them which process knows."""

    grammar: Grammar
    token_ids: list[int] = field(default_factory=list)
    number: int = field(default_factory=lambda: next(_samples))
    process: TaskProcess | None = None
    num_known: int = 0


class GrammarEngine:
    """Owner of a process, which is started when it is needed. Thread-safe: one at a time is answered."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._first_task = vocabulary.task()
        self._process: TaskProcess | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self._used_s = time.monotonic()

    def compile(self, grammar: Grammar) -> None:
        """Finds out whether a grammar can be used. Raises ConstraintFailed."""
        asked = {"do": "compile", "key": grammar.key, "kind": grammar.kind, "text": grammar.text}
        with self._lock:
            self._ask(lambda _: asked)

    def mask(self, state: SampleState) -> tuple[bool, bytes]:
        """Whether a sample may end, and a bit for each token that may follow, and some more bits.

        Raises:
            ConstraintFailed: It cannot go on. No other sample is worse off.
        """
        with self._lock:
            # What is taken meanwhile is for the next time.
            token_ids = tuple(state.token_ids)
            said, mask = self._ask(lambda process: _asked(state, token_ids, process))
            if said.get("is_missing"):
                state.process = None
                said, mask = self._ask(lambda process: _asked(state, token_ids, process))
            state.process, state.num_known = self._process, len(token_ids)
        return said["may_end"], mask

    def end_if_idle(self, idle_s: float) -> bool:
        """Ends the process if it was not used for so long. Returns whether there is none."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._process is not None and time.monotonic() - self._used_s >= idle_s:
                self._process.end()
                self._process = None
            return self._process is None
        finally:
            self._lock.release()

    def close(self) -> None:
        """Ends the process; who waits for it fails. May be called again."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()
        # Whoever waits for it sees to the rest.
        self.end_if_idle(0)

    def _ask(self, asked: Callable[[TaskProcess], Mapping[str, Any]]) -> tuple[Mapping[str, Any], bytes]:
        """Does a task, which depends on what the process knows: again if earlier ones were to blame."""
        is_fresh = self._process is None
        try:
            process = self._ready()
            answer = process.ask(json.dumps(asked(process)).encode())
        except TaskFailed as error:
            self._process = None
            if is_fresh or error.is_own_doing or self._is_closed:
                raise ConstraintFailed(f"it {error}") from None
            return self._ask(asked)
        self._used_s = time.monotonic()
        line, _, mask = answer.partition(b"\n")
        said = json.loads(line)
        if "error" in said:
            raise ConstraintFailed(said["error"])
        return said, mask

    def _ready(self) -> TaskProcess:
        """A process that knows the tokens. Raises TaskFailed."""
        if self._is_closed:
            raise TaskFailed("was ended", is_own_doing=False)
        if self._process is None:
            bounds = Bounds(MAX_CPU_S, MAX_MEMORY_BYTES, _MAX_ANSWER_BYTES)
            self._process = TaskProcess("service.text.grammar_process", bounds)
            self._process.ask(self._first_task)
        return self._process


def _asked(state: SampleState, token_ids: Sequence[int], process: TaskProcess) -> Mapping[str, Any]:
    """The mask behind some tokens: all are told to a process that may not have them."""
    asked = {"do": "mask", "sample": state.number, "key": state.grammar.key}
    if state.process is process:
        return {**asked, "begin": state.num_known, "token_ids": token_ids[state.num_known :]}
    text = {"kind": state.grammar.kind, "text": state.grammar.text}
    return {**asked, **text, "begin": 0, "token_ids": token_ids}

"""Compiles grammars and computes masks in a sandboxed process (`grammar_process.py`), which may crash.

After a crash a new process gets what the old one knew: a sample is defined by its grammar and its tokens. A
grammar that ends the process is refused. This side blocks, so it is called in threads.
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

from service.text.task_process import ProcessLimits, TaskFailed, TaskProcess

# Of a compilation or a mask: both usually take some milliseconds.
MAX_CPU_S = 2.0
# A vocabulary of 150,000 tokens takes some 150 MiB of it.
MAX_MEMORY_BYTES = 1 << 30
_MAX_RESULT_BYTES = 16 << 20
_sample_numbers = itertools.count()


class ConstraintFailed(Exception):
    """A grammar cannot be used, or a sample cannot continue. The text is not sanitized."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A caller's grammar. `kind` is a field of Constraint; `key` identifies the grammar in the process."""

    key: str
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The bytes of each token by id; empty: no text. Special tokens have the names that grammars use."""

    tokens: Sequence[bytes]
    special_ids: Sequence[int] = ()

    def task(self) -> bytes:
        """The setup task of a new process."""
        lengths = array("I", map(len, self.tokens)).tobytes()
        request = {
            "method": "set_vocabulary",
            "special_ids": list(self.special_ids),
            "lengths_bytes": len(lengths),
        }
        return b"".join((json.dumps(request).encode(), b"\n", lengths, *self.tokens))


@dataclass(eq=False, slots=True)
class SampleState:
    """A sample's grammar and tokens; `process` knows the first `num_known` of them."""

    grammar: Grammar
    token_ids: list[int] = field(default_factory=list)
    number: int = field(default_factory=lambda: next(_sample_numbers))
    process: TaskProcess | None = None
    num_known: int = 0


class GrammarEngine:
    """Owns the process, which the first task starts. Thread-safe: runs one task at a time."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._setup_task = vocabulary.task()
        self._process: TaskProcess | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self._used_s = time.monotonic()

    def compile(self, grammar: Grammar) -> None:
        """Checks that a grammar can be used. Raises ConstraintFailed."""
        request = {"method": "compile", "key": grammar.key, "kind": grammar.kind, "text": grammar.text}
        with self._lock:
            self._run(lambda _: request)

    def mask(self, state: SampleState) -> tuple[bool, bytes]:
        """Whether a sample may end, and a mask of the tokens that may follow, longer than the vocabulary.

        Raises:
            ConstraintFailed: The sample cannot continue. Other samples are not affected.
        """
        with self._lock:
            # A copy: tokens that are added meanwhile are sent the next time.
            token_ids = tuple(state.token_ids)
            result, mask = self._run(lambda process: _mask_request(state, token_ids, process))
            if result.get("is_missing"):
                state.process = None
                result, mask = self._run(lambda process: _mask_request(state, token_ids, process))
            state.process, state.num_known = self._process, len(token_ids)
        return result["may_end"], mask

    def end_if_idle(self, idle_s: float) -> bool:
        """Ends the process if it was idle for `idle_s`. Returns whether there is no process now."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._process is not None and time.monotonic() - self._used_s >= idle_s:
                self._process.close()
                self._process = None
            return self._process is None
        finally:
            self._lock.release()

    def close(self) -> None:
        """Ends the process; a running task fails. Idempotent."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()
        # Does nothing while a task runs: that task then fails and drops the process.
        self.end_if_idle(0)

    def _run(self, request: Callable[[TaskProcess], Mapping[str, Any]]) -> tuple[Mapping[str, Any], bytes]:
        """Runs the task that `request` makes for a process. Retries if earlier tasks ended the process."""
        process = self._process
        if process is None:
            limits = ProcessLimits(MAX_CPU_S, MAX_MEMORY_BYTES, _MAX_RESULT_BYTES)
            process = TaskProcess("service.text.grammar_process", limits, self._setup_task)
            self._process = process
        try:
            if self._is_closed:
                raise TaskFailed("was stopped", is_task_fault=False)
            output = process.run(json.dumps(request(process)).encode())
        except TaskFailed as error:
            self._process = None
            if error.is_task_fault or self._is_closed:
                raise ConstraintFailed(f"it {error}") from None
            return self._run(request)
        self._used_s = time.monotonic()
        line, _, mask = output.partition(b"\n")
        result = json.loads(line)
        if "error" in result:
            raise ConstraintFailed(result["error"])
        return result, mask


def _mask_request(state: SampleState, token_ids: Sequence[int], process: TaskProcess) -> Mapping[str, Any]:
    """The request for the mask after some tokens: with all of them if the process may not know the sample."""
    request = {"method": "mask", "sample": state.number, "key": state.grammar.key}
    if state.process is process:
        return {**request, "begin": state.num_known, "token_ids": token_ids[state.num_known :]}
    grammar = {"kind": state.grammar.kind, "text": state.grammar.text}
    return {**request, **grammar, "begin": 0, "token_ids": token_ids}

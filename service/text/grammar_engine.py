"""Compiles grammars and computes masks in a sandboxed process (`grammar_process.py`), which may crash.

After a crash a new process gets what the old one knew: a sample is defined by its grammar and its tokens. A
grammar that ends the process is refused. This side blocks, so it is called in threads.
"""

from __future__ import annotations

import itertools
import json
import threading
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from service.errors import Draining
from service.text.task_process import ProcessLimits, TaskFailed, TaskProcess

# Of a compilation or a mask: both usually take some milliseconds.
MAX_CPU_S = 2.0
# A vocabulary of 150,000 tokens takes some 150 MiB of it.
MAX_MEMORY_BYTES = 1 << 30
IDLE_S = 300.0
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


@dataclass(eq=False, slots=True)
class SampleState:
    """A sample's grammar and tokens, of which the process may know the first `num_known`."""

    grammar: Grammar
    token_ids: list[int] = field(default_factory=list)
    number: int = field(default_factory=lambda: next(_sample_numbers))
    num_known: int = 0

    def request(self, num_tokens: int) -> Mapping[str, Any]:
        """The request for the mask after some tokens: with the grammar if the process knows nothing."""
        grammar = {} if self.num_known else asdict(self.grammar)
        token_ids = self.token_ids[self.num_known : num_tokens]
        sample = {"sample": self.number, "begin": self.num_known, "token_ids": token_ids}
        return {"method": "mask", **grammar, **sample}


class GrammarEngine:
    """Owns the process, which the first task starts. Thread-safe: runs one task at a time."""

    def __init__(self, tokens: Sequence[bytes], special_ids: Sequence[int]) -> None:
        """`tokens`: the bytes of each; empty: no text. Special ones have the names that grammars use."""
        lengths = array("I", map(len, tokens)).tobytes()
        request = {"method": "set_vocabulary", "special_ids": special_ids, "lengths_bytes": len(lengths)}
        self._setup_task = b"".join((json.dumps(request).encode(), b"\n", lengths, *tokens))
        self._process = self._new_process()
        self._lock = threading.Lock()
        self._is_closed = False

    def compile(self, grammar: Grammar) -> None:
        """Checks that a grammar can be used. Raises ConstraintFailed, or Draining once this is closed."""
        with self._lock:
            self._run({"method": "compile", **asdict(grammar)})

    def mask(self, state: SampleState) -> tuple[bool, bytes]:
        """Whether a sample may end, and a mask of the tokens that may follow, longer than the vocabulary.

        Raises:
            ConstraintFailed: The sample cannot continue. Other samples are not affected.
            Draining: This is closed.
        """
        with self._lock:
            # Tokens that are added meanwhile are sent the next time.
            num_tokens = len(state.token_ids)
            result, mask = self._run(state.request(num_tokens))
            if "is_missing" in result:
                state.num_known = 0
                result, mask = self._run(state.request(num_tokens))
            state.num_known = num_tokens
        return result["may_end"], mask

    def close(self) -> None:
        """Ends the process; a running task fails. Idempotent."""
        self._is_closed = True
        self._process.kill()
        with self._lock:
            self._process.close()

    def _new_process(self) -> TaskProcess:
        limits = ProcessLimits(MAX_CPU_S, MAX_MEMORY_BYTES, _MAX_RESULT_BYTES, idle_s=IDLE_S)
        return TaskProcess("service.text.grammar_process", limits, self._setup_task)

    def _run(self, request: Mapping[str, Any]) -> tuple[Mapping[str, Any], bytes]:
        """Runs a task. Retries if something other than this task ended the process."""
        output = None
        while output is None:
            if self._is_closed:
                raise Draining
            try:
                output = self._process.run(json.dumps(request).encode())
            except TaskFailed as error:
                self._process = self._new_process()
                if error.is_task_fault and not self._is_closed:
                    raise ConstraintFailed(f"it {error}") from None
        line, _, mask = output.partition(b"\n")
        result = json.loads(line)
        if "error" in result:
            raise ConstraintFailed(result["error"])
        return result, mask

"""Encodes texts in a sandboxed process with limits on CPU time and memory.

For tokenizers that are not known to be fast on every text (`tokenizer_bounds.py`).
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Sequence

from service.text.task_process import ProcessLimits, TaskPool, TaskProcess

# Enough for ten million characters: a tokenizer encodes a million in a second or two, with some 170 bytes for
# each character.
MAX_CPU_S = 20.0
MAX_MEMORY_BYTES = 2 << 30
# The largest known tokenizers load in about two seconds, during which no other Python thread runs.
_MAX_LOAD_CPU_S = 10.0
_MAX_RESULT_BYTES = 64 << 20


def new_process(max_cpu_s: float, tokenizer_json: bytes | None = None) -> TaskProcess:
    """A process whose first task is the tokenizer, and each further one a text (`tokenizer_process.py`)."""
    limits = ProcessLimits(max_cpu_s, MAX_MEMORY_BYTES, _MAX_RESULT_BYTES)
    return TaskProcess("service.text.tokenizer_process", limits, tokenizer_json)


def check_loading(tokenizer_json: bytes) -> None:
    """Loads a tokenizer in a process of its own, once: loading normalizes added tokens. Blocks.

    Raises TaskFailed if it exceeds a limit or is not a tokenizer.
    """
    with contextlib.closing(new_process(_MAX_LOAD_CPU_S)) as process:
        process.run(tokenizer_json)


class BoundedEncoder:
    """Owns the process, which the first text starts. Used from one event loop."""

    def __init__(self, tokenizer_json: bytes) -> None:
        # One text is encoded at a time.
        self._pool = TaskPool(lambda: new_process(MAX_CPU_S, tokenizer_json))

    async def encode(self, text: str, *, add_special_tokens: bool, tenant: str) -> Sequence[int]:
        """A text's tokens. Tenants take turns. Cancelling the call ends the process.

        Raises TaskFailed if the text exceeds a limit; Draining once this is closed.
        """
        task = (b"+" if add_special_tokens else b"-") + text.encode()
        return array("I", await self._pool.run(lambda process: process.run(task), tenant))

    def close(self) -> None:
        """Ends the process; a running task fails. Idempotent."""
        self._pool.close()

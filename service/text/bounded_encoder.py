"""Encodes texts in sandboxed processes with limits on CPU time and memory, whatever the tokenizer is."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from service.text.task_process import ProcessLimits, TaskPool, TaskProcess

# Enough for ten million characters: a tokenizer encodes a million in a second or two, with some 170 bytes for
# each character. The largest known tokenizers load in about two seconds.
MAX_CPU_S = 20.0
MAX_MEMORY_BYTES = 2 << 30
# The second one is started for a text that comes while another is encoded.
MAX_PROCESSES = 2
_MAX_RESULT_BYTES = 64 << 20


def new_process(tokenizer_json: bytes | None = None) -> TaskProcess:
    """A process whose first task is the tokenizer, and each further one a text (`tokenizer_process.py`)."""
    limits = ProcessLimits(MAX_CPU_S, MAX_MEMORY_BYTES, _MAX_RESULT_BYTES)
    return TaskProcess("service.text.tokenizer_process", limits, tokenizer_json)


class BoundedEncoder:
    """Owns the processes. Used from one event loop."""

    def __init__(self, tokenizer_json: bytes) -> None:
        """Loads the tokenizer in the first process. Blocks.

        Raises TaskFailed if that exceeds a limit, or it is no tokenizer.
        """
        first = new_process()
        first.run(tokenizer_json)
        self._pool = TaskPool(lambda: new_process(tokenizer_json), MAX_PROCESSES)
        self._pool.idle.append(first)

    async def encode(self, text: str, *, add_special_tokens: bool, tenant: str) -> Sequence[int]:
        """A text's tokens. Tenants take turns. Cancelling the call ends the process.

        Raises TaskFailed if the text exceeds a limit; Draining once this is closed.
        """
        task = (b"+" if add_special_tokens else b"-") + text.encode()
        return array("I", await self._pool.run(lambda process: process.run(task), tenant))

    def close(self) -> None:
        """Ends the processes; running tasks fail. Idempotent."""
        self._pool.close()

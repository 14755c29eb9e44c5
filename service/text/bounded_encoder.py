"""Texts encoded in a process of its own, which has so much time and memory for each.

For tokenizers of which it is not known that no text takes them long (`tokenizer_bounds.py`).
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from weakref import WeakValueDictionary

from service.errors import Draining
from service.text.task_process import Bounds, TaskFailed, TaskProcess

# A text of ten million characters may need both: a tokenizer does a million in a second or two, with some 170
# bytes for each.
MAX_CPU_S = 20.0
MAX_MEMORY_BYTES = 2 << 30
# The largest that are known load in two seconds or so, in which no other thread of Python runs.
_MAX_LOAD_CPU_S = 10.0
_MAX_ANSWER_BYTES = 64 << 20


def new_process(max_cpu_s: float) -> TaskProcess:
    """One whose first task is the tokenizer, and each other a text: see `tokenizer_process.py`."""
    bounds = Bounds(max_cpu_s, MAX_MEMORY_BYTES, _MAX_ANSWER_BYTES)
    return TaskProcess("service.text.tokenizer_process", bounds)


def check_loading(tokenizer_json: bytes) -> None:
    """Loads a tokenizer in a process that is ended then: loading normalizes added tokens. Blocks.

    Raises TaskFailed if it takes too long or too much memory, or is no tokenizer.
    """
    process = new_process(_MAX_LOAD_CPU_S)
    try:
        process.ask(tokenizer_json)
    finally:
        process.end()


class BoundedEncoder:
    """Owner of the process, which is started when it is needed. Used from one event loop."""

    def __init__(self, tokenizer_json: bytes) -> None:
        self._tokenizer_json = tokenizer_json
        self._process: TaskProcess | None = None
        # One text at a time, and of those that wait one of each tenant: many of one's keep others no longer.
        self._turn = asyncio.Lock()
        self._turns_of: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._is_closed = False

    async def encode(self, text: str, *, add_special_tokens: bool, tenant: str) -> Sequence[int]:
        """A text's tokens. Cancelling it ends the process.

        Raises TaskFailed if the text is too much for it, and Draining at the end.
        """
        task = (b"+" if add_special_tokens else b"-") + text.encode()
        async with self._turns_of.setdefault(tenant, asyncio.Lock()), self._turn:
            while True:
                is_fresh = self._process is None
                process = self._process = self._process or self._new()
                try:
                    return array("I", await asyncio.to_thread(self._ask, process, task))
                except BaseException as error:
                    process.kill()
                    self._process = None
                    if self._is_closed and isinstance(error, TaskFailed):
                        raise Draining from None
                    if not isinstance(error, TaskFailed) or error.is_own_doing or is_fresh:
                        raise
                    # Earlier texts, or somebody else, had ended it.

    def close(self) -> None:
        """Ends the process; what is under way fails. May be called again."""
        self._is_closed = True
        if self._process is not None:
            self._process.kill()

    def _new(self) -> TaskProcess:
        if self._is_closed:
            raise Draining
        return new_process(MAX_CPU_S)

    def _ask(self, process: TaskProcess, task: bytes) -> bytes:
        """Blocks. Raises TaskFailed."""
        if process.num_tasks == 0:
            process.ask(self._tokenizer_json)
        return process.ask(task)

"""The process that encodes texts with a tokenizer that may need much CPU time or memory.

The first task is the tokenizer. Each further task is a text after a + (add special tokens) or a - (do not).
A panic ends the process.
"""

from __future__ import annotations

import os
import sys
from array import array
from typing import TYPE_CHECKING

from service.text import task_loop
from service.text.loaded_tokenizer import load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Encoder:
    """The tokenizer, from the first task on."""

    def __init__(self) -> None:
        self._tokenizer: Tokenizer | None = None

    def run(self, task: bytes) -> bytes:
        """The tokens of a text, four bytes each; empty for the tokenizer."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(task)
            return b""
        text, with_special = task[1:].decode(), task[:1] == b"+"
        (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=with_special)
        return array("I", encoded.ids).tobytes()


if __name__ == "__main__":
    # One text does not profit from a thread per core, and each thread takes address space, which is limited.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    sys.exit(task_loop.main(Encoder().run))

"""The process in which a tokenizer encodes texts that may take it long, or make it large.

The first task is the tokenizer; of those that follow each is a text, behind a + if special tokens are to go
around it, else behind a -. A panic ends the process.
"""

from __future__ import annotations

import os
import sys
from array import array

from tokenizers import Tokenizer

from service.text import task_loop


class Encoder:
    """The tokenizer, once it is known."""

    def __init__(self) -> None:
        self._tokenizer: Tokenizer | None = None

    def answer(self, task: bytes) -> bytes:
        """The tokens of a text, each in four bytes; nothing for the tokenizer."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_buffer(task)
            return b""
        text, with_special = task[1:].decode(), task[:1] == b"+"
        (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=with_special)
        return array("I", encoded.ids).tobytes()


if __name__ == "__main__":
    # A thread for each core is of no use to one text, and takes address space, which is bounded.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    sys.exit(task_loop.main(Encoder().answer))

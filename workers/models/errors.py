"""The exceptions of model loading.

ModelError: a model directory cannot be read, or needs something that is not supported.
UnsupportedError: it can be read, but needs something that native code does not support.
"""

from __future__ import annotations

import re
from pathlib import Path

_LIBRARY_EXCEPTION = re.compile(r"(the transformers library cannot [^:;]*)(: [^;]*)")
_PATH = re.compile(r"(?<![^\s('\"=])/[^\s:,;'\")]+")
# Messages quote values from the directory, which may be hostile. Each must stay one line of a log.
_MAX_CHARACTERS = 600


def printable(text: str) -> str:
    """The text with unprintable characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def without_path(message: str, directory: Path) -> str:
    """The message of a ModelError about a directory, with the names of files but without their path."""
    path = str(ModelError(str(directory))).removesuffix("...")  # as messages show it
    return message.removeprefix(f"{path}: ").replace(f"{path}/", "").replace(path, "the directory")


def for_clients(message: str, directory: Path) -> str:
    """The message without any paths, and without the text of exceptions of the transformers library."""
    said = _LIBRARY_EXCEPTION.sub(r"\1", without_path(message, directory))
    return _PATH.sub("a file", said)


class ModelError(Exception):
    """A model cannot be loaded. The message names the file, and the setting or tensor at fault.

    The message is always one printable line of bounded length.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message[:_MAX_CHARACTERS]) + "..." * (len(message) > _MAX_CHARACTERS))


class UnsupportedError(ModelError):
    """There is no native code for the model; the transformers backend may be able to run it."""

"""The exceptions of model loading.

ModelError: a model directory is unreadable, or asks for something that is not supported.
UnsupportedError: it is readable, and asks for something that our own code does not have.
"""

from __future__ import annotations

# One line of a log. What a message quotes was written by whoever made the directory.
_MAX_CHARACTERS = 600


class ModelError(Exception):
    """A model cannot be loaded. The message names the file, and the setting or tensor that is to blame.

    It is one line of bounded length that a terminal can show, whatever it quotes.
    """

    def __init__(self, message: str) -> None:
        shown = "".join(
            c if c.isprintable() else c.encode("unicode_escape").decode() for c in message[:_MAX_CHARACTERS]
        )
        super().__init__(shown + "..." * (len(message) > _MAX_CHARACTERS))


class UnsupportedError(ModelError):
    """The model may be sound, and there is no native code for it: the transformers backend may have some."""

"""The error for an adapter that is refused, and how its messages quote what a directory contains.

A message is shown to clients, so it names files of the directory without the directory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from workers.models.errors import ModelError

_MAX_CHARACTERS = 300
_MAX_QUOTED = 100


class AdapterError(Exception):
    """An adapter is not usable with the model.

    The message is one printable line of at most 300 characters, whatever it quotes. It names the file, and
    the setting or tensor at fault.
    """

    def __init__(self, message: str) -> None:
        shown = "".join(
            c if c.isprintable() else c.encode("unicode_escape").decode() for c in message[:_MAX_CHARACTERS]
        )
        is_long = max(len(message), len(shown)) > _MAX_CHARACTERS
        super().__init__(shown[: _MAX_CHARACTERS - 3] + "..." if is_long else shown)


def quoted(value: object) -> str:
    """A value of a directory for a message, cut if it is long."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except RecursionError:  # nested almost as deeply as the parser allows
        return "a nested value"
    except ValueError:  # an integer of thousands of digits
        return "a huge number"
    return text if len(text) <= _MAX_QUOTED else text[: _MAX_QUOTED - 3] + "..."


@contextmanager
def errors_of_file(name: str) -> Iterator[None]:
    """Inside the block, a ModelError or AdapterError becomes an AdapterError that begins with `name`.

    The readers of model directories name the path of a file. The message keeps what follows it.
    """
    try:
        yield
    except AdapterError as error:
        raise AdapterError(f"{name}: {error}") from None
    except ModelError as error:
        # The path is missing if it is so long that it was cut.
        _, _, reason = str(error).partition(f"{name}: ")
        raise AdapterError(f"{name}: {reason or 'cannot be read'}") from error

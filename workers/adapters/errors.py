"""The error for a refused adapter, and quotes of a directory's contents in its messages.

Messages are shown to clients, so they name files without their directory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from workers.models.errors import ModelError, printable

_MAX_CHARACTERS = 300
_MAX_QUOTED = 100


class AdapterError(Exception):
    """An adapter is not usable with the model.

    The message is always one printable line of at most 300 characters. It names the file, and the setting or
    tensor at fault.
    """

    def __init__(self, message: str) -> None:
        shown = printable(message[:_MAX_CHARACTERS])
        is_long = max(len(message), len(shown)) > _MAX_CHARACTERS
        super().__init__(shown[: _MAX_CHARACTERS - 3] + "..." if is_long else shown)


def quoted(value: object) -> str:
    """A value of a directory for a message, truncated if it is long."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except RecursionError:  # nested almost as deeply as the parser allows
        return "a nested value"
    except ValueError:  # an integer of thousands of digits
        return "a huge number"
    return text if len(text) <= _MAX_QUOTED else text[: _MAX_QUOTED - 3] + "..."


@contextmanager
def errors_of_file(file: Path) -> Iterator[None]:
    """Inside the block, each ModelError and AdapterError becomes an AdapterError with the name of the file.

    Some readers of model directories begin their messages with the path. It is left out.
    """
    try:
        yield
    except (ModelError, AdapterError) as error:
        path = str(ModelError(f"{file}: ")).removesuffix("...")  # As a ModelError shows it.
        reason = str(error).removeprefix(path).removeprefix("...")
        raise AdapterError(f"{file.name}: {reason or 'cannot be read'}") from error

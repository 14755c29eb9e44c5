"""Opens the files of a model directory: only regular files, and JSON of a bounded size.

A directory may be hostile. Reading a FIFO would block a worker forever, and parsed JSON takes up to a hundred
times its size in memory, so the type and size of a file are checked first.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from workers.common import trusted
from workers.common.model_files import OTHER_TOKENIZERS, SETTINGS
from workers.models.errors import ModelError

_log = logging.getLogger(__name__)

# The most bytes of files without lists of tokens or tensors.
MAX_SETTINGS_BYTES = 1 << 20
# Ten times the values in a header of 100,000 tensors.
MAX_JSON_VALUES = 1_000_000

_ITSELF, _GGUF = "", "*.gguf"
# `checkpoint` compares the versions of weight files itself.
_SETTINGS = {name.partition("/")[0] for name in (*SETTINGS, *OTHER_TOKENIZERS, _GGUF)}

_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
_SAFETENSORS = "*.safetensors*"  # weights, or their index

FileVersion = tuple[int, ...]
"""Changes when a file is written to or replaced."""


@contextmanager
def errors_naming(file: Path) -> Iterator[None]:
    """Inside the block, each ModelError begins with the name of the file."""
    try:
        yield
    except ModelError as error:
        raise type(error)(f"{file}: {error}") from None
    except RecursionError:  # repr() of a value that is nested almost as deeply as the parser allows
        raise ModelError(f"{file}: is nested too deeply") from None


def warn_too_large(what: object, size_bytes: int, max_bytes: int) -> None:
    """Log that something is left out because of its size."""
    _log.warning(
        "%s is too large to be sent to clients and is left out: it has %d bytes, the limit is %d",
        what,
        size_bytes,
        max_bytes,
    )


def exists(file: Path) -> bool:
    """Whether there is a file of that name, even a dangling symbolic link."""
    return os.path.lexists(file)


def open_regular(file: Path) -> BufferedReader:
    """Open a regular file, or the one that it links to, for reading. The caller closes it.

    Raises ModelError if it cannot be opened, or is a directory, FIFO, socket or device.
    """
    try:
        return trusted.open_regular(file)
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # an invalid name, such as one with a NUL byte
        raise ModelError(f"{file}: cannot be read: {error}") from error


def file_version(status: os.stat_result) -> FileVersion:
    """The version of the file with this status."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def changed_error(file: Path) -> ModelError:
    """The error for a file that changed since it was first read."""
    return ModelError(
        f"{file}: has changed while the model was loaded: try again when no process writes to it"
    )


@contextmanager
def unchanged_settings(directory: Path) -> Iterator[None]:
    """Check that no file of settings or text changes inside the block, since they are read one after another.

    `directory` may also be a file that has all of them.

    Raises ModelError if a file was created, deleted or changed.
    """
    before = _settings_versions(directory)
    yield
    after = _settings_versions(directory)
    for name in before.keys() | after.keys():
        if before.get(name) != after.get(name):
            raise changed_error(directory / name if name else directory)


def _settings_versions(directory: Path) -> dict[str, FileVersion | None]:
    """The version of each file of settings, or of its link target; None if stat fails."""
    found: dict[str, FileVersion | None] = {}
    for name in _settings_names(directory):
        try:
            found[name] = file_version(os.stat(directory / name))  # noqa: PTH116 - names no file twice
        except OSError:
            found[name] = None
    return found


def _settings_names(directory: Path) -> tuple[str, ...]:
    if os.path.isfile(directory):  # noqa: PTH113 - Path.is_file may raise
        return (_ITSELF,)
    try:
        names = os.listdir(directory)  # noqa: PTH208 - only the names are needed
    except OSError:
        names = []
    return tuple(name for pattern in _SETTINGS for name in fnmatch.filter(names, pattern))


def read_file(file: Path, max_bytes: int) -> bytes:
    """The content of a file. Raises ModelError if it cannot be read or is larger than `max_bytes`."""
    with open_regular(file) as opened:
        try:
            content = opened.read(max_bytes + 1)
        except OSError as error:
            raise ModelError(f"{file}: cannot be read: {error.strerror}") from error
    if len(content) > max_bytes:
        raise ModelError(f"{file}: is larger than {max_bytes >> 10} KiB")
    return content


def read_object(
    file: Path, max_bytes: int = MAX_SETTINGS_BYTES, *, takes_infinity: bool = False
) -> dict[str, object]:
    """The JSON object in a file. Raises ModelError; see `read_file` and `parse_object`."""
    return parse_object(read_file(file, max_bytes), file, takes_infinity=takes_infinity)


def parse_object(
    content: bytes,
    file: Path,
    subject: str = "",
    max_values: int = MAX_JSON_VALUES,
    *,
    takes_infinity: bool = False,
) -> dict[str, object]:
    """Parse a JSON object in which no key occurs twice.

    Args:
        content: The text.
        file: Its file, for messages.
        subject: The part of the file, for messages, with a trailing space; "" for all of it.
        max_values: The most values in the object, nested ones included. A value takes up to 200 bytes.
        takes_infinity: Python's spelling of infinity is allowed, which is not JSON. The caller checks it.

    Raises:
        ModelError: The text is anything else.
    """
    # Each value except the first follows one of these characters.
    if sum(map(content.count, (b",", b"[", b"{"))) > max_values:
        raise ModelError(f"{file}: {subject}holds more than {max_values} values")
    try:
        constant = _infinity if takes_infinity else _no_constant
        found = json.loads(content.decode(), object_pairs_hook=_unique, parse_constant=constant)
    except ValueError as error:
        # Python's own message would tell how to raise its limit.
        why = "a number has too many digits" if "set_int_max_str_digits" in str(error) else error
        raise ModelError(f"{file}: {subject}is not valid JSON: {why}") from error
    except RecursionError:
        raise ModelError(f"{file}: {subject}is nested too deeply") from None
    if not isinstance(found, dict):
        raise ModelError(f"{file}: {subject}must be a JSON object")
    return found


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Raises ValueError for a key that occurs twice, since parsers differ in which value they take."""
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name} occurs twice")
        found[name] = value
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _infinity(name: str) -> float:
    return _no_constant(name) if name == "NaN" else float(name)


def check_not_pickled(directory: Path) -> None:
    """Raises ModelError if all weights are pickles, since loading a pickle runs its code."""
    try:
        names = sorted(os.listdir(directory))  # noqa: PTH208 - only the names are needed
    except OSError as error:
        raise ModelError(f"{directory}: cannot be read: {error.strerror}") from error
    pickles = [name for name in names if any(fnmatch.fnmatchcase(name, kind) for kind in _PICKLES)]
    if pickles and not fnmatch.filter(names, _SAFETENSORS):
        raise ModelError(
            f"{directory}: has its weights as pickles only ({pickles[0]}), which run code when they are"
            " loaded: take a revision of the model with safetensors, or convert it as docs/models.md says"
        )

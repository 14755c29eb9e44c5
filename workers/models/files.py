"""Opens the files of a model directory: regular ones only, and JSON of a bounded size.

A directory may come from anybody. A FIFO in the place of a file would hold a worker for ever, and parsed JSON
takes up to a hundred times its size in memory, so what a file is, and how much it holds, is looked at first.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from workers.models.errors import ModelError

# Names and places of 100,000 tensors are a tenth of this.
MAX_JSON_VALUES = 1_000_000

# What a load reads beside weights, of which each file's version is known to whoever reads them. That of the
# directory says which files are in it, and not what they hold.
_SETTINGS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "chat_template.jinja", "additional_chat_templates",
)  # fmt: skip

Version = tuple[int, ...]
"""Tells what a file holds from what it holds when it has been written to, or another has its name."""


def is_there(file: Path) -> bool:
    """Whether there is something of that name, be it a link to nothing."""
    return os.path.lexists(file)


def open_regular(file: Path) -> BufferedReader:
    """The file, or the one that it links to, for reading; its buffer is the caller's to close.

    Raises:
        ModelError: It cannot be opened, or is a directory, FIFO, socket or device.
    """
    try:
        # Opening a FIFO for reading would wait for a writer.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # a name that no file can have
        raise ModelError(f"{file}: cannot be read: {error}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ModelError(f"{file}: is not a regular file")
    return os.fdopen(descriptor, "rb")


def version_of(status: os.stat_result) -> Version:
    """The version of the file with that status."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def changed(file: Path) -> ModelError:
    """The error of a file that has changed since it was first read."""
    return ModelError(f"{file}: has changed while the model was loaded: load it when nobody writes to it")


@contextmanager
def unchanged_settings(directory: Path) -> Iterator[None]:
    """Within, no file of settings or text may change: they are read one by one, and belong together.

    Raises:
        ModelError: One is there, gone or another at the end, and was not at the beginning.
    """
    before = _versions(directory)
    yield
    after = _versions(directory)
    for name in _SETTINGS:
        if before[name] != after[name]:
            raise changed(directory / name)


def _versions(directory: Path) -> dict[str, Version | None]:
    """Of each file of settings, or what it links to; None for one that cannot be looked at."""
    found: dict[str, Version | None] = {}
    for name in _SETTINGS:
        try:
            found[name] = version_of(os.stat(directory / name))  # noqa: PTH116 - names no file twice
        except OSError:
            found[name] = None
    return found


def read_whole(file: Path, max_bytes: int) -> bytes:
    """The contents of a file. Raises ModelError, also for one that is larger than that."""
    with open_regular(file) as opened:
        try:
            content = opened.read(max_bytes + 1)
        except OSError as error:
            raise ModelError(f"{file}: cannot be read: {error.strerror}") from error
    if len(content) > max_bytes:
        raise ModelError(f"{file}: is larger than {max_bytes >> 10} KiB")
    return content


def parse_object(
    content: bytes, file: Path, subject: str = "", max_values: int = MAX_JSON_VALUES
) -> dict[str, object]:
    """A JSON object in which no key occurs twice.

    Args:
        content: The text.
        file: Where it comes from, for messages.
        subject: Which part of the file, for messages, with a space behind it; "" for all of it.
        max_values: Of the object and all it holds: they take up to 200 bytes each.

    Raises:
        ModelError: It is anything else.
    """
    # Each value but the first follows one of these.
    if sum(map(content.count, (b",", b"[", b"{"))) > max_values:
        raise ModelError(f"{file}: {subject}holds more than {max_values} values")
    try:
        found = json.loads(content.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except ValueError as error:
        raise ModelError(f"{file}: {subject}is not sound JSON: {error}") from error
    except RecursionError:
        raise ModelError(f"{file}: {subject}is nested too deeply") from None
    if not isinstance(found, dict):
        raise ModelError(f"{file}: {subject}must be a JSON object")
    return found


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Raises ValueError for a key that occurs twice: readers would differ in which of them they take."""
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name} occurs twice")
        found[name] = value
    return found


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not a number")

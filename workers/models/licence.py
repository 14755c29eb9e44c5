"""Reads the licence that a directory names for its model. Clients receive it; nothing else uses it.

The front matter of README.md is read line by line, without a YAML parser, which would be a larger attack
surface. An invalid front matter never refuses a model, and only the licence of it is sent to clients.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from workers.models.errors import ModelError
from workers.models.files import open_regular

MODEL_CARD_FILE = "README.md"
MAX_CHARACTERS = 256
# A longer front matter is ignored.
_MAX_FRONT_BYTES = 1 << 16
_FENCE = "---"
# With these, `license_name` has the name.
_NAMELESS = ("", "other", "unknown")
# The spellings of null in YAML.
_NULLS = ("~", "null", "Null", "NULL")
# At most so many names of a directory are read.
_MAX_NAMES = 4096
_FILES = ("license", "licence", "copying")


def read_licence(directory: Path) -> str:
    """The licence in README.md, else the name of a licence file; "" if there is neither. Raises nothing.

    At most MAX_CHARACTERS of printable ASCII.
    """
    found = _from_front_matter(_front_matter(directory / MODEL_CARD_FILE)) or _file_name(directory)
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in found[:MAX_CHARACTERS])


def _front_matter(file: Path) -> list[str]:
    """The lines between the two fences at the beginning of a file; none if there are no fences."""
    try:
        with open_regular(file) as opened:
            text = opened.read(_MAX_FRONT_BYTES).decode(errors="replace")
    except (ModelError, OSError):
        return []
    first, *lines = text.removeprefix("\ufeff").splitlines() or [""]
    if first.rstrip() != _FENCE:
        return []
    fences = [at for at, line in enumerate(lines) if line.rstrip() == _FENCE]
    return lines[: fences[0]] if fences else []


def _from_front_matter(lines: list[str]) -> str:
    """`license`, or if that has no name, `license_name` with `license_link`."""
    licence = _value(lines, "license")
    if licence.lower() not in _NAMELESS:
        return licence
    name, link = _value(lines, "license_name"), _value(lines, "license_link")
    if name and link:
        return f"{name} ({link})"
    return name or link or licence


def _value(lines: list[str], name: str) -> str:
    """A top-level setting, a list joined by commas; "" if it is absent."""
    for at, line in enumerate(lines):
        if line.startswith(f"{name}:"):
            value = line.removeprefix(f"{name}:").strip()
            if value in _NULLS:
                return ""
            if value.startswith("[") and value.endswith("]"):
                return ", ".join(map(_plain, value[1:-1].split(",")))
            if value and value[0] not in "|>{&*!#":
                return _plain(value)
            listed = itertools.takewhile(lambda item: item.lstrip().startswith("- "), lines[at + 1 :])
            return ", ".join(_plain(item.lstrip()[2:]) for item in listed)
    return ""


def _plain(value: str) -> str:
    """A scalar without quotes and without a trailing comment."""
    value = value.strip()
    for quote in ("'", '"'):
        if value.startswith(quote) and quote in value[1:]:
            return value[1 : value.index(quote, 1)]
    return value.partition(" #")[0].strip()


def _file_name(directory: Path) -> str:
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in itertools.islice(entries, _MAX_NAMES)]
    except OSError:
        return ""
    return min((name for name in names if name.lower().startswith(_FILES)), default="")

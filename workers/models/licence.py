"""Reads the licence that a directory names for its model. Clients receive it; nothing else uses it.

A YAML parser would be a larger attack surface: of the front matter of README.md only plain and quoted values
on one line are read.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from workers.models.errors import ModelError
from workers.models.files import open_regular

MODEL_CARD_FILE = "README.md"
MAX_CHARACTERS = 256
# A longer front matter is ignored.
_MAX_FRONT_BYTES = 1 << 16
_FRONT = re.compile(r"\ufeff?---[ \t]*\n(.*?)^---[ \t]*$", re.MULTILINE | re.DOTALL)
_VALUE = re.compile(r"^(license|license_name|license_link):[ \t]([^\n]*)", re.MULTILINE)
_NULLS = ("null", "~")
# With these, `license_name` has the name.
_NAMELESS = ("", "other", "unknown")
_FILES = ("license", "licence", "copying")


def read_licence(directory: Path) -> str:
    """The licence in README.md, else the name of a licence file; "" if there is neither. Raises nothing.

    At most MAX_CHARACTERS of printable ASCII.
    """
    found = _from_card(directory / MODEL_CARD_FILE) or _file_name(directory)
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in found[:MAX_CHARACTERS])


def _from_card(file: Path) -> str:
    """`license` of the front matter, or if that has no name, `license_name` with `license_link`."""
    try:
        with open_regular(file) as opened:
            text = opened.read(_MAX_FRONT_BYTES).decode(errors="replace").replace("\r\n", "\n")
    except (ModelError, OSError):
        return ""
    front = _FRONT.match(text)
    values = {name: _plain(value.strip()) for name, value in _VALUE.findall(front[1] if front else "")}
    licence = values.get("license", "")
    if licence.lower() not in _NAMELESS:
        return licence
    name, link = values.get("license_name", ""), values.get("license_link", "")
    return f"{name} ({link})" if name and link else name or link or licence


def _plain(value: str) -> str:
    """A scalar without quotes and without a trailing comment; "" for anything else."""
    if value[:1] in ("'", '"'):
        return value[1:].partition(value[0])[0]
    value = value.partition(" #")[0].strip()
    return "" if value.lower() in _NULLS or value[:1] in tuple("[{|>&*!#") else value


def _file_name(directory: Path) -> str:
    try:
        names = os.listdir(directory)  # noqa: PTH208 - only the names are needed
    except OSError:
        return ""
    return min((name for name in names if name.lower().startswith(_FILES)), default="")

"""Error messages on standard error, sizes, and removal of control characters from untrusted text.

Control characters (C0, DEL and C1), the only ones that control a terminal, are never printed.
"""

from __future__ import annotations

import re
import sys

_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_CONTROLS_OF_TEXT = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class CommandFailed(Exception):
    """Ends a command. Each argument is printed as a line on standard error."""

    exit_status = 1


class WrongUsage(CommandFailed):
    """The arguments of a command are invalid."""

    exit_status = 2


def tell(line: str) -> None:
    """Prints a line on standard error."""
    print(f"quire: {escaped(line)}", file=sys.stderr)


def escaped(text: str) -> str:
    r"""The text in one line, with control characters escaped as `\x1b`."""
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def stripped(text: str) -> str:
    """The text without control characters, except for newlines and tabs."""
    return _CONTROLS_OF_TEXT.sub("", text)


def size(count: int) -> str:
    """A number of bytes with its unit, such as `1.5 MiB`."""
    number, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if number < 1024:
            break
        number, unit = number / 1024, larger
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"

"""Text of others made safe to show: control characters never reach a log or a terminal.

C0, DEL and C1, which is all that terminals act on; an escape sequence without its first character is harmless
text. Who is impersonated by look-alikes or right-to-left marks is not looked at.
"""

from __future__ import annotations

import re

_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_CONTROLS_OF_TEXT = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def escaped(text: str, *, keep_lines: bool = False) -> str:
    r"""The text in one line, with control characters as `\x1b`; `keep_lines`: but newlines and tabs stay."""
    controls = _CONTROLS_OF_TEXT if keep_lines else _CONTROLS
    return controls.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def stripped(text: str) -> str:
    """The text without control characters but newlines and tabs."""
    return _CONTROLS_OF_TEXT.sub("", text)

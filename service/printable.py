"""Escapes control characters in untrusted text for logs and terminals.

These are C0, DEL and C1, all that terminals act on: an escape sequence without its first character is
harmless text. Look-alike characters and right-to-left marks are not handled.
"""

from __future__ import annotations

import re

_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_CONTROLS_OF_TEXT = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def escaped(text: str, *, keep_lines: bool = False) -> str:
    r"""The text with control characters as `\x1b`. `keep_lines`: newlines and tabs are kept."""
    controls = _CONTROLS_OF_TEXT if keep_lines else _CONTROLS
    return controls.sub(lambda found: f"\\x{ord(found[0]):02x}", text)

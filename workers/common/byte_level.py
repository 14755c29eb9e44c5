"""The alphabet of byte-level tokenizers, as GPT-2's."""

from __future__ import annotations


def _alphabet() -> dict[str, int]:
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in set(visible)]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}


# By the character that is written for each byte: itself if it is visible.
BYTES = _alphabet()

"""Which tokenizers need little CPU time and memory to decode any tokens, which the gateway does itself.

A tokenizer is an untrusted program of a model's authors: its decoder may replace a character by a thousand.
An unknown part may still be harmless.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# How many times longer all parts together may make a text.
_MAX_GROWTH = 128
# Of the decoder's settings as JSON. Also limits the number of nested parts.
_MAX_DECODER_BYTES = 16 << 10
# The longest tokens of known models have a few hundred characters.
_MAX_TOKEN_CHARACTERS = 4096
# Decoders that make a text no longer.
_KNOWN = frozenset(
    ("ByteLevel", "ByteFallback", "Fuse", "Strip", "BPEDecoder", "CTC", "Metaspace", "WordPiece")
)


def decodes_in_bounds(tokenizer: Tokenizer) -> bool:
    """Whether decoding any tokens costs little more than with an ordinary tokenizer."""
    tokens = tokenizer.get_vocab(with_added_tokens=True)
    if max(map(len, tokens), default=0) > _MAX_TOKEN_CHARACTERS:
        return False
    if tokenizer.decoder is None:
        return True
    settings = tokenizer.decoder.__getstate__()
    is_small = len(settings) <= _MAX_DECODER_BYTES
    return is_small and math.prod(map(_growth, _flat(json.loads(settings)))) <= _MAX_GROWTH


def _flat(part: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The part itself, or the parts of a sequence, recursively."""
    if part["type"] != "Sequence":
        yield part
        return
    for one in part["decoders"]:
        yield from _flat(one)


def _growth(part: Mapping[str, Any]) -> float:
    """How many times longer a part can make a text; infinite: unknown."""
    match part:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
            return max(1.0, len(new) / len(old))
        case _:
            return 1.0 if part["type"] in _KNOWN else math.inf

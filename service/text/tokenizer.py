"""A model's tokenizer: how it is loaded, which ones are used, and the process that encodes texts with it.

A tokenizer is an untrusted program of a model's authors: its decoder may replace a character by a thousand,
and a text may take exponential time. Texts are encoded in processes with limits; tokens are decoded in the
gateway, one by one, so only a decoder is used there that needs little CPU time and memory for any tokens. An
unknown part may still be harmless.
"""

from __future__ import annotations

import functools
import math
import os
from array import array
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from quire.detokenizer import TokenDecoder, decoder_parts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# How many times longer all parts together may make a text.
_MAX_GROWTH = 128
# The size of the decoder's settings as JSON. Also limits the number of nested parts.
_MAX_DECODER_BYTES = 16 << 10
# The longest tokens of known models have a few hundred characters.
_MAX_TOKEN_CHARACTERS = 4096
# Decoders that make a text no longer.
_KNOWN = frozenset(("ByteLevel", "ByteFallback", "Fuse", "BPEDecoder", "CTC", "Metaspace", "WordPiece"))


def decodes_in_bounds(tokenizer: Tokenizer) -> bool:
    """Whether decoding any tokens costs little more than with an ordinary tokenizer."""
    tokens = tokenizer.get_vocab(with_added_tokens=True)
    if max(map(len, tokens), default=0) > _MAX_TOKEN_CHARACTERS:
        return False
    decoder = tokenizer.decoder
    is_small = decoder is None or len(decoder.__getstate__()) <= _MAX_DECODER_BYTES
    return is_small and math.prod(map(_growth, decoder_parts(decoder))) <= _MAX_GROWTH


def _growth(part: Mapping[str, Any]) -> float:
    """How many times longer a part can make a text; infinite: unknown."""
    match part:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
            return max(1.0, len(new) / len(old))
        case {"type": "Strip", "start": 0 | 1, "stop": 0}:
            # With others the library panics on short texts, or what is stripped depends on several tokens.
            return 1.0
        case _:
            return 1.0 if part["type"] in _KNOWN else math.inf


def load_tokenizer(tokenizer_json: bytes) -> Tokenizer:
    """Raises what the library raises."""
    # Not needed by a server whose callers send only tokens.
    from tokenizers import Tokenizer  # noqa: PLC0415

    return Tokenizer.from_buffer(tokenizer_json)


def with_special_tokens(tokenizer: Tokenizer) -> TokenDecoder:
    """Decodes special tokens as their names, which a `Detokenizer` otherwise leaves out."""
    decode = functools.partial(tokenizer.decode, skip_special_tokens=False)
    return SimpleNamespace(decode=decode, decoder=tokenizer.decoder, id_to_token=tokenizer.id_to_token)


def encode_task(text: str, *, add_special_tokens: bool) -> bytes:
    """The task to encode a text, whose result `encoded` reads."""
    return (b"+" if add_special_tokens else b"-") + text.encode()


def encoded(result: bytes) -> array[int]:
    """The tokens: four bytes each."""
    return array("I", result)


def handler() -> Callable[[bytes], bytes]:
    """Runs tasks in the process: the first one is the tokenizer, each further one a text.

    A panic ends the process.
    """
    # One text does not profit from a thread per core, and each thread takes address space, which is limited.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    loaded: list[Tokenizer] = []

    def run(task: bytes) -> bytes:
        if not loaded:
            loaded.append(load_tokenizer(task))
            return b""
        text, with_special = task[1:].decode(), task[:1] == b"+"
        (encoding,) = loaded[0].encode_batch_fast([text], add_special_tokens=with_special)
        return array("I", encoding.ids).tobytes()

    return run

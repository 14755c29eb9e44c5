"""The bytes that each token adds to a text, as the tokenizer's decoder writes them, or that it has none.

Nothing is guessed from a tokenizer's kind but how it spells bytes: what a token says is read off texts that
were decoded, and a token that does not say the same wherever it stands has no bytes. So constraints on
texts can be kept token by token, whatever the decoder does to spaces, prefixes and suffixes. What it does to
the beginning of a text is left out: a sample continues its prompt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from service.errors import Unsupported

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"
# Tokens that are looked at to find two that others can be decoded between.
_CANDIDATES = 4096
_ANCHORS = 2
# Where one look at a token is enough, so many get another.
_MAX_CHECKED = 2048
# The interpreter is not held for longer than these take.
_MAX_DECODED = 2048
# Fewer tokens than this that say the same everywhere: it is the decoder that is not understood.
_UNDERSTOOD = 0.9
_UNFIT = "constraints need a tokenizer whose tokens each stand for a text, and the model's is of another kind"


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """For each id what it adds to a text, UTF-8, perhaps a part of a character.

    Empty: nothing, as a special token or an id without a token; or not the same everywhere. Takes a second
    for a large vocabulary.

    Raises:
        Unsupported: Most of the tokens are of the last kind.
    """
    ids = sorted(tokenizer.get_vocab(with_added_tokens=True).values())
    size = ids[-1] + 1 if ids else 0
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    ids = [token_id for token_id in ids if token_id not in special]
    decoders = _decoder_types(tokenizer)
    spelled = _spelled_bytes(tokenizer, ids, decoders)
    # A decoder of bytes and nothing else puts them together.
    seen = _some(ids) if decoders == {"ByteLevel"} else ids
    found = [spelled.get(token_id, b"") for token_id in range(size)]
    for token_id, text in zip(seen, _Texts(tokenizer, ids).of(seen), strict=True):
        if token_id in spelled:
            found[token_id] = _checked(spelled[token_id], text)
        elif text is not None and _REPLACEMENT not in text:
            found[token_id] = text.encode()
    if sum(bool(found[token_id]) for token_id in seen) < _UNDERSTOOD * len(seen):
        raise Unsupported(_UNFIT)
    return found


def constrained_tokens(tokenizer: Tokenizer) -> tuple[list[bytes], list[int]]:
    """`token_bytes`, with special tokens by the names that grammars have for them; and the ids of those.

    Raises:
        Unsupported: As `token_bytes`.
    """
    tokens = token_bytes(tokenizer)
    special_ids = []
    for token_id, token in tokenizer.get_added_tokens_decoder().items():
        if token.special:
            tokens[token_id] = token.content.encode()
            special_ids.append(token_id)
    return tokens, special_ids


class _Texts:
    """What tokens say between others."""

    def __init__(self, tokenizer: Tokenizer, ids: Sequence[int]) -> None:
        self._decode_batch = tokenizer.decode_batch
        self._anchors = self._find_anchors(ids)

    def of(self, ids: Sequence[int]) -> list[str | None]:
        """Of each token its text; None: it is not the same everywhere."""
        (anchor, other), again = self._anchors, _some(ids)
        texts = dict(zip(ids, self._between(anchor, other, ids), strict=True))
        for token_id, text in zip(again, self._between(other, anchor, again), strict=True):
            if text != texts[token_id]:
                texts[token_id] = None
        return list(texts.values())

    def _between(
        self, anchor: tuple[int, str, str], other: tuple[int, str, str], ids: Sequence[int]
    ) -> list[str | None]:
        """Of each token the text that stands, twice, behind another one, whether or not a third follows."""
        (left, begin, _), (right, _, end) = anchor, other
        last = self._decode([[left, token_id, token_id] for token_id in ids])
        between = self._decode([[left, token_id, token_id, right] for token_id in ids])
        texts = []
        for text, longer in zip(last, between, strict=True):
            twice = text.removeprefix(begin)
            once = twice[: len(twice) // 2]
            is_fit = text == begin + 2 * once and longer == text + end
            texts.append(once if is_fit else None)
        return texts

    def _find_anchors(self, ids: Sequence[int]) -> tuple[tuple[int, str, str], tuple[int, str, str]]:
        """Two tokens of letters or digits, each with its text at the beginning and behind another."""
        ids = ids[:_CANDIDATES]
        alone = self._decode([[token_id] for token_id in ids])
        twice = self._decode([[token_id, token_id] for token_id in ids])
        anchors = []
        for token_id, first, both in zip(ids, alone, twice, strict=True):
            if first.isalnum() and both.startswith(first) and both != first:
                anchors.append((token_id, first, both.removeprefix(first)))
            if len(anchors) == _ANCHORS:
                return anchors[0], anchors[1]
        raise Unsupported(_UNFIT)

    def _decode(self, texts: Sequence[list[int]]) -> list[str]:
        parts = [texts[begin : begin + _MAX_DECODED] for begin in range(0, len(texts), _MAX_DECODED)]
        return [text for part in parts for text in self._decode_batch(list(part))]


def _some(ids: Sequence[int]) -> Sequence[int]:
    """A sample of them, spread over all."""
    return ids[:: max(1, len(ids) // _MAX_CHECKED)]


def _spelled_bytes(tokenizer: Tokenizer, ids: Sequence[int], decoders: set[str]) -> dict[int, bytes]:
    """Of tokens that the decoder takes for bytes, which."""
    spelled = {}
    for token_id in ids:
        token = tokenizer.id_to_token(token_id)
        if token is None:
            continue
        if "ByteLevel" in decoders:
            known = [_BYTES.get(character) for character in token]
            whole = None in known
            spelled[token_id] = token.encode() if whole else bytes(byte for byte in known if byte is not None)
        elif "ByteFallback" in decoders and (byte := _BYTE.fullmatch(token)) is not None:
            spelled[token_id] = bytes([int(byte[1], 16)])
    return spelled


def _checked(spelled: bytes, text: str | None) -> bytes:
    """The bytes, if the decoded text says the same as far as it can."""
    try:
        whole = spelled.decode()
    except UnicodeDecodeError:
        # Twice the part of a character may be a character.
        return spelled
    return spelled if text == whole else b""


def _decoder_types(tokenizer: Tokenizer) -> set[str]:
    if tokenizer.decoder is None:
        return set()
    decoder = json.loads(tokenizer.decoder.__getstate__())
    return {decoder.get("type", "")} | {part["type"] for part in decoder.get("decoders", ())}


def _byte_level_alphabet() -> dict[str, int]:
    """The character by which byte-level tokenizers write each byte: itself, where it can be seen."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in set(seen)]
    return {chr(byte): byte for byte in seen} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}


_BYTES = _byte_level_alphabet()

"""The bytes that each token adds to a text, as the tokenizer's decoder writes them.

They are found by decoding: only the spelling of bytes is known from the decoder's type. A token that decodes
differently in different places has no bytes. So constraints on texts can be applied token by token, whatever
the decoder does to spaces, prefixes and suffixes. The beginning of a text does not matter: a sample continues
its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.detokenizer import BYTE_FALLBACK, decoder_types

from service.errors import Unsupported
from workers.common.byte_level import BYTES

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
# Tokens among which one is looked for to decode others beside it.
_CANDIDATES = 4096
# How many tokens of a byte-level decoder are checked.
_MAX_CHECKED = 2048
# Texts decoded in one call, during which no other Python thread runs.
_MAX_DECODED = 2048
# If less than this share of the tokens decodes the same everywhere, the decoder is not supported.
_MIN_CONSISTENT = 0.9
_UNSUPPORTED = "constraints need tokens that have the same text everywhere, and the model's have not"


def token_bytes(tokenizer: Tokenizer, vocab_size: int | None = None) -> tuple[list[bytes], list[int]]:
    """For each id the bytes it adds to a text: UTF-8, perhaps a part of a character; and the special ids.

    vocab_size: of the model, which cannot choose a token beyond it; None: all tokens.

    A special token has the name that grammars use. Empty: an id without a token, or a token whose text
    differs from place to place. Takes a second for a large vocabulary. Raises Unsupported if these are many.
    """
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    ids = sorted(token_id for token_id in vocab.values() if vocab_size is None or token_id < vocab_size)
    found = [b""] * (ids[-1] + 1 if ids else 0)
    added = tokenizer.get_added_tokens_decoder()
    special = {
        token_id: token.content.encode()
        for token_id, token in added.items()
        if token.special and token_id < len(found)
    }
    ids = [token_id for token_id in ids if token_id not in special]
    decoders = decoder_types(tokenizer.decoder)
    spelled = _spelled_bytes(tokenizer, ids, decoders)
    for token_id, text_bytes in (spelled | special).items():
        found[token_id] = text_bytes
    # A decoder that only concatenates bytes needs no more than a sample.
    checked = ids[:: max(1, len(ids) // _MAX_CHECKED)] if decoders == {"ByteLevel"} else ids
    for token_id, text in zip(checked, _texts(tokenizer, ids, checked), strict=True):
        if token_id in spelled:
            found[token_id] = _checked(spelled[token_id], text)
        elif text is not None and _REPLACEMENT not in text:
            found[token_id] = text.encode()
    if sum(bool(found[token_id]) for token_id in checked) < _MIN_CONSISTENT * len(checked):
        raise Unsupported(_UNSUPPORTED)
    return found, list(special)


def _texts(tokenizer: Tokenizer, all_ids: Sequence[int], ids: Sequence[int]) -> list[str | None]:
    """The text of each of `ids` after another token; None: it changes where that is repeated or followed."""
    anchor, begin, end = _anchor(tokenizer, all_ids)
    last = _decode(tokenizer, [[anchor, token_id, token_id] for token_id in ids])
    between = _decode(tokenizer, [[anchor, token_id, token_id, anchor] for token_id in ids])
    texts = list[str | None]()
    for text, longer in zip(last, between, strict=True):
        twice = text.removeprefix(begin)
        once = twice[: len(twice) // 2]
        is_consistent = text == begin + 2 * once and longer == text + end
        texts.append(once if is_consistent else None)
    return texts


def _anchor(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[int, str, str]:
    """A token of letters or digits, its text at the beginning and after itself. Raises Unsupported."""
    ids = ids[:_CANDIDATES]
    alone = _decode(tokenizer, [[token_id] for token_id in ids])
    twice = _decode(tokenizer, [[token_id, token_id] for token_id in ids])
    for token_id, first, both in zip(ids, alone, twice, strict=True):
        if first.isalnum() and both.startswith(first) and both != first:
            return token_id, first, both.removeprefix(first)
    raise Unsupported(_UNSUPPORTED)


def _decode(tokenizer: Tokenizer, texts: Sequence[list[int]]) -> list[str]:
    parts = [texts[begin : begin + _MAX_DECODED] for begin in range(0, len(texts), _MAX_DECODED)]
    return [text for part in parts for text in tokenizer.decode_batch(list(part))]


def _spelled_bytes(tokenizer: Tokenizer, ids: Sequence[int], decoders: set[str]) -> dict[int, bytes]:
    """The bytes of the tokens that the decoder writes as bytes."""
    spelled = {}
    for token_id in ids:
        token = tokenizer.id_to_token(token_id)
        if token is not None and (own := spelled_bytes(token, decoders)) is not None:
            spelled[token_id] = own
    return spelled


def spelled_bytes(token: str, decoders: set[str]) -> bytes | None:
    """The bytes of a token that a decoder with parts of these types writes as bytes; None: it does not."""
    if "ByteLevel" in decoders:
        is_spelled = BYTES.keys() >= set(token)
        return bytes(map(BYTES.__getitem__, token)) if is_spelled else token.encode()
    if "ByteFallback" in decoders and (byte := BYTE_FALLBACK.fullmatch(token)) is not None:
        return bytes([int(byte[1], 16)])
    return None


def _checked(spelled: bytes, text: str | None) -> bytes:
    """The bytes; empty if they are a whole text that differs from the decoded one."""
    try:
        whole = spelled.decode()
    except UnicodeDecodeError:
        # Not comparable: a part of a character, decoded twice, may even be a character.
        return spelled
    return spelled if text == whole else b""

"""The tokenizer.json that the metadata of a GGUF file describe. Nothing here tokenises.

Two kinds are known. "gpt2" is BPE over bytes; the name of its pre-tokenizer determines how a text is split
first. "llama" is SentencePiece's BPE, whose merges follow from the scores of its pieces; "gemma4" lists them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workers.common.gguf import GgufError
from workers.common.gguf.header import Value
from workers.common.gguf.splits import GEMMA4, Split

PREFIX = "tokenizer.ggml."

# Types of tokens.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
# What is found in a text by other means, and never merged.
_NO_PIECES = (UNKNOWN, CONTROL, BYTE)
_SPACE = "\u2581"
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
# Longer pieces are not merged from others, which bounds the work for a piece.
_MAX_PIECE_CHARACTERS = 256
# Twice the merges of the largest known vocabulary, gemma3's.
_MAX_MERGES = 1 << 20
# Phi-3 drops whitespace after its other added tokens, which GGUF cannot represent.
_PHI3 = "phi3"
_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")
# Architectures whose pieces are merged in the order of the vocabulary, not of their scores.
_IN_ORDER_OF_IDS = ("gemma", "gemma2", "gemma3")


def tokenizer_of(
    metadata: Mapping[str, Value],
    tokens: list[str],
    split: Split | None,
    prefix: Sequence[int] | None = None,
) -> dict[str, Any]:
    """The content of a tokenizer.json. Raises GgufError.

    split: See `split_of`.
    prefix: The tokens before a text; None: what the metadata say of a BOS token.
    """
    kinds = metadata.get(f"{PREFIX}token_type")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != len(tokens)):
        raise GgufError(f"{PREFIX}token_type: must have a number for each of {len(tokens)} tokens")
    if split is None:
        parts, adds_bos = _sentencepiece(metadata, tokens), True
    else:
        parts, adds_bos = _byte_level(metadata, tokens, split)
    # Phi-4 has the same architecture, and another tokenizer.
    drops_space = split is None and metadata.get("general.architecture") == _PHI3
    added = [
        {
            # Those of ChatGLM without brackets are parts of words.
            "id": index, "content": token, "single_word": type_number == CONTROL and token.isalnum(),
            "lstrip": False,
            "rstrip": drops_space and token not in _KEEPS_SPACE,
            "normalized": False, "special": type_number != USER_DEFINED,
        }
        for index, (token, type_number) in enumerate(zip(tokens, kinds or (), strict=False))
        if type_number in (CONTROL, UNKNOWN, USER_DEFINED) and token
    ]  # fmt: skip
    before, after = (
        token_id(metadata, f"{name}_token_id", len(tokens))
        if metadata.get(f"{PREFIX}add_{name}_token", default) is True
        else None
        for name, default in (("bos", adds_bos), ("eos", False))
    )
    around = (
        [index for index in (before,) if index is not None] if prefix is None else [*prefix],
        [index for index in (after,) if index is not None],
    )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        **parts,
        "post_processor": _around(tokens, *around, byte_level=split is not None),
    }


def _byte_level(
    metadata: Mapping[str, Value], tokens: list[str], split: Split
) -> tuple[dict[str, Any], bool]:
    """Normalizer, pre-tokenizer, decoder and model; and whether a BOS token is added by default."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = _given_merges(metadata, vocabulary)
    parts = {
        "normalizer": {"type": "NFC"} if split.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": split_steps(split)},
        "decoder": _BYTE_LEVEL | {"use_regex": True},
        "model": _bpe(vocabulary, merges) | {"ignore_merges": split.whole},
    }
    return parts, split.bos


def _given_merges(metadata: Mapping[str, Value], vocabulary: Mapping[str, int]) -> list[list[str]]:
    """The merges of the file. Raises GgufError for an invalid one."""
    merges = [merge.split(" ") for merge in strings(metadata, "merges") or ()]
    if any(len(pair) != 2 for pair in merges):
        raise GgufError(f"{PREFIX}merges: each must be two tokens with a space between them")
    if any(not {*pair, "".join(pair)} <= vocabulary.keys() for pair in merges):
        raise GgufError(f"{PREFIX}merges: each must be of tokens, and make a token")
    return merges


def split_steps(split: Split) -> list[dict[str, Any]]:
    """The steps of a pre-tokenizer."""
    steps: list[dict[str, Any]] = []
    if split.digits:
        steps.append({"type": "Digits", "individual_digits": True})
    steps += [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in (*split.before, split.pattern)
        if pattern
    ]
    steps.append(_BYTE_LEVEL | {"use_regex": not split.pattern})
    return steps


def _sentencepiece(metadata: Mapping[str, Value], tokens: list[str]) -> dict[str, Any]:
    """Normalizer, pre-tokenizer, decoder and model."""
    has_merges = metadata.get(f"{PREFIX}model") == GEMMA4
    is_gemma = has_merges or metadata.get("general.architecture") in _IN_ORDER_OF_IDS
    if is_gemma:
        # These have spaces, where the library expects the character that stands for them.
        tokens = [token.replace(" ", _SPACE) if not token.strip(" ") else token for token in tokens]
        scores: Sequence[float] = range(0, -len(tokens), -1)
    else:
        given = metadata.get(f"{PREFIX}scores")
        if not isinstance(given, list) or len(given) != len(tokens):
            raise GgufError(f"{PREFIX}scores: must have a number for each of {len(tokens)} tokens")
        scores = given  # type: ignore[assignment] # a number each, or the sort below fails
        if any(type(score) is not float or score != score for score in scores):  # noqa: PLR0124 - NaN
            raise GgufError(f"{PREFIX}scores: must be numbers")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    kinds = metadata.get(f"{PREFIX}token_type")
    kind_of = kinds if isinstance(kinds, list) else [NORMAL] * len(tokens)
    pieces = {token: index for token, index in vocabulary.items() if kind_of[index] not in _NO_PIECES}
    unknown = token_id(metadata, "unknown_token_id", len(tokens))
    prefix = metadata.get(f"{PREFIX}add_space_prefix", not is_gemma)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    first = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*first, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            vocabulary,
            _given_merges(metadata, vocabulary) if has_merges else merges_of(pieces, tokens, scores),
        )
        | {
            "unk_token": None if unknown is None else tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def _bpe(vocabulary: Mapping[str, int], merges: Sequence[Sequence[str]]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": merges,
    }


def merges_of(
    vocabulary: Mapping[str, int], tokens: Sequence[str], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """The merges of the pieces in a vocabulary, best first: all pairs of them that make one.

    In the order of the library's conversion (`generate_merges` of convert_slow_tokenizer.py).

    Raises GgufError if there are too many.
    """
    found: list[tuple[float, int, int, int, int]] = []
    for piece, token in vocabulary.items():
        if len(piece) > _MAX_PIECE_CHARACTERS:
            continue
        pairs = ((piece[:index], piece[index:]) for index in range(1, len(piece)))
        known = [
            (vocabulary[first], vocabulary[second])
            for first, second in pairs
            if first in vocabulary and second in vocabulary
        ]
        if len(found) + len(known) > _MAX_MERGES:
            raise GgufError(f"{PREFIX}tokens: pieces can be made of others in more than {_MAX_MERGES} ways")
        known.sort()
        found += [
            (scores[token], len(tokens[first]), len(tokens[second]), first, second) for first, second in known
        ]
    found.sort(key=lambda entry: entry[:3], reverse=True)
    return [(tokens[first], tokens[second]) for *_, first, second in found]


def _around(
    tokens: list[str], before: list[int], after: list[int], *, byte_level: bool
) -> dict[str, Any] | None:
    """The post-processor, which adds tokens before and after a text. None: there is none."""
    offsets = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    if not (before or after):
        return offsets if byte_level else None

    def template(text: str, type_id: int) -> list[dict[str, Any]]:
        first, last = (
            [{"SpecialToken": {"id": tokens[index], "type_id": type_id}} for index in indexes]
            for indexes in (before, after)
        )
        return [*first, {"Sequence": {"id": text, "type_id": type_id}}, *last]

    return {
        "type": "TemplateProcessing",
        "single": template("A", 0),
        "pair": template("A", 0) + template("B", 1),
        "special_tokens": {
            tokens[index]: {"id": tokens[index], "ids": [index], "tokens": [tokens[index]]}
            for index in (*before, *after)
        },
    }


def token_id(metadata: Mapping[str, Value], name: str, count: int) -> int | None:
    """A token's id; None: there is none. Raises GgufError if it is not in the vocabulary."""
    value = metadata.get(PREFIX + name)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < count:
        raise GgufError(f"{PREFIX}{name}: must be the id of one of {count} tokens, got {value!r}")
    return value


def strings(metadata: Mapping[str, Value], name: str) -> list[str] | None:
    """An array of strings; None: there is none. Raises GgufError."""
    value = metadata.get(PREFIX + name)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise GgufError(f"{PREFIX}{name}: must be an array of strings")
    return value  # type: ignore[return-value] # as checked

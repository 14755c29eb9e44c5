"""Which tokenizers need little CPU time and memory for any text: those that consist of known parts only.

A tokenizer is an untrusted program of a model's authors: it may replace a character by a thousand, or split
by an expression that takes exponential time. An unknown part may still be harmless.
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
# Of a part's settings as JSON. Also limits the number of nested parts.
_MAX_PART_BYTES = 16 << 10
# Of a template around a text: each of its special tokens may be many tokens.
_MAX_TEMPLATE_BYTES = 2048
_MAX_AFFIX_CHARACTERS = 64
# The longest tokens of known models have a few hundred characters.
_MAX_TOKEN_CHARACTERS = 4096

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_FIRST = r"[^\r\n\p{L}\p{N}]?"
QWEN_2 = rf"{_CONTRACTIONS}|{_FIRST}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
# The splitting expressions of well-known models, which take linear time.
_EXPRESSIONS = frozenset(
    (
        # GPT-2
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        # GPT-4, Llama 3
        QWEN_2.replace(r"|\p{N}|", r"|\p{N}{1,3}|"),
        QWEN_2,
        # Qwen 3.5
        rf"{_CONTRACTIONS}|{_FIRST}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
        # GPT-4o; Mistral
        *(
            rf"{_FIRST}{_UPPER}*{_LOWER}+{end}|{_FIRST}{_UPPER}+{_LOWER}*{end}"
            rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
            for end, digits in ((f"{_CONTRACTIONS}?", r"\p{N}{1,3}"), ("", r"\p{N}"))
        ),
        # DeepSeek
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        (
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
            rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
        ),
        # The shipped model
        r"\s+",
    )
)
# By type of a part: how many characters it can make of one.
_NORMALIZERS = {
    "NFC": 3,
    "NFD": 4,
    "NFKC": 18,
    "NFKD": 18,
    "Lowercase": 3,
    "ByteLevel": 4,
    "BertNormalizer": 24,
    "Strip": 1,
    "StripAccents": 1,
}
_PRE_TOKENIZERS = {
    "ByteLevel": 4,
    "Metaspace": 2,
    "BertPreTokenizer": 1,
    "Digits": 1,
    "Punctuation": 1,
    "UnicodeScripts": 1,
    "Whitespace": 1,
    "WhitespaceSplit": 1,
    "CharDelimiterSplit": 1,
}
_PROCESSORS = dict.fromkeys(("ByteLevel", "BertProcessing", "RobertaProcessing", "TemplateProcessing"), 1)
_DECODERS = dict.fromkeys(
    ("ByteLevel", "ByteFallback", "Fuse", "Strip", "BPEDecoder", "CTC", "Metaspace", "WordPiece"), 1
)


def encodes_in_bounds(tokenizer: Tokenizer) -> bool:
    """Whether encoding any text costs little more than an ordinary text of its length."""
    model = tokenizer.model
    if type(model).__name__ != "BPE" or tokenizer.padding is not None or tokenizer.truncation is not None:
        return False
    affixes = (model.continuing_subword_prefix, model.end_of_word_suffix)
    if any(len(affix or "") > _MAX_AFFIX_CHARACTERS for affix in affixes):
        return False
    growth = _growth(tokenizer.normalizer, _NORMALIZERS) * _growth(tokenizer.pre_tokenizer, _PRE_TOKENIZERS)
    growth *= _growth(tokenizer.post_processor, _PROCESSORS, _MAX_TEMPLATE_BYTES)
    return growth <= _MAX_GROWTH


def decodes_in_bounds(tokenizer: Tokenizer) -> bool:
    """Whether decoding any tokens costs little more than with an ordinary tokenizer."""
    tokens = tokenizer.get_vocab(with_added_tokens=True)
    is_long = max(map(len, tokens), default=0) > _MAX_TOKEN_CHARACTERS
    return not is_long and _growth(tokenizer.decoder, _DECODERS) <= _MAX_GROWTH


def _growth(part: Any, known: Mapping[str, int], max_bytes: int = _MAX_PART_BYTES) -> float:
    """How many times longer a part of a tokenizer can make a text; infinite: unknown."""
    if part is None:
        return 1.0
    settings = part.__getstate__()
    if len(settings) > max_bytes:
        return math.inf
    return math.prod(_growth_of_one(one, known) for one in _flat(json.loads(settings)))


def _flat(part: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The part itself, or the parts of a sequence, recursively."""
    if part["type"] != "Sequence":
        yield part
        return
    names = ("normalizers", "pretokenizers", "processors", "decoders")
    for one in next(part[name] for name in names if name in part):
        yield from _flat(one)


def _growth_of_one(part: Mapping[str, Any], known: Mapping[str, int]) -> float:
    match part:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
            return max(1.0, len(new) / len(old))
        case {"type": "Prepend", "prepend": str(text)}:
            return 1.0 + len(text)
        case {"type": "Split", "pattern": {"String": str(text)}} if text:
            return 1.0
        case {"type": "Replace" | "Split", "pattern": {"Regex": str(text)}}:
            # Some files have line breaks, and some the escapes for them.
            escaped = text.replace("\r", r"\r").replace("\n", r"\n")
            return max(1.0, len(part.get("content", ""))) if escaped in _EXPRESSIONS else math.inf
        case _:
            return known.get(part["type"], math.inf)

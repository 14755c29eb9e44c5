"""Regular expressions of JSON Schemas as llguidance understands them: which texts they match.

The grammar's own engine answers, so that no other reading of an expression can differ from the grammar's. It
runs in the process for grammars.
"""

from __future__ import annotations

import functools
import json

from llguidance import LLMatcher, LLTokenizer

from service.text.grammar_vocabulary import LIMITS, NO_FORCING, Vocabulary

# The most names that `names_of` returns, and their longest text in bytes.
_MAX_NAMES = 64
_MAX_NAME_BYTES = 256


class SchemaError(Exception):
    """The library cannot apply the schema."""


def check_backslash(expression: object) -> None:
    """Raises SchemaError for an expression that ends in a lone backslash, which the library drops."""
    if isinstance(expression, str) and (len(expression) - len(expression.rstrip("\\"))) % 2:
        raise SchemaError("the regular expression ends in a lone backslash")


@functools.cache
def _byte_tokenizer() -> LLTokenizer:
    """Of a vocabulary of the 256 bytes."""
    return LLTokenizer(Vocabulary([bytes([byte]) for byte in range(256)], []))


@functools.lru_cache(256)
def _texts(pattern: str) -> LLMatcher:
    """The texts in JSON that a pattern matches somewhere. Raises SchemaError."""
    grammars = [
        {"lark_grammar": "start: @value" + NO_FORCING},
        {"name": "value", "json_schema": {"type": "string", "pattern": pattern}},
    ]
    matcher = LLMatcher(_byte_tokenizer(), json.dumps({"grammars": grammars}), log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise SchemaError(matcher.get_error())
    return matcher


def matches(pattern: str, text: str) -> bool:
    """Whether an expression matches somewhere in a text. Raises SchemaError."""
    matcher = _texts(pattern).deep_copy()
    data = json.dumps(text, ensure_ascii=False).encode(errors="replace")
    return bool(matcher.consume_tokens(list(data))) and matcher.is_accepting()


def names_of(pattern: str) -> list[str] | None:
    """All texts that a pattern matches; None: more than a few. Raises SchemaError."""
    if not any(end in pattern for end in ("$", r"\z", r"\Z")):
        return None
    names, begun = list[bytes](), [(_texts(pattern).deep_copy(), b"")]
    while begun:
        matcher, text = begun.pop()
        follow = [] if matcher.is_stopped() else _set_bits(matcher.compute_bitmask())
        if matcher.is_accepting():
            names.append(text)
        if len(names) + len(begun) + len(follow) > _MAX_NAMES or len(text) > _MAX_NAME_BYTES:
            return None
        for byte in follow:
            longer = matcher.deep_copy()
            if longer.consume_tokens([byte]):
                begun.append((longer, text + bytes([byte])))
    # The same name may be written in several ways.
    return sorted({json.loads(name) for name in names})


def _set_bits(mask: bytes) -> list[int]:
    return [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]

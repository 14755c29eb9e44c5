"""Common settings of llguidance, and matching of texts by the regular expressions of JSON Schemas.

The grammar's own engine matches, so that results cannot differ from the grammar's. Runs in the process for
grammars.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from typing import Any, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

# Masks allow every token that fits the grammar. With forcing, the library would tokenize forced text itself,
# which fails with tokenizers that add or drop spaces.
NO_FORCING: Final = '\n%llguidance {"no_forcing": true}\n'
LIMITS: Final = LLParserLimits(verbose_errors=False)


class Vocabulary(TokenizerWrapper):
    """The vocabulary in the library's form. The library appends a token for the end of a text."""

    def __init__(self, tokens: list[bytes], special_ids: list[int]) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = None  # type: ignore[assignment] # the library adds one
        self.bos_token_id = None
        self.is_tokenizer_wrapper = True

    def __call__(self, text: str) -> list[int]:
        """Never called, since nothing is forced."""
        raise NotImplementedError


class SchemaError(Exception):
    """The library cannot apply the schema."""


def check_backslash(expression: object) -> None:
    """Raises SchemaError for an expression that ends in a lone backslash, which the library drops."""
    if isinstance(expression, str) and (len(expression) - len(expression.rstrip("\\"))) % 2:
        raise SchemaError("the regular expression ends in a lone backslash")


@functools.cache
def _byte_tokenizer() -> LLTokenizer:
    """A tokenizer whose vocabulary is the 256 bytes."""
    return LLTokenizer(Vocabulary([bytes([byte]) for byte in range(256)], []))


def check_patterns(patterns: Iterable[str]) -> None:
    """Raises SchemaError for invalid expressions. Checks all at once: each alone takes a millisecond."""
    _compiled({"anyOf": [{"type": "null"}, *map(_string, patterns)]})


@functools.lru_cache(256)
def _texts(pattern: str) -> LLMatcher:
    """A matcher of JSON strings in which a pattern matches somewhere. Raises SchemaError."""
    return _compiled(_string(pattern))


def _string(pattern: str) -> dict[str, Any]:
    """A schema for strings in which a pattern matches somewhere. Raises SchemaError."""
    check_backslash(pattern)
    return {"type": "string", "pattern": pattern}


def _compiled(schema: dict[str, Any]) -> LLMatcher:
    """Compiles a schema. Raises SchemaError."""
    grammars = [
        {"lark_grammar": "start: @value" + NO_FORCING},
        {"name": "value", "json_schema": schema},
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

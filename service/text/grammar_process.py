"""The process that compiles grammars and computes masks, with llguidance.

A task is JSON, and its result a line of JSON, which a mask may follow. A task for a mask has only the
sample's new tokens. If this process does not know the earlier ones, the result is `is_missing`, and the
gateway sends all and the grammar. So the grammars and samples kept here, up to a limit, are only a cache.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark

from service.text import task_loop

_MAX_GRAMMARS = 64
_MAX_MATCHERS = 1024
# Masks allow every token that fits the grammar. With forcing, the library would tokenize forced text itself,
# which goes wrong with tokenizers that add or drop spaces.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
# Whitespace between the parts of a JSON value. Limited, or a model could write whitespace for ever.
_JSON_WHITESPACE = r"(\x20|\n[\x20\t]{0,20})?"
# One space may come first: a prompt may end before the space of its next word.
_JSON_LARK = 'start: " "? @value'
# The library's errors include the lines around the error.
_EXCERPT = re.compile(r"\n *[0-9]+ \| ")
_LIMITS = LLParserLimits(verbose_errors=False)


class GrammarError(Exception):
    """A grammar cannot be used, or a sample cannot continue."""


@dataclass(slots=True)
class _Sample:
    """A sample's matcher, and how many tokens it has consumed."""

    matcher: LLMatcher
    num_tokens: int = 0


class GrammarServer:
    """The state of this process: the tokenizer, compiled grammars, samples."""

    def __init__(self) -> None:
        self._tokenizer: LLTokenizer | None = None
        self._compiled = functools.lru_cache(_MAX_GRAMMARS)(self._compile)
        self._samples: OrderedDict[int, _Sample] = OrderedDict()

    def run(self, task: bytes) -> bytes:
        """Runs one task: `set_vocabulary`, `compile` or `mask`."""
        request = json.loads(task)
        result: dict[str, Any] = {}
        mask = b""
        try:
            if request["method"] == "set_vocabulary":
                tokens = [text.encode("latin-1") for text in request["tokens"]]
                self._tokenizer = LLTokenizer(_Tokens(tokens, request["special_ids"]))
            elif request["method"] == "compile":
                _mask(self._compiled(request["kind"], request["text"]).deep_copy())
            elif (sample := self._sample(request)) is None:
                result["is_missing"] = True
            else:
                result["may_end"], mask = _mask(sample.matcher)
        except GrammarError as error:
            result["error"] = str(error)
        except MemoryError:
            result["error"] = "it needs too much memory"
        return json.dumps(result).encode() + b"\n" + mask

    def _sample(self, request: dict[str, Any]) -> _Sample | None:
        """The sample after the request's tokens; None: its earlier tokens are missing."""
        number, begin, token_ids = request["sample"], request["begin"], request["token_ids"]
        sample = self._samples.pop(number, None)
        if begin == 0:
            sample = _Sample(self._compiled(request["kind"], request["text"]).deep_copy())
        elif sample is None or sample.num_tokens != begin:
            return None
        if token_ids and not sample.matcher.consume_tokens(token_ids):
            raise GrammarError(_reason(sample.matcher))
        sample.num_tokens += len(token_ids)
        self._samples[number] = sample
        if len(self._samples) > _MAX_MATCHERS:
            self._samples.popitem(last=False)
        return sample

    def _compile(self, kind: str, text: str) -> LLMatcher:
        """A grammar in its initial state. Raises GrammarError."""
        assert self._tokenizer is not None
        matcher = LLMatcher(self._tokenizer, _grammar_text(kind, text), log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise GrammarError(_reason(matcher, kind))
        return matcher


class _Tokens(TokenizerWrapper):
    """The vocabulary as the library needs it. The library appends a token for the end of a text."""

    def __init__(self, tokens: list[bytes], special_ids: list[int]) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = None  # type: ignore[assignment] # the library adds one
        self.bos_token_id = None
        self.is_tokenizer_wrapper = True

    def __call__(self, text: str) -> list[int]:
        """Never called, since nothing is forced."""
        raise NotImplementedError


def _mask(matcher: LLMatcher) -> tuple[bool, bytes]:
    """Whether the text may end here, and a bit for each token that may follow. Raises GrammarError."""
    may_end = matcher.is_accepting()
    if matcher.is_stopped() and not matcher.is_error():
        return may_end, b""
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        raise GrammarError(_reason(matcher))
    return may_end, mask


def _grammar_text(kind: str, text: str) -> str:
    """A grammar in the library's own format. Raises GrammarError."""
    if kind == "regex":
        return _to_json({"lark_grammar": f"start: /{regex_to_lark(text)}/{_OPTIONS}"})
    if kind == "lark":
        return _to_json({"lark_grammar": text + _OPTIONS})
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        raise GrammarError("it is not JSON") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarError("a JSON Schema is an object")
    schema["x-guidance"] = {"whitespace_pattern": _JSON_WHITESPACE}
    return _to_json({"lark_grammar": _JSON_LARK + _OPTIONS}, {"name": "value", "json_schema": schema})


def _to_json(*grammars: dict[str, Any]) -> str:
    return json.dumps({"grammars": grammars})


def _reason(matcher: LLMatcher, kind: str = "") -> str:
    """Why a matcher failed, without excerpts of the grammar around the error."""
    reason = _EXCERPT.split(matcher.get_error().replace("<non-verbose/>", " "))[0]
    if reason.startswith("NoExtensionBias"):
        return "none of the model's tokens can follow"
    return reason.rpartition("error: ")[2] if kind == "regex" else reason


if __name__ == "__main__":
    sys.exit(task_loop.main(GrammarServer().run))

"""The process in which grammars are compiled and masks made, by llguidance.

A task is a line of JSON, and so is an answer; bytes may follow. Who asks for a mask says what is new since
the last time, or is told that more is missing: what is kept here, of which there is only so much, saves time
and nothing else.
"""

from __future__ import annotations

import json
import re
import sys
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark

from service.text import task_loop

_MAX_GRAMMARS = 64
_MAX_MATCHERS = 1024
# A mask has what the text allows. Else the library would ask a tokenizer how it writes what is forced, and
# those that add or drop spaces are not what it expects.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
# Between the parts of JSON values: a model that likes blanks would go on with them for ever.
_JSON_BLANKS = r"(\x20|\n[\x20\t]{0,20})?"
# A prompt may end where a word would begin.
_JSON_LARK = 'start: " "? @value'
# The library shows the lines around an error.
_EXCERPT = re.compile(r"\n *[0-9]+ \| ")
_LIMITS = LLParserLimits(verbose_errors=False)


class GrammarError(Exception):
    """A grammar cannot be used, or not any further."""


@dataclass(slots=True)
class _State:
    """A sample under a grammar."""

    matcher: LLMatcher
    num_tokens: int = 0


class Grammars:
    """What this process knows: the tokenizer, grammars, samples."""

    def __init__(self) -> None:
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._states: OrderedDict[int, _State] = OrderedDict()

    def answer(self, task: bytes) -> bytes:
        """Does one task: `use`, `compile` or `mask`."""
        line, _, rest = task.partition(b"\n")
        asked = json.loads(line)
        said: dict[str, Any] = {}
        mask = b""
        try:
            if asked["do"] == "use":
                self._use(asked["special_ids"], asked["lengths_bytes"], rest)
            elif asked["do"] == "compile":
                self._mask(_State(self._grammar(asked).deep_copy()))
            elif (state := self._state(asked)) is None:
                said["is_missing"] = True
            else:
                said["may_end"], mask = self._mask(state)
        except GrammarError as error:
            said["error"] = str(error)
        except MemoryError:
            said["error"] = "it needs too much memory"
        return json.dumps(said).encode() + b"\n" + mask

    def _use(self, special_ids: list[int], lengths_bytes: int, rest: bytes) -> None:
        """Tokens with their bytes: the tokenizer of all that follows."""
        tokens, start = [], lengths_bytes
        for length in array("I", rest[:lengths_bytes]):
            tokens.append(rest[start : start + length])
            start += length
        self._tokenizer = LLTokenizer(_Tokens(tokens, special_ids))

    def _state(self, asked: dict[str, Any]) -> _State | None:
        """The sample behind its tokens; None: not all of them are known here, or not its grammar."""
        number, begin, token_ids = asked["sample"], asked["begin"], asked["token_ids"]
        state = self._states.pop(number, None)
        if begin == 0:
            if asked["key"] not in self._compiled and "text" not in asked:
                return None
            state = _State(self._grammar(asked).deep_copy())
        elif state is None or state.num_tokens != begin:
            return None
        if token_ids and not state.matcher.consume_tokens(token_ids):
            raise GrammarError(_reason(state.matcher))
        state.num_tokens += len(token_ids)
        self._states[number] = state
        if len(self._states) > _MAX_MATCHERS:
            self._states.popitem(last=False)
        return state

    def _grammar(self, asked: dict[str, Any]) -> LLMatcher:
        """A grammar at its beginning. Raises GrammarError."""
        key = asked["key"]
        if key in self._compiled:
            self._compiled.move_to_end(key)
            return self._compiled[key]
        assert self._tokenizer is not None
        matcher = LLMatcher(
            self._tokenizer, _grammar_text(asked["kind"], asked["text"]), log_level=0, limits=_LIMITS
        )
        if matcher.is_error():
            raise GrammarError(_reason(matcher, asked["kind"]))
        self._compiled[key] = matcher
        if len(self._compiled) > _MAX_GRAMMARS:
            self._compiled.popitem(last=False)
        return matcher

    def _mask(self, state: _State) -> tuple[bool, bytes]:
        """Whether the text may end here, and a bit for each token that may follow. Raises GrammarError."""
        matcher = state.matcher
        assert self._tokenizer is not None
        may_end = matcher.is_accepting()
        if matcher.is_stopped() and not matcher.is_error():
            return may_end, b""
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(_reason(matcher))
        return may_end, mask


class _Tokens(TokenizerWrapper):
    """What the library asks of a tokenizer. The end of a text is a token of its own behind all others."""

    def __init__(self, tokens: list[bytes], special_ids: list[int]) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = None  # type: ignore[assignment] # the library makes one
        self.bos_token_id = None
        self.is_tokenizer_wrapper = True

    def __call__(self, text: str) -> list[int]:
        """Nothing is forced, so that it is not asked for."""
        raise NotImplementedError


def _grammar_text(kind: str, text: str) -> str:
    """A grammar as the library reads all of them. Raises GrammarError."""
    if kind == "regex":
        return _grammars({"lark_grammar": f"start: /{regex_to_lark(text)}/{_OPTIONS}"})
    if kind == "lark":
        return _grammars({"lark_grammar": text + _OPTIONS})
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        raise GrammarError("it is not JSON") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarError("a JSON Schema is an object")
    schema["x-guidance"] = {"whitespace_pattern": _JSON_BLANKS}
    return _grammars({"lark_grammar": _JSON_LARK + _OPTIONS}, {"name": "value", "json_schema": schema})


def _grammars(*grammars: dict[str, Any]) -> str:
    return json.dumps({"grammars": grammars})


def _reason(matcher: LLMatcher, kind: str = "") -> str:
    """Why a matcher cannot go on, without the parts that show what was written around the grammar."""
    reason = _EXCERPT.split(matcher.get_error().replace("<non-verbose/>", " "))[0]
    if reason.startswith("NoExtensionBias"):
        return "none of the model's tokens can follow"
    return reason.rpartition("error: ")[2] if kind == "regex" else reason


if __name__ == "__main__":
    sys.exit(task_loop.main(Grammars().answer))

"""The process that compiles grammars and computes masks, with llguidance.

A task is JSON, and its result a line of JSON, which masks may follow. A task for a mask has only the
sample's new tokens; it may have a draft of the next ones, along which further masks are computed. If this
process does not know the earlier tokens, the result is `is_missing`, and the gateway sends all and the
grammar. So the grammars and samples kept here, up to a limit, are only a cache.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from llguidance import LLMatcher, LLTokenizer, regex_to_lark

from service.text.json_schema import prepared
from service.text.schema_patterns import LIMITS, NO_FORCING, SchemaError, Vocabulary, check_backslash
from service.text.schema_values import Schema, Validator

_MAX_GRAMMARS = 64
_MAX_MATCHERS = 1024
# The depth of a schema. The library parses about 120 levels; checking a schema takes a time that grows with
# the square of them.
_MAX_LEVELS = 200
# Whitespace between the parts of a JSON value. Limited, or a model could write whitespace for ever.
_JSON_WHITESPACE = r"(\x20|\n[\x20\t]{0,20})?"
# One space may come first: a prompt may end before the space of its next word.
_JSON_LARK = 'start: " "? @value'
# How long masks along a draft are computed: a task of others may wait.
_DRAFT_S = 0.01
# Few tokens are longer.
_MAX_FORCED_BYTES = 64
# The library's errors include the lines around the error.
_EXCERPT = re.compile(r"\n *[0-9]+ \| ")


class GrammarError(Exception):
    """A grammar cannot be used, or a sample cannot continue."""


@dataclass(frozen=True, slots=True)
class _Grammar:
    """A compiled grammar in its initial state, and the schema of finished texts if there is one."""

    matcher: LLMatcher
    validator: Validator | None


@dataclass(slots=True)
class _Sample:
    """A sample's matcher and schema, how many tokens it has, and their text if that is checked."""

    matcher: LLMatcher
    validator: Validator | None
    num_tokens: int = 0
    text: bytearray = field(default_factory=bytearray)

    def mask(self) -> tuple[bool, bytes]:
        """As `_mask`: a text that is not valid may not end. Raises GrammarError or SchemaError."""
        may_end, mask = _mask(self.matcher)
        if may_end and self.validator is not None and not self.validator.accepts(self.text):
            if not any(mask):
                raise GrammarError("the value is finished and not valid under the schema")
            may_end = False
        return may_end, mask

    def consume(self, token_ids: Sequence[int], tokens: Sequence[bytes]) -> None:
        """Appends tokens, of all of which `tokens` are the bytes. Raises GrammarError."""
        if token_ids and not self.matcher.consume_tokens([*token_ids]):
            raise GrammarError(_reason(self.matcher))
        self.num_tokens += len(token_ids)
        if self.validator is not None:
            self.text += b"".join(tokens[token_id] for token_id in token_ids)

    def copy(self) -> _Sample:
        """One that changes on its own."""
        text = bytearray(self.text)
        return _Sample(self.matcher.deep_copy(), self.validator, self.num_tokens, text)


class GrammarServer:
    """The state of this process: the tokenizer, compiled grammars, samples."""

    def __init__(self) -> None:
        self._tokenizer: LLTokenizer | None = None
        self._tokens: list[bytes] = []
        # By their bytes; empty until one is looked for.
        self._ids: dict[bytes, int] = {}
        self._compiled = functools.lru_cache(_MAX_GRAMMARS)(self._compile)
        self._samples: OrderedDict[int, _Sample] = OrderedDict()

    def run(self, task: bytes) -> bytes:
        """Runs one task: `set_vocabulary`, `compile` or `mask`."""
        request = json.loads(task)
        result: dict[str, Any] = {}
        mask = b""
        try:
            if request["method"] == "set_vocabulary":
                self._tokens = [text.encode("latin-1") for text in request["tokens"]]
                self._tokenizer = LLTokenizer(Vocabulary(self._tokens, request["special_ids"]))
            elif request["method"] == "compile":
                _mask(self._compiled(request["kind"], request["text"]).matcher.deep_copy())
            elif (sample := self._sample(request)) is None:
                result["is_missing"] = True
            else:
                drafted, masks = self._along(sample, request["draft"], request["draft_tokens"])
                result["draft"], result["may_end"] = drafted, [may_end for may_end, _ in masks]
                mask = b"".join([bits for _, bits in masks])
        except GrammarError as error:
            result["error"] = str(error)
        except SchemaError as error:
            result["error"] = _without_excerpts(str(error))
        except RecursionError:
            result["error"] = "it is nested too deeply"
        except MemoryError:
            result["error"] = "it needs too much memory"
        return json.dumps(result).encode() + b"\n" + mask

    def _sample(self, request: dict[str, Any]) -> _Sample | None:
        """The sample after the request's tokens; None: its earlier tokens are missing."""
        number, begin, token_ids = request["sample"], request["begin"], request["token_ids"]
        sample = self._samples.pop(number, None)
        if begin == 0:
            grammar = self._compiled(request["kind"], request["text"])
            sample = _Sample(grammar.matcher.deep_copy(), grammar.validator)
        elif sample is None or sample.num_tokens != begin:
            return None
        sample.consume(token_ids, self._tokens)
        self._samples[number] = sample
        if len(self._samples) > _MAX_MATCHERS:
            self._samples.popitem(last=False)
        return sample

    def _along(
        self, sample: _Sample, draft: Sequence[int], most: int
    ) -> tuple[list[int], list[tuple[bool, bytes]]]:
        """The first tokens of a draft that the grammar allows, and then those that it forces: `most` in all.

        And the masks of the sample (see `_Sample.mask`): now, and after each of these. After none of them the
        text is finished. Raises GrammarError or SchemaError if there is no mask now.
        """
        masks, drafted = [sample.mask()], list[int]()
        ahead, until_s = sample.copy() if most else sample, time.monotonic() + _DRAFT_S
        while len(drafted) < most and time.monotonic() < until_s:
            may_end, bits = masks[-1]
            token_id = next(iter(draft[len(drafted) :]), -1)
            if not (0 <= token_id < len(self._tokens) and _allows(bits, token_id)):
                draft, token_id = (), -1 if may_end else self._forced(ahead.matcher, bits)
            if token_id < 0:
                break
            try:
                ahead.consume([token_id], self._tokens)
                may_end, bits = ahead.mask()
            except (GrammarError, SchemaError):
                break
            if not any(bits):
                break
            drafted.append(token_id)
            masks.append((may_end, bits))
        return drafted, masks

    def _forced(self, matcher: LLMatcher, bits: bytes) -> int:
        """The next token where a grammar forces some bytes. -1: it does not. `bits`: its present mask.

        Tokens of other lengths may be allowed, too. The longest is the likeliest one.
        """
        forced = matcher.compute_ff_bytes()
        if forced and not self._ids:
            self._ids = {token: token_id for token_id, token in enumerate(self._tokens) if token}
        for size in range(min(len(forced), _MAX_FORCED_BYTES), 0, -1):
            token_id = self._ids.get(forced[:size])
            if token_id is not None and _allows(bits, token_id):
                return token_id
        return -1

    def _compile(self, kind: str, text: str) -> _Grammar:
        """Raises GrammarError or SchemaError."""
        assert self._tokenizer is not None
        validator = None
        if kind == "json_schema":
            schema = _parsed(text)
            validator, grammar = Validator(schema), _schema_grammar(schema)
        else:
            grammar = _grammar_text(kind, text)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise GrammarError(_reason(matcher, kind))
        return _Grammar(matcher, validator)


def _mask(matcher: LLMatcher) -> tuple[bool, bytes]:
    """Whether the text may end here, and a bit for each token that may follow. Raises GrammarError."""
    may_end = matcher.is_accepting()
    if matcher.is_stopped() and not matcher.is_error():
        return may_end, b""
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        raise GrammarError(_reason(matcher))
    return may_end, mask


def _allows(bits: bytes, token_id: int) -> bool:
    return token_id < 8 * len(bits) and bool(bits[token_id >> 3] >> (token_id & 7) & 1)


def _grammar_text(kind: str, text: str) -> str:
    """An expression or a grammar in the library's own format. Raises SchemaError."""
    if kind == "regex":
        check_backslash(text)
        return _to_json({"lark_grammar": f"start: /{regex_to_lark(text)}/{NO_FORCING}"})
    return _to_json({"lark_grammar": text + NO_FORCING})


def _parsed(text: str) -> Schema:
    """A schema. Raises GrammarError."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        raise GrammarError("it is not JSON") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarError("a JSON Schema is an object")
    if _is_deep(schema):
        raise GrammarError("it is nested too deeply")
    dialect = schema.get("$schema")
    if isinstance(dialect, str) and dialect.startswith("https://json-schema.org/draft-0"):
        # The names of older drafts begin with http, which is easily missed.
        schema["$schema"] = dialect.replace("https", "http", 1)
    return schema


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_LEVELS):
        compounds = [each.values() if isinstance(each, dict) else each for each in level]
        level = [inner for each in compounds for inner in each if isinstance(inner, dict | list)]
        if not level:
            return False
    return True


def _schema_grammar(schema: Schema) -> str:
    """A schema in the library's own format. Raises SchemaError."""
    # With numbers as escapes, a declared name could be written as an additional one.
    guidance = {
        "whitespace_pattern": _JSON_WHITESPACE,
        "json_allowed_escapes": 'nrbtf\\"',
        "coerce_one_of": True,
        "lenient": True,
    }
    schema = prepared(schema) | {"x-guidance": guidance}
    return _to_json({"lark_grammar": _JSON_LARK + NO_FORCING}, {"name": "value", "json_schema": schema})


def _to_json(*grammars: dict[str, Any]) -> str:
    return json.dumps({"grammars": grammars})


def _reason(matcher: LLMatcher, kind: str = "") -> str:
    """Why a matcher failed, without excerpts of the grammar around the error."""
    reason = _without_excerpts(matcher.get_error())
    if reason.startswith("NoExtensionBias"):
        return "none of the model's tokens can follow"
    return reason.rpartition("error: ")[2] if kind == "regex" else reason


def _without_excerpts(reason: str) -> str:
    return _EXCERPT.split(reason.replace("<non-verbose/>", " "))[0]


def handler() -> Callable[[bytes], bytes]:
    """See `task_loop`."""
    # The validator takes some ten calls for each level of a value.
    sys.setrecursionlimit(10_000)
    return GrammarServer().run

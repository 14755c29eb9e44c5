"""Masks have the tokens that can lead to a text as wanted, and no others; what cannot be kept is said."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import os
import random
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import regex  # type: ignore[import-untyped] # it comes with transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from service.errors import Draining, InvalidArgument
from service.text import constraints as module
from service.text import grammar_engine
from service.text.constraints import Constraints, GrammarMatcher
from service.text.detokenizer import Detokenizer
from service.text.grammar_engine import Grammar, SampleState, Vocabulary
from service.text.matcher import Matcher
from service.text.token_bytes import constrained_tokens
from tests.service.text.kinds import END, KINDS

BYTES = Vocabulary([*(bytes([byte]) for byte in range(256)), b"<end>", b"<call>"], [256, 257])
ENDS = frozenset([256])


@functools.cache
def kind(name: str) -> Tokenizer:
    return KINDS[name]()


def end_of(name: str) -> int:
    return kind(name).token_to_id("<|endoftext|>" if name == "adder" else END) or 0


@pytest.fixture(scope="module")
def of_kind() -> Iterator[Callable[[str], Constraints]]:
    """The constraints of a tokenizer; the model has some more tokens than that."""

    @functools.cache
    def made(name: str) -> Constraints:
        tokens, special_ids = constrained_tokens(kind(name))
        return Constraints(Vocabulary(tokens, special_ids), len(tokens) + 21)

    made_ones: dict[str, Constraints] = {}
    yield lambda name: made_ones.setdefault(name, made(name))
    for one in made_ones.values():
        one.close()


@pytest.fixture
async def constraints() -> AsyncIterator[Constraints]:
    constraints = Constraints(BYTES, 258)
    yield constraints
    constraints.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Constraints]:
    """The same, for tests that leave them as they were."""
    constraints = Constraints(BYTES, 258)
    yield constraints
    constraints.close()


def matcher(constraints: Constraints, kind: str, text: str, ends: frozenset[int]) -> GrammarMatcher:
    """Without a trial."""
    return GrammarMatcher(constraints, SampleState(Grammar(f"{kind} {text}", kind, text)), ends)


def allowed(matcher: Matcher) -> set[int]:
    mask = matcher.allowed()
    return {8 * index + bit for index, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1}


def take_text(matcher: Matcher, text: str) -> None:
    for byte in text.encode():
        assert byte in allowed(matcher)
        matcher.take(byte)


# Regular expressions, against one that says of a text whether it may be continued.

CHARACTERS = "ab1 \u00e9\u4e16"
ATOMS = st.sampled_from([*CHARACTERS, ".", "[ab]", "[^a]", "[0-9]", "the", "\u4e16\u754c", "-"])


def extended(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    counts = st.sampled_from(["?", "*", "+", "{2}", "{1,3}", "{0,2}"])
    return st.one_of(
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(inner, counts).map(lambda parts: f"(?:{parts[0]}){parts[1]}"),
    )


EXPRESSIONS = st.recursive(ATOMS, extended, max_leaves=8)
# Ends of characters, to continue those that are not complete: of the ones above, and of any.
TAILS = [character.encode()[index:] for character in "\u00e9\u4e16\u754c" for index in (1, 2)] + [
    begin + b"\x80" * length for begin in (b"", b"\x90", b"\xa0") for length in (0, 1, 2, 3)
]


def may_go_on(expression: str, text: bytes) -> bool:
    """Whether some continuation of the text matches."""
    try:
        return regex.fullmatch(expression, text.decode(), partial=True) is not None
    except UnicodeDecodeError as error:
        if error.reason != "unexpected end of data":
            return False
    for tail in TAILS:
        try:
            whole = (text + tail).decode()
        except UnicodeDecodeError:
            continue
        if regex.fullmatch(expression, whole, partial=True) is not None:
            return True
    return False


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data(), expression=EXPRESSIONS)
@settings(max_examples=15)
def test_masks_are_what_the_expression_says(
    of_kind: Callable[[str], Constraints], name: str, data: st.DataObject, expression: str
) -> None:
    constraints, end = of_kind(name), end_of(name)
    tokens, special_ids = constrained_tokens(kind(name))
    usable = {n: token for n, token in enumerate(tokens) if token and n not in special_ids}
    constrained = matcher(constraints, "regex", expression, frozenset([end]))
    text = b""
    for _ in range(6):
        may_end = is_match(expression, text)
        may_follow = {n for n, token in usable.items() if may_go_on(expression, text + token)}
        if not may_follow and not may_end:
            with pytest.raises(InvalidArgument, match="none of the model's tokens can follow"):
                constrained.allowed()
            return
        assert allowed(constrained) == may_follow | ({end} if may_end else set())
        assert constrained.is_complete == (not may_follow)
        if not may_follow:
            return
        token_id = data.draw(st.sampled_from(sorted(may_follow)))
        constrained.take(token_id)
        assert not constrained.is_complete
        text += tokens[token_id]


def is_match(expression: str, text: bytes) -> bool:
    try:
        return regex.fullmatch(expression, text.decode()) is not None
    except UnicodeDecodeError:
        return False


def test_masks_are_as_long_as_the_models_vocabulary() -> None:
    for vocab_size in (258, 1000, 97):
        constraints = Constraints(BYTES, vocab_size)
        try:
            constrained = matcher(constraints, "regex", "(.|\n)*", frozenset([256, 99_999]))
            assert len(constrained.allowed()) == math.ceil(vocab_size / 8)
            # The first byte of a character may follow; none of those behind the tokens.
            follow = {*range(0x80), *range(0xC2, 0xF5), 256}
            assert allowed(constrained) == {token_id for token_id in follow if token_id < vocab_size}
        finally:
            constraints.close()


# JSON.

SCHEMAS: list[tuple[dict[str, Any], Callable[[Any], bool]]] = [
    (
        {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": -3, "maximum": 120},
                "b": {"enum": ["\u00e9", "b", None]},
                "c": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
            },
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        lambda value: set(value) <= {"a", "b", "c"}
        and type(value["a"]) is int
        and -3 <= value["a"] <= 120
        and value["b"] in ("\u00e9", "b", None)
        and all(type(item) is bool for item in value.get("c", []))
        and len(value.get("c", [])) <= 3,
    ),
    (
        {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 1, "maxItems": 4},
        lambda value: 1 <= len(value) <= 4 and all(len(item) <= 3 for item in value),
    ),
    (
        {
            "$defs": {
                "n": {
                    "anyOf": [
                        {"type": "null"},
                        {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 1},
                    ]
                }
            },
            "$ref": "#/$defs/n",
        },
        lambda value: value is None or isinstance(value, list),
    ),
    ({"const": {"the": [1, 2.5]}}, lambda value: value == {"the": [1, 2.5]}),
]  # fmt: skip


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "byte_level_across_words"])
def test_whatever_is_drawn_is_json_as_described(of_kind: Callable[[str], Constraints], name: str) -> None:
    constraints, tokenizer, end = of_kind(name), kind(name), end_of(name)
    begun = tokenizer.encode("a").ids
    for seed in range(24):
        rng = random.Random(seed)
        schema, is_valid = SCHEMAS[seed % len(SCHEMAS)]
        constrained = matcher(constraints, "json_schema", json.dumps(schema), frozenset([end]))
        ids: list[int] = []
        while len(ids) < 300:
            may_follow = allowed(constrained)
            if constrained.is_complete or (end in may_follow and rng.random() < 0.3):
                break
            ids.append(rng.choice(sorted(may_follow - {end})))
            constrained.take(ids[-1])
        else:
            # Numbers and nested lists need not end.
            continue
        detokenizer = Detokenizer(tokenizer, begun)
        text = "".join([*map(detokenizer.push, ids), detokenizer.flush()])
        assert is_valid(json.loads(text)), text


def test_blanks_between_the_parts_of_json_come_to_an_end(shared: Constraints) -> None:
    blanks = {ord(" "), ord("\n"), ord("\t"), ord("\r")}
    constrained = matcher(shared, "json_schema", "{}", ENDS)
    take_text(constrained, ' {"a"')
    for _ in range(100):
        may_follow = allowed(constrained) & blanks
        if not may_follow:
            break
        constrained.take(max(may_follow))
    else:
        pytest.fail("they go on")
    take_text(constrained, ":1}")
    assert allowed(constrained) == ENDS and constrained.is_complete


# What callers meet.

# Beyond the stack of the library.
DEEP = "start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(4000)) + 'r4000: "a"'


async def test_samples_of_an_item_do_not_know_each_other(shared: Constraints) -> None:
    new = await shared.factory("regex", "[0-9]{2}x", ENDS)
    one, other = new(), new()
    take_text(one, "12x")
    assert allowed(other) == set(b"0123456789")
    assert allowed(one) == ENDS
    assert one.is_complete and not other.is_complete


async def test_ends_are_allowed_where_the_text_may_end(shared: Constraints) -> None:
    # A token that ends the sample is no part of its text, even if it has one.
    new = await shared.factory("regex", "a+b?", frozenset([256, ord("b"), 5]))
    constrained = new()
    assert allowed(constrained) == {ord("a")}
    take_text(constrained, "a")
    assert allowed(constrained) == {ord("a"), ord("b"), 256, 5}
    assert not constrained.is_complete


async def test_without_an_end_token_it_is_complete_all_the_same(shared: Constraints) -> None:
    constrained = (await shared.factory("regex", "ab", frozenset()))()
    take_text(constrained, "ab")
    assert allowed(constrained) == set()
    assert constrained.is_complete
    empty = (await shared.factory("regex", "", frozenset()))()
    with pytest.raises(InvalidArgument, match="only the empty text is allowed"):
        empty.allowed()


async def test_a_token_that_is_not_allowed_is_a_bug(shared: Constraints) -> None:
    constrained = (await shared.factory("regex", "ab", ENDS))()
    constrained.allowed()
    with pytest.raises(ValueError, match="does not allow token 98"):
        constrained.take(ord("b"))
    take_text(constrained, "ab")
    # Tokens of a journal are taken without masks.
    constrained = (await shared.factory("regex", "ab", ENDS))()
    constrained.take(ord("b"))
    with pytest.raises(InvalidArgument, match="cannot be kept"):
        constrained.allowed()


async def test_grammars_may_name_special_tokens(shared: Constraints) -> None:
    constrained = (await shared.factory("lark", 'start: "a" <call> "b"', ENDS))()
    take_text(constrained, "a")
    assert allowed(constrained) == {257}
    constrained.take(257)
    take_text(constrained, "b")
    assert allowed(constrained) == ENDS


@pytest.mark.parametrize("value", ["true", "{}", '{"x-guidance": {"whitespace_pattern": "z"}}'])
async def test_a_schema_may_allow_anything(shared: Constraints, value: str) -> None:
    constrained = (await shared.factory("json_schema", value, ENDS))()
    take_text(constrained, '{"a": [1, null]}')
    assert constrained.is_complete is False and allowed(constrained) == ENDS and constrained.is_complete


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("regex", "(a", "unclosed group"),
        ("regex", "(?=a)b", "look-around.*not supported"),
        ("regex", r"(a)\1", "backreferences are not supported"),
        ("regex", "[^\\s\\S]", "none of the model's tokens can follow"),
        ("regex", "(" * 30_000 + ")" * 30_000, "nested"),
        ("regex", "a" * 65_537, "at most 65536 bytes are taken, got 65537"),
        ("regex", "\u00e9" * 40_000, "at most 65536 bytes are taken, got 80000"),
        ("json_schema", "{", "is not JSON"),
        ("json_schema", '{"items":' * 6000 + "{}" + "}" * 6000, "is not JSON"),
        ("json_schema", "[]", "is an object"),
        ("json_schema", "false", "is an object"),
        ("json_schema", '{"type": "integer", "minimum": 3, "maximum": 2}', "Unsatisfiable"),
        ("json_schema", '{"$ref": "file:///etc/passwd"}', "does not fetch"),
        ("json_schema", '{"$ref": "http://127.0.0.1:9/x"}', "does not fetch"),
        ("lark", "", "no start rule"),
        ("lark", 'start: "\x1b[31m" frob\x1b', "1"),
        ("lark", '{"grammars": []}', "expecting"),
        ("lark", 'start: a\na: "a" b', "unknown"),
        ("lark", DEEP, "crashed its process: it may be nested too deeply"),
    ],
    ids=range(19),
)  # fmt: skip
async def test_what_cannot_be_used_is_told_in_a_line(
    shared: Constraints, kind: str, text: str, said: str
) -> None:
    with pytest.raises(InvalidArgument, match=said) as caught:
        await shared.factory(kind, text, ENDS)
    assert (caught.value.reason, caught.value.field) == ("BAD_CONSTRAINT", f"constraint.{kind}")
    assert caught.value.message.isprintable() and len(caught.value.message) < 350
    # Others go on.
    take_text((await shared.factory("regex", "ab", ENDS))(), "ab")


HUGE = [
    ("regex", "a?" * 20_000 + "a" * 20_000),
    ("json_schema", json.dumps({"allOf": [{"type": "string", "pattern": f".*{n}.*"} for n in range(20)]})),
]


@pytest.mark.parametrize(("kind", "text"), HUGE, ids=range(len(HUGE)))
async def test_what_takes_too_long_is_refused_and_nobody_waits_for_it(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch, kind: str, text: str
) -> None:
    monkeypatch.setattr(grammar_engine, "MAX_CPU_S", 0.3)
    new = await constraints.factory("regex", "[ab]*", ENDS)
    hostile = asyncio.create_task(constraints.factory(kind, text, ENDS))
    constrained = new()
    for _ in range(5):
        assert len(await asyncio.to_thread(allowed, constrained)) == 3
        constrained.take(ord("a"))
        await asyncio.sleep(0)
    with pytest.raises(InvalidArgument, match=r"computed for more than 0\.3 s"):
        await hostile
    # It is not tried again.
    began_s = time.process_time()
    with pytest.raises(InvalidArgument, match=r"computed for more than 0\.3 s"):
        await constraints.factory(kind, text, ENDS)
    assert time.process_time() - began_s < 0.3


class Trials:
    """Trials of some constraints, each of which waits until it is let go on."""

    def __init__(self, constraints: Constraints, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.goes_on = threading.Event()
        self._compile = constraints._trial.compile
        monkeypatch.setattr(constraints._trial, "compile", self._wait)

    def _wait(self, grammar: Grammar) -> None:
        self.begun.append(grammar.text)
        assert self.goes_on.wait(60)
        self._compile(grammar)

    async def until_begun(self, count: int) -> None:
        while len(self.begun) < count:
            await asyncio.sleep(0.001)


async def test_who_is_known_waits_for_no_trial(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    await constraints.factory("regex", "[ab]*", ENDS)
    with pytest.raises(InvalidArgument):
        await constraints.factory("regex", "(a", ENDS)
    trials = Trials(constraints, monkeypatch)
    hostile = asyncio.create_task(constraints.factory("regex", "slow", ENDS))
    await trials.until_begun(1)
    async with asyncio.timeout(60):
        new = await constraints.factory("regex", "[ab]*", ENDS)
        assert allowed(new()) == {ord("a"), ord("b"), 256}
        with pytest.raises(InvalidArgument):
            await constraints.factory("regex", "(a", ENDS)
    assert not hostile.done()
    trials.goes_on.set()
    await hostile


async def test_a_trial_goes_on_without_those_who_wanted_it(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And keeps nobody else's thread meanwhile."""
    trials = Trials(constraints, monkeypatch)

    async def leave_soon(text: str) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.005):
                await constraints.factory("regex", text, ENDS)

    for number in range(40):
        await leave_soon(str(number))
        await trials.until_begun(1)
    async with asyncio.timeout(60):
        await asyncio.to_thread(int)
    # Of two who want the same, one stays, and has the trial that is under way.
    stays = asyncio.create_task(constraints.factory("regex", "0", ENDS))
    trials.goes_on.set()
    assert allowed((await stays)()) == {ord("0")}
    await constraints.factory("regex", "0", ENDS)
    await constraints.factory("regex", "last", ENDS)
    assert trials.begun == ["0", "last"], "what had not begun was not wanted any more"


async def test_a_server_that_ends_tries_no_more(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = Trials(constraints, monkeypatch)
    first, second = (
        asyncio.create_task(constraints.factory("regex", text, ENDS)) for text in ("first", "second")
    )
    await trials.until_begun(1)
    constraints.close()
    with pytest.raises(Draining):
        await second
    with pytest.raises(Draining):
        await constraints.factory("regex", "third", ENDS)
    trials.goes_on.set()
    with pytest.raises(InvalidArgument, match="was ended"):
        await first
    assert constraints._trial._process is None


async def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_engine, "MAX_CPU_S", 20)
    monkeypatch.setattr(grammar_engine, "MAX_MEMORY_BYTES", 120 << 20)
    constraints = Constraints(BYTES, 258)
    try:
        with pytest.raises(InvalidArgument, match="too much memory"):
            await constraints.factory(*HUGE[0], ENDS)
        take_text((await constraints.factory("regex", "ab", ENDS))(), "ab")
    finally:
        constraints.close()


async def test_one_that_explodes_later_ends_that_sample_alone(constraints: Constraints) -> None:
    good = (await constraints.factory("regex", "[xy]*", ENDS))()
    hostile = (await constraints.factory("regex", "x" + "y?" * 1500 + "y" * 1500, ENDS))()
    take_text(good, "x")
    take_text(hostile, "x")
    with pytest.raises(InvalidArgument, match="too many expressions") as caught:
        take_text(hostile, "y" * 100)
    assert caught.value.reason == "BAD_CONSTRAINT"
    take_text(good, "yyx")


async def test_samples_survive_the_process_that_knew_them(constraints: Constraints) -> None:
    new = await constraints.factory("regex", "[0-9]{4}x", ENDS)
    samples = [new() for _ in range(3)]
    for count, sample in enumerate(samples):
        take_text(sample, "1234"[:count])
    process = constraints._masks._process
    assert process is not None and process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    for count, sample in enumerate(samples):
        take_text(sample, "1234x"[count:])
        assert allowed(sample) == ENDS


async def test_more_samples_and_grammars_than_are_kept(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_REMEMBERED", 3)
    # More than the process keeps, of either.
    samples = []
    for number in range(70):
        new = await constraints.factory("regex", f"{number:04}x", ENDS)
        samples += [(f"{number:04}x", new()) for _ in range(16)]
    for text, sample in samples:
        take_text(sample, text[:2])
    for text, sample in samples[::50]:
        take_text(sample, text[2:])
        assert allowed(sample) == ENDS
    assert len(constraints._tried) == 3
    assert constraints._tried_bytes == sum(len(grammar.text) for grammar in constraints._tried)


async def test_processes_end_when_nobody_wants_them_and_begin_again(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.05)
    new = await constraints.factory("regex", "ab", ENDS)
    constrained = new()
    take_text(constrained, "a")
    while constraints._masks._process is not None or constraints._trial._process is not None:
        await asyncio.sleep(0.01)
    take_text(constrained, "b")


async def test_masks_of_many_samples_are_made_in_threads(shared: Constraints) -> None:
    new = await shared.factory("regex", "[0-9]*", ENDS)

    def walk(seed: int) -> str:
        rng, sample, text = random.Random(seed), new(), ""
        for _ in range(20):
            token_id = rng.choice(sorted(allowed(sample) - ENDS))
            sample.take(token_id)
            text += chr(token_id)
        return text

    texts = await asyncio.gather(*(asyncio.to_thread(walk, seed) for seed in range(8)))
    assert texts == [walk(seed) for seed in range(8)]
    assert all(text.isdigit() for text in texts)

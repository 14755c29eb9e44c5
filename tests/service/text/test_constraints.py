"""Masks allow exactly the tokens that can lead to a matching text; other constraints are errors."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from service.errors import Draining, InvalidArgument
from service.text import tasks
from service.text.constraints import Constraints, Grammar, Matcher
from service.text.task_process import TaskProcess
from service.text.token_bytes import token_bytes
from tests.service.text.kinds import END, KINDS, kind

BYTES = ([*(bytes([byte]) for byte in range(256)), b"<end>", b"<call>"], [256, 257])
ENDS = frozenset([256])


def end_of(name: str) -> int:
    return kind(name).token_to_id("<|endoftext|>" if name == "adder" else END) or 0


@contextmanager
def opened(*tokens: Any) -> Iterator[Constraints]:
    with closing(Constraints(*(tokens or BYTES))) as constraints:
        yield constraints


@pytest.fixture(scope="module")
def of_kind() -> Iterator[Callable[[str], Constraints]]:
    """The constraints of a kind of tokenizer, for a model with some more tokens."""

    @functools.cache
    def made(name: str) -> Constraints:
        return stack.enter_context(opened(*token_bytes(kind(name))))

    with ExitStack() as stack:
        yield made


@pytest.fixture
def constraints() -> Iterator[Constraints]:
    with opened() as constraints:
        yield constraints


@pytest.fixture(scope="module")
def shared() -> Iterator[Constraints]:
    """As `constraints`, for tests that do not change it."""
    with opened() as constraints:
        yield constraints


def limit(monkeypatch: pytest.MonkeyPatch, **bounds: Any) -> None:
    for name in ("COMPILE", "MASK"):
        monkeypatch.setattr(tasks, name, replace(getattr(tasks, name), **bounds))


def matcher(
    constraints: Constraints, kind: str, text: str, ends: frozenset[int], vocab_size: int = 400
) -> Matcher:
    """A matcher for a grammar that is not checked."""
    return Matcher(constraints, Grammar(kind, text), ends, vocab_size)


async def factory(constraints: Constraints, kind: str, text: str) -> Callable[[], Matcher]:
    return await constraints.matcher_factory(kind, text, ENDS, 258)


async def compute(matcher: Matcher) -> bytes:
    return await matcher.in_turn(matcher.allowed)


async def allowed(matcher: Matcher) -> set[int]:
    mask = await compute(matcher)
    return {8 * index + bit for index, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1}


async def take_text(matcher: Matcher, text: str) -> None:
    for byte in text.encode():
        assert byte in await allowed(matcher)
        matcher.take(byte)


# Regular expressions, compared with a library that tells whether a text can be continued to a match.

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
# Last bytes of characters, to complete incomplete ones: those above, and any.
TAILS = [character.encode()[index:] for character in "\u00e9\u4e16\u754c" for index in (1, 2)] + [
    first + b"\x80" * length for first in (b"", b"\x90", b"\xa0") for length in (0, 1, 2, 3)
]


def can_continue(expression: str, text: bytes) -> bool:
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
@settings(max_examples=settings().max_examples // 6)
async def test_masks_match_the_expression(
    of_kind: Callable[[str], Constraints], name: str, data: st.DataObject, expression: str
) -> None:
    constraints, end = of_kind(name), end_of(name)
    tokens, special_ids = token_bytes(kind(name))
    usable = {n: token for n, token in enumerate(tokens) if token and n not in special_ids}
    constrained = matcher(constraints, "regex", expression, frozenset([end]))
    text = b""
    for _ in range(6):
        may_end = is_match(expression, text)
        may_follow = {n for n, token in usable.items() if can_continue(expression, text + token)}
        if not may_follow and not may_end:
            with pytest.raises(InvalidArgument, match="none of the model's tokens can follow"):
                await compute(constrained)
            return
        assert await allowed(constrained) == may_follow | ({end} if may_end else set())
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


@pytest.mark.parametrize("vocab_size", [258, 1000, 97])
async def test_masks_are_as_long_as_the_models_vocabulary(shared: Constraints, vocab_size: int) -> None:
    constrained = matcher(shared, "regex", "(.|\n)*", frozenset([256, 99_999]), vocab_size)
    assert len(await compute(constrained)) == math.ceil(vocab_size / 8)
    # The first byte of any character may follow, but no id above the tokens.
    follow = {*range(0x80), *range(0xC2, 0xF5), 256}
    assert await allowed(constrained) == {token_id for token_id in follow if token_id < vocab_size}


# JSON.


async def test_whitespace_in_json_is_limited(shared: Constraints) -> None:
    spaces = {ord(" "), ord("\n"), ord("\t"), ord("\r")}
    constrained = matcher(shared, "json_schema", "{}", ENDS)
    await take_text(constrained, ' {"a"')
    for _ in range(100):
        may_follow = await allowed(constrained) & spaces
        if not may_follow:
            break
        constrained.take(max(may_follow))
    else:
        pytest.fail("whitespace is not limited")
    await take_text(constrained, ":1}")
    assert await allowed(constrained) == ENDS and constrained.is_complete


# Overflows the stack of the library.
DEEP = "start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(4000)) + 'r4000: "a"'


async def test_end_tokens_are_allowed_where_the_text_may_end(shared: Constraints) -> None:
    # A token that ends the sample is not part of its text, even if it has a text.
    new = await shared.matcher_factory("regex", "a+b?", frozenset([256, ord("b"), 5]), 258)
    constrained = new()
    assert await allowed(constrained) == {ord("a")}
    await take_text(constrained, "a")
    assert await allowed(constrained) == {ord("a"), ord("b"), 256, 5}
    assert not constrained.is_complete


async def test_a_sample_without_an_end_token_completes(shared: Constraints) -> None:
    constrained = (await shared.matcher_factory("regex", "ab", frozenset(), 258))()
    await take_text(constrained, "ab")
    assert await allowed(constrained) == set()
    assert constrained.is_complete
    empty = (await shared.matcher_factory("regex", "", frozenset(), 258))()
    with pytest.raises(InvalidArgument, match="allows only the empty text"):
        await compute(empty)


@given(
    expression=EXPRESSIONS,
    draft=st.lists(st.sampled_from([*b"ab1", *"\u00e9".encode(), 257]), max_size=6),
    most=st.integers(0, 6),
)
@settings(max_examples=settings().max_examples // 6)
async def test_masks_along_a_draft_are_those_of_its_tokens(
    shared: Constraints, expression: str, draft: list[int], most: int
) -> None:
    """Of each prefix of what is drafted; and it does not end the text."""
    try:
        new = await factory(shared, "regex", expression)
        along, apart = new(), new()
        drafted, masks = await along.in_turn(lambda process: along.allowed_along(process, draft, most))
    except InvalidArgument:
        return
    assert len(drafted) <= most and len(masks) == len(drafted) + 1
    for index, mask in enumerate(masks):
        assert mask == await compute(apart) and not (drafted and apart.is_complete)
        if index == len(drafted):
            break
        apart.take(drafted[index])
        if [*drafted[:index]] == draft[:index] and draft[index:] and drafted[index] != draft[index]:
            # Its token was left out for a forced one.
            assert not mask[draft[index] >> 3] >> (draft[index] & 7) & 1
    # Nothing of a draft is kept.
    assert await compute(along) == masks[0]


async def test_what_a_grammar_forces_is_drafted(shared: Constraints) -> None:
    matcher = (await factory(shared, "regex", "a(bab|bab1)"))()
    drafted, _ = await matcher.in_turn(lambda process: matcher.allowed_along(process, b"b", 9))
    assert bytes(drafted) == b"abab", "then it may end"


async def test_a_token_that_the_mask_forbids_is_an_error(shared: Constraints) -> None:
    constrained = (await factory(shared, "regex", "ab"))()
    await compute(constrained)
    with pytest.raises(ValueError, match="does not allow token 98"):
        constrained.take(ord("b"))
    await take_text(constrained, "ab")
    # Without a mask the token is checked later.
    constrained = (await factory(shared, "regex", "ab"))()
    constrained.take(ord("b"))
    with pytest.raises(InvalidArgument, match="cannot be applied"):
        await compute(constrained)


async def test_grammars_may_name_special_tokens(shared: Constraints) -> None:
    constrained = (await factory(shared, "lark", 'start: "a" <call> "b"'))()
    await take_text(constrained, "a")
    assert await allowed(constrained) == {257}
    constrained.take(257)
    await take_text(constrained, "b")
    assert await allowed(constrained) == ENDS


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("regex", "(a", "unclosed group"),
        ("regex", "(?=a)b", "look-around.*not supported"),
        ("regex", r"(a)\1", "backreferences are not supported"),
        ("regex", "[^\\s\\S]", "none of the model's tokens can follow"),
        ("regex", "(" * 30_000 + ")" * 30_000, "nested"),
        ("regex", "a" * 65_537, "at most 65536 bytes and has 65537"),
        ("regex", "\u00e9" * 40_000, "at most 65536 bytes and has 80000"),
        ("json_schema", "{", "is not JSON"),
        ("json_schema", '{"items":' * 6000 + "{}" + "}" * 6000, "nested too deeply"),
        ("json_schema", "[]", "is an object"),
        ("json_schema", "false", "is an object"),
        ("json_schema", '{"type": "integer", "minimum": 3, "maximum": 2}', "Unsatisfiable"),
        ("json_schema", '{"$ref": "file:///etc/passwd"}', "does not fetch"),
        ("lark", "", "no start rule"),
        ("lark", 'start: "\x1b[31m" frob\x1b', "1"),
        ("lark", '{"grammars": []}', "expecting"),
        ("lark", 'start: a\na: "a" b', "unknown"),
        ("lark", DEEP, "crashed its process: it may be nested too deeply"),
        ("regex", "a\\", "ends in a lone backslash"),
        ("json_schema", "", "is not JSON"),
    ],
    ids=range(20),
)  # fmt: skip
async def test_an_error_of_a_grammar_is_one_printable_line(
    shared: Constraints, kind: str, text: str, message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message) as caught:
        await factory(shared, kind, text)
    assert (caught.value.reason, caught.value.field) == ("BAD_CONSTRAINT", f"constraint.{kind}")
    assert caught.value.message.isprintable() and len(caught.value.message) < 350
    # Other grammars are not affected.
    await take_text((await factory(shared, "regex", "ab"))(), "ab")


ALL_OF = [{"type": "string", "pattern": f".*{n}.*"} for n in range(20)]
SLOW = "json_schema", json.dumps({"allOf": ALL_OF})


async def test_a_slow_grammar_is_refused_and_delays_no_other_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, max_cpu_s=0.3)
    with opened() as constraints:
        new = await factory(constraints, "regex", "[ab]*")
        hostile = asyncio.create_task(factory(constraints, *SLOW))
        constrained = new()
        for _ in range(5):
            assert len(await allowed(constrained)) == 3
            constrained.take(ord("a"))
            await asyncio.sleep(0)
        with pytest.raises(InvalidArgument, match=r"used more than 0\.3 s of CPU time"):
            await hostile


async def test_a_check_that_hung_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, a grammar was refused for good because the machine had once been too slow."""
    limit(monkeypatch, timeout_s=3.0)
    with opened() as constraints:
        await factory(constraints, "regex", "[ab]*")
        pid = constraints._checks.idle[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(InvalidArgument, match="took too long"):
            await factory(constraints, "regex", "[bc]*")
        await factory(constraints, "regex", "[bc]*")


class Checks:
    """Checks of grammars, each of which waits until `may_run` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.may_run = asyncio.Event()
        run = TaskProcess.run

        async def wait(process: TaskProcess, task: bytes) -> bytes:
            request = json.loads(task)
            if request["method"] == "compile":
                self.begun.append(request["text"])
                await self.may_run.wait()
            return await run(process, task)

        monkeypatch.setattr(TaskProcess, "run", wait)

    async def until_begun(self, count: int) -> None:
        while len(self.begun) < count:
            await asyncio.sleep(0.001)


async def test_a_checked_grammar_does_not_wait_for_a_check(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask_again() -> None:
        new = await factory(constraints, "regex", "[ab]*")
        assert await allowed(new()) == {ord("a"), ord("b"), 256}
        with pytest.raises(InvalidArgument):
            await factory(constraints, "regex", "(a")

    await ask_again()
    checks = Checks(monkeypatch)
    slow = asyncio.create_task(factory(constraints, "regex", "slow"))
    await checks.until_begun(1)
    async with asyncio.timeout(60):
        await ask_again()
    assert not slow.done()
    checks.may_run.set()
    await slow


async def test_a_check_that_has_begun_runs_to_its_end(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And does not block the default executor."""
    checks = Checks(monkeypatch)
    leaving = [asyncio.create_task(factory(constraints, "regex", str(n))) for n in range(40)]
    await checks.until_begun(1)
    for one in leaving:
        one.cancel()
    async with asyncio.timeout(60):
        await asyncio.to_thread(int)
    # Another caller with the same grammar gets the result of the running check.
    stays = asyncio.create_task(factory(constraints, "regex", "0"))
    checks.may_run.set()
    assert await allowed((await stays)()) == {ord("0")}
    await factory(constraints, "regex", "last")
    assert checks.begun == ["0", "last"], "checks that had not begun are cancelled"


HUGE = "regex", "a?" * 20_000 + "a" * 20_000


async def test_closing_fails_checks_and_masks_with_draining() -> None:
    with opened() as constraints:
        constrained = (await factory(constraints, "regex", "a"))()
        checks = [asyncio.create_task(factory(constraints, "regex", text)) for text in (HUGE[1], "waiting")]
        await asyncio.sleep(0)
    for check in (*checks, asyncio.create_task(factory(constraints, "regex", "new"))):
        with pytest.raises(Draining):
            await check
    with pytest.raises(Draining):
        await compute(constrained)


async def test_a_grammar_that_grows_later_fails_only_its_sample(constraints: Constraints) -> None:
    good = (await factory(constraints, "regex", "[xy]*"))()
    hostile = (await factory(constraints, "regex", "x" + "y?" * 1500 + "y" * 1500))()
    await take_text(good, "x")
    await take_text(hostile, "x")
    with pytest.raises(InvalidArgument, match="too many expressions") as caught:
        await take_text(hostile, "y" * 100)
    assert caught.value.reason == "BAD_CONSTRAINT"
    await take_text(good, "yyx")


async def test_samples_survive_a_crash_of_the_process(constraints: Constraints) -> None:
    new = await factory(constraints, "regex", "[0-9]{4}x")
    samples = [new() for _ in range(3)]
    for count, sample in enumerate(samples):
        await take_text(sample, "1234"[:count])
    pid = constraints.masks.idle[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    for count, sample in enumerate(samples):
        await take_text(sample, "1234x"[count:])
        assert await allowed(sample) == ENDS


async def test_tenants_take_turns_however_many_grammars_one_sends(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may take two seconds, and one process checks them all."""
    checks = Checks(monkeypatch)
    asked = [(f"a{number}", "slow") for number in range(4)] + [("b0", "other"), ("b1", "other")]
    waiting = [
        asyncio.create_task(constraints.matcher_factory("regex", text, ENDS, 258, tenant))
        for text, tenant in asked
    ]
    await checks.until_begun(1)
    checks.may_run.set()
    await asyncio.gather(*waiting)
    assert checks.begun == ["a0", "b0", "a1", "b1", "a2", "a3"]

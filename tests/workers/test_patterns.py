"""Patterns of adapters match what Python's re matches, and cannot take exponential time."""

from __future__ import annotations

import contextlib
import re
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.adapters.errors import AdapterError
from workers.common.patterns import Patience, Pattern

SUPPORTED = st.recursive(
    st.sampled_from(
        ["a", "b", ".", r"\.", r"\d", r"\w", r"\W", r"\D", "0", "_", "^", "$", r"\b", "[ab]", "[^a]",
         "[0-9.]", "[a-b_]", r"[\d_]", "[]a]", "[a-]", r"[\w.-]", ""]
    ),
    lambda part: st.one_of(
        st.lists(part, min_size=1, max_size=4).map("".join),
        st.lists(part, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(
            st.sampled_from(["({})", "(?:{})", "(?={})", "(?!{})"]), part
        ).map(lambda pair: pair[0].format(pair[1])),
        st.tuples(part, st.sampled_from(["*", "+", "?", "*?", "+?"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
        st.sampled_from(["a{2}", "[ab]{1,}", r"\d{,2}", "b{0,3}?"]),
    ),
    max_leaves=12,
)  # fmt: skip


def assert_agrees(pattern: str, name: str) -> None:
    compiled = Pattern(pattern, Patience(AdapterError))
    assert compiled.matches(name) == (re.fullmatch(pattern, name) is not None), (pattern, name)
    expected = re.match(rf"(.*\.)?({pattern})$", name) is not None
    assert compiled.matches_end(name) == expected, (pattern, name)
    assert compiled.matches_start(name) == (re.match(pattern, name) is not None), (pattern, name)


@given(SUPPORTED, st.text("ab.0_", min_size=1, max_size=8))
def test_as_re(pattern: str, name: str) -> None:
    assert_agrees(pattern, name)


@given(st.text(r"ab0.\dwsbB*+?{},[]^-$|()=!<>P:'#x1 ", max_size=12), st.text("ab.0_", min_size=1, max_size=6))
def test_any_text_is_refused_or_as_re(pattern: str, name: str) -> None:
    try:
        Pattern(pattern, Patience(AdapterError))
    except AdapterError:
        return
    assert_agrees(pattern, name)


@pytest.mark.parametrize(
    "pattern", ["(a+)+b", "(a*)*b", "(a|a)*b", "(.*a)*(.*a)*b", "(?=" * 9 + ".*" * 9 + ")*" * 9 + "a*b?"]
)
def test_patterns_on_which_re_takes_for_ever(pattern: str) -> None:
    for name in ("a" * 60, "a" * 60 + "b"):
        with contextlib.suppress(AdapterError):  # it takes too long
            assert Pattern(pattern, Patience(AdapterError, 0.5)).matches(name) == (
                name[-1] == "b" or "b?" in pattern
            )


def test_what_takes_too_long_is_refused() -> None:
    """All patterns of an adapter share a time, to compile them too."""
    compiled = Pattern("(a|aa)+$b", Patience(AdapterError, 0.2))
    with pytest.raises(AdapterError, match="take too long to match: name the modules instead"):
        compiled.matches("a" * 200)
    patience = Patience(AdapterError, 0.01)
    with pytest.raises(AdapterError, match="take too long to match: name the modules instead"):
        [Pattern("a*" * 2000 + str(number), patience) for number in range(1000)]


def test_other_threads_run_meanwhile() -> None:
    """Such as the one that computes steps."""
    turns, stopped = [0], threading.Event()

    def count() -> None:
        while not stopped.wait(0.001):
            turns[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        with pytest.raises(AdapterError, match="take too long"):
            Pattern("(a|aa)+$b", Patience(AdapterError, 0.5)).matches("a" * 200)
    finally:
        stopped.set()
        thread.join()
    assert turns[0] > 5


@pytest.mark.parametrize(
    ("pattern", "fault"),
    [
        (r"(a)\1", "is not supported"),
        ("(?i)q_proj", "is not supported"),
        ("(?P<x>a)(?P=x)", "is not supported"),
        ("(?:q_proj){e<=1}", "is not supported"),
        ("[[:alpha:]]", "is not supported"),
        ("(?:a{9}){9}", "is not supported"),
        ("a{10}", "is not supported"),
        ("(?R)", "is not valid"),
        (r"\p{L}", "is not supported"),
        (r"\pL", "is not valid"),
        ("(?|a|b)", "is not valid"),
        ("*a", "is not valid"),
        ("(a", "is not valid"),
        ("a)", "is not valid"),
        ("[a", "is not valid"),
        ("a\\", "is not valid"),
        ("[b-a]", "is not valid"),
        ("a{3,1}", "is not valid"),
        ("a{99999999999}", "is not supported"),
        ("(" * 1500 + ")" * 1500, "is not valid"),
        ("a*" * 3000, "has more than 4096 characters"),
    ],
)
def test_what_is_not_supported_is_refused(pattern: str, fault: str) -> None:
    with pytest.raises(AdapterError, match=re.escape(fault)):
        Pattern(pattern, Patience(AdapterError))

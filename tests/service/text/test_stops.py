"""Stop texts: what is shown is the text up to the one that ends first, however it comes in pieces."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from service.text.stops import StopTexts

TEXTS = st.text(alphabet="ab", max_size=40)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=6), max_size=4)


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(places)]


def plainly(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """The text up to the stop that ends first, the longest of those that end there, and that one."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, ""


@given(TEXTS, STOPS, st.lists(st.integers(0, 40), max_size=10))
def test_a_text_ends_where_its_first_stop_begins(text: str, stops: list[str], cuts: list[int]) -> None:
    watch = StopTexts(stops).watch()
    pushed, shown = "", ""
    for piece in cut(text, cuts):
        if watch.found:
            break
        pushed += piece
        shown += watch.push(piece)
        if not watch.found:
            # No more is held back than what may turn out to be a stop.
            assert pushed.startswith(shown)
            assert len(pushed) - len(shown) <= max([len(stop) - 1 for stop in stops], default=0)
            assert not pushed[len(shown) :] or any(stop.startswith(pushed[len(shown) :]) for stop in stops)
    if not watch.found:
        shown += watch.flush()
    assert (shown, watch.found) == plainly(text, stops)


@given(TEXTS, STOPS)
def test_samples_of_an_item_do_not_know_each_other(text: str, stops: list[str]) -> None:
    prepared = StopTexts(stops)
    other = prepared.watch()
    other.push("abab"[: len(text)])
    watch = prepared.watch()
    shown = watch.push(text)
    assert (shown + ("" if watch.found else watch.flush()), watch.found) == plainly(text, stops)


def test_a_character_costs_the_same_however_the_stops_are_made() -> None:
    # A search that begins anew at each place would compare 256 characters for each one here.
    watch = StopTexts(["a" * 255 + "b"] * 16).watch()
    text = "a" * 20_000
    shown = "".join(watch.push(text[index : index + 100]) for index in range(0, len(text), 100))
    assert len(shown) == len(text) - 255
    assert watch.push("b") == ""
    assert watch.found == "a" * 255 + "b"

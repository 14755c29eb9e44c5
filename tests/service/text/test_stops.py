"""Stop texts: the text is sent up to the one that ends first, however it is split into pieces."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from service.text.stops import StopMatcher

TEXTS = st.text(alphabet="ab", max_size=40)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=6), max_size=4)


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    positions = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(positions)]


def reference(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """The text before the stop text that ends first (the longest if several end there), and the stop text."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, ""


@given(TEXTS, STOPS, st.lists(st.integers(0, 40), max_size=10))
def test_a_text_ends_where_its_first_stop_begins(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    pushed, sent = "", ""
    for piece in cut(text, cuts):
        if matcher.found:
            break
        pushed += piece
        sent += matcher.push(piece)
        if not matcher.found:
            # Only text that may be the beginning of a stop text is held back.
            assert pushed.startswith(sent)
            assert len(pushed) - len(sent) <= max([len(stop) - 1 for stop in stops], default=0)
            assert not pushed[len(sent) :] or any(stop.startswith(pushed[len(sent) :]) for stop in stops)
    if not matcher.found:
        sent += matcher.flush()
    assert (sent, matcher.found) == reference(text, stops)


@given(TEXTS, STOPS, st.integers(0, 40))
def test_a_text_that_may_follow_ends_where_it_would(text: str, stops: list[str], number: int) -> None:
    """Asked at each of its characters, as long as none of them ended the text."""
    pushed, ahead = text[:number], text[number:]
    matcher = StopMatcher(stops)
    matcher.push(pushed)
    if matcher.found:
        return
    ends = [end for end in range(len(ahead) + 1) if matcher.ends_in(ahead[:end])]
    expected = [
        end for end in range(1, len(ahead) + 1) if any((pushed + ahead[:end]).endswith(s) for s in stops)
    ]
    assert ends[:1] == expected[:1]

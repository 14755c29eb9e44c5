"""Drafts by prompt lookup: what is drafted, and how much of it."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import example, given
from hypothesis import strategies as st

from service.runtimes.speculation import Drafter, DraftLength, PromptLookup


def looked_up(token_ids: Sequence[int], length: int) -> list[int]:
    """What `PromptLookup.draft` should give, by comparing all places."""
    for ngram in (4, 3):
        last = token_ids[-ngram:]
        for begin in range(len(token_ids) - ngram - 1, -1, -1):
            if list(token_ids[begin : begin + ngram]) == list(last):
                found = list(token_ids)
                for _ in range(length):
                    found.append(found[begin + ngram + len(found) - len(token_ids)])
                return found[len(token_ids) :]
    return []


# Tokens whose bytes are alike: an occurrence may begin within a token.
@given(
    st.lists(st.sampled_from([0, 1, 256, 257, 65536, 1 << 24]), min_size=1, max_size=40),
    st.integers(0, 40),
    st.integers(1, 20),
)
def test_drafts_are_what_followed_the_last_tokens(token_ids: list[int], known: int, length: int) -> None:
    lookup = PromptLookup(token_ids[:known])
    for token_id in token_ids[known:]:
        lookup.push(token_id)
    assert list(lookup.draft(length)) == looked_up(token_ids, length)


def test_a_lookup_forgets_what_is_long_ago() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 5, *range(1000, 101_000)])
    for token_id in (1, 2, 3, 4):
        lookup.push(token_id)
    assert not lookup.draft(3)
    assert len(lookup.token_ids) <= 8_192


def test_drafts_become_longer_while_they_are_accepted_and_shorter_when_not() -> None:
    length = DraftLength(15)
    length.decoded(1.0)
    seen = []
    for accepted in (4, 8, 15, 3, 4):
        seen.append(length.current)
        length.verified(length.current, accepted, 1.2)
    assert seen == [4, 8, 15, 15, 4] and length.current == 8


def test_a_text_that_begins_to_repeat_itself_is_noticed() -> None:
    drafter = Drafter([1, 2, 3], 15)
    for _ in range(40):
        if drafter.draft(15):
            drafter.stepped(2, 1, 2.0)
        else:
            drafter.stepped(0, 1, 1.0)
    for _ in range(200):
        for token_id in (7, 8, 9, 10):
            drafter.push(token_id)
            if draft := drafter.draft(15):
                drafter.stepped(len(draft), 1 + len(draft), 1.5)
            else:
                drafter.stepped(0, 1, 1.0)
    assert drafter.expects_draft and len(drafter.draft(15)) == 15
    assert drafter.accepted > 400


def test_a_draft_model_that_has_nothing_to_say_is_asked_ever_less_often() -> None:
    drafter, asked = Drafter([1, 2, 3], 15, has_model=True), 0
    for _ in range(2_000):
        assert not drafter.draft(15)
        if wanted := drafter.wanted(15):
            asked += 1
            drafter.stepped(0, 1, 1.0, wanted=wanted)
        else:
            # Before it is asked again, nothing is prelaunched.
            is_next = drafter.expects_draft
            drafter.stepped(0, 1, 1.0)
            assert is_next == (drafter.wanted(15) > 0)
    # Eight times before each pause, which are of 16, 32, 64, ... tokens.
    assert 8 * 6 <= asked <= 8 * 8


def test_what_a_draft_model_has_offered_is_verified_next_or_never() -> None:
    drafter = Drafter([1], 15, has_model=True)
    assert not drafter.wanted(15), "the time of a plain step is not known"
    drafter.stepped(0, 1, 1.0)
    assert drafter.wanted(15) == 4 and drafter.wanted(2) == 2 and drafter.wanted(-1) == 0
    drafter.stepped(0, 1, 1.0, wanted=4, offered=[7, 8, 9, 10])
    assert list(drafter.draft(15)) == [7, 8, 9, 10] and list(drafter.draft(2)) == [7, 8]
    drafter.stepped(4, 1, 1.2, wanted=2, offered=[5, 6])
    assert not drafter.draft(15), "the last did not pay off"
    for _ in range(16):
        drafter.stepped(0, 1, 1.0)
    assert drafter.wanted(15) and not drafter.draft(15), "they were for another place"


@given(
    tries=st.lists(st.tuples(st.integers(0, 15), st.floats(1.0, 5.0)), min_size=1, max_size=8),
    has_model=st.booleans(),
)
@example(tries=[(1, 1.9), (0, 3.0)], has_model=False)
@example(tries=[(1, 1.9), (0, 3.0)], has_model=True)
def test_bad_drafts_cost_a_fiftieth_of_the_time_at_most(
    tries: list[tuple[int, float]], has_model: bool
) -> None:
    drafter, tokens, took_s, verified = Drafter([1], 15, has_model=has_model), 0, 0.0, 0
    while tokens < 10_000:
        drafted, kept, step_s, wanted = 0, 1, 1.0, drafter.wanted(15)
        # The draft model's tokens, or those of a text that repeats itself: how many are right is given.
        if drafter.most(15) and (draft := drafter.draft(15) if has_model else [1] * drafter.most(15)):
            most, step_s = tries[verified % len(tries)]
            drafted, kept, verified = len(draft), 1 + min(most, len(draft)), verified + 1
        elif wanted:
            step_s = 1.5
        drafter.stepped(drafted, kept, step_s, wanted=wanted, offered=[1] * wanted)
        tokens, took_s = tokens + kept, took_s + step_s
    # A decode takes a second. Tries since the last pause are not made up for yet.
    assert took_s <= 1.02 * tokens + 40

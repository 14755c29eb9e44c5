"""A sample's chunks: its text ends where its first stop text begins, and some tokens may not follow."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.v1 import runner_pb2

from service.runtimes.sample import Sample, SampleSpec
from service.runtimes.token_rules import token_rules
from tests.service.text.kinds import END, kind

LONG = 1000


def spec(name: str, stops: Sequence[str] = (), max_tokens: int = LONG) -> SampleSpec:
    tokenizer = kind(name)
    end_id = tokenizer.token_to_id(END) or 0
    stop_ids = {end_id: END} if END in stops else {}
    return SampleSpec("0", [], max_tokens, frozenset(stop_ids), stops, tokenizer, False, stop_ids)


def run(made: SampleSpec, ids: Sequence[int]) -> Iterator[runner_pb2.SampleChunk]:
    sample = Sample(made, 0)
    for token_id in ids:
        yield sample.take(token_id)
        if sample.is_finished:
            return
    yield sample.complete()


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("stop", ["\u754c", "\u4e16\u754c", "b\u4e16"])
def test_a_stop_text_of_several_tokens_ends_a_sample_with_its_last_one(name: str, stop: str) -> None:
    """Although more bytes could make those of the stop text invalid."""
    text = "ab\u4e16\u754c\u4e16"
    begin = text.index(stop)
    tokenizer = kind(name)
    ids = tokenizer.encode(text).ids
    chunks = list(run(spec(name, ["nowhere", stop]), ids))
    end = next(n for n in range(len(ids) + 1) if stop in tokenizer.decode(ids[:n]))
    assert sum(len(chunk.token_ids) for chunk in chunks) == end
    last = chunks[-1]
    assert (last.finish_reason, last.stop) == (runner_pb2.FINISH_REASON_STOP, stop)
    assert "".join(chunk.text for chunk in chunks) == text[:begin]


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "metaspace"])
@given(data=st.data())
def test_a_draft_ends_before_the_token_that_ends_the_sample(name: str, data: st.DataObject) -> None:
    tokenizer = kind(name)
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), min_size=1, max_size=20))
    text = tokenizer.decode(ids) or "x"
    begin = data.draw(st.integers(0, len(text) - 1))
    stop = text[begin : data.draw(st.integers(begin + 1, len(text)))]
    made = spec(name, [stop, END] if data.draw(st.booleans()) else [stop])
    end = next((n for n, chunk in enumerate(run(made, ids)) if chunk.finish_reason and chunk.token_ids), None)
    sample = Sample(made, 0)
    for position, token_id in enumerate(ids[:end]):
        assert sample.before_end(ids[position:]) == ids[position:end]
        # It has changed nothing.
        assert not sample.take(token_id).finish_reason


def test_an_incomplete_character_is_no_stop_text() -> None:
    chunks = list(run(spec("byte_level", ["\ufffd"]), kind("byte_level").encode("\u20ac").ids))
    assert "".join(chunk.text for chunk in chunks) == "\u20ac" and not chunks[-1].stop


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_a_stop_text_in_the_first_tokens_is_text(name: str) -> None:
    """Also where it is known only when the sample ends."""
    ids = kind(name).encode("ab\u4e16").ids
    made = replace(spec(name, ["\u4e16"], len(ids)), rules=token_rules(len(ids), frozenset(), ()))
    *_, last = chunks = list(run(made, ids))
    assert last.finish_reason == runner_pb2.FINISH_REASON_LENGTH and not last.stop
    assert "".join(chunk.text for chunk in chunks) == "ab\u4e16"


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("cut", [1, 2])
def test_a_constrained_text_behind_a_part_of_a_character_is_only_its_own(name: str, cut: int) -> None:
    """It would begin with a replacement character, which no schema allows."""
    tokenizer = kind(name)
    made = replace(spec(name), prompt=tokenizer.encode("ab\u4e0b").ids[:-cut])
    matcher: Any = SimpleNamespace(take=lambda _token_id: None)
    sample, ids = Sample(made, 0, matcher), tokenizer.encode('{"\u754c"').ids
    text = "".join(sample.take(token_id).text for token_id in ids) + sample.complete().text
    assert text == tokenizer.decode([*tokenizer.encode("b").ids, *ids]).removeprefix("b")


def test_a_word_is_forbidden_where_its_beginning_is_the_end() -> None:
    """Also of tokens whose numbers share bytes."""
    rng = random.Random(1)
    vocabulary = [0, 1, 256, 1 << 16, 1 << 24, 257, (1 << 32) - 1]
    found = 0
    for _ in range(300):
        words = [rng.choices(vocabulary, k=rng.randrange(5)) for _ in range(rng.randrange(1, 30))]
        rules = token_rules(2, frozenset([5]), words)
        assert rules is not None and rules.num_before == max(0, *(len(word) - 1 for word in words))
        made = rng.choices(vocabulary, k=rng.randrange(8))
        last = made[max(0, len(made) - rules.num_before) :]
        ends = {5} if len(made) < 2 else set()
        bad = {word[-1] for word in words if word and made[max(0, len(made) + 1 - len(word)) :] == word[:-1]}
        assert rules.forbidden(len(made), last) == bad | ends
        found += len(bad)
    assert found > 500

"""Log-probabilities of tokens in both forms, as a whole and as a stream: their names, bytes and offsets."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.v1 import runner_pb2, types_pb2
from tokenizers import Tokenizer

from service.extensions.openai.models import ResolvedModel
from service.extensions.openai.prompts import Prompt, prompts_of
from service.extensions.openai.requests import CompletionRequest
from service.extensions.openai.responses import CompletionResponse
from service.extensions.openai.token_texts import TokenTexts
from service.runtimes.sample import Sample, SampleSpec
from service.text.output_formats import OutputFormats
from service.text.text_model import TextModel
from tests.service.served import turns_of
from tests.service.text.kinds import END, KINDS, kind
from workers.common import worker_pb2

MODEL = ResolvedModel("local", is_local=True, sampling_defaults=types_pb2.SamplingParams())
LONG = 1000
Tops = Sequence[tuple[int, float]]


def chunks_of(
    name: str,
    ids: Sequence[int],
    stops: Sequence[str] = (),
    tops: Sequence[Tops] = (),
    ends: Sequence[int] = (),
) -> list[runner_pb2.SampleChunk]:
    """The chunks of a sample of these tokens. The log-probability of each is minus its place."""
    spec = SampleSpec("0", [], LONG, frozenset(ends), stops, kind(name), True)
    sample = Sample(spec, 0)
    chunks = []
    for at, token_id in enumerate(ids):
        output = types_pb2.StepOutput(token_id=token_id, logprob=-at)
        for other, logprob in tops[at] if tops else ():
            output.top.token_ids.append(other)
            output.top.logprobs.append(logprob)
        output.top.SetInParent()
        chunks.append(sample.take(token_id, output))
        if sample.is_finished:
            return chunks
    return [*chunks, sample.complete()]


def asked(*items: runner_pb2.ExecuteItem, model: ResolvedModel = MODEL, **settings: Any) -> CompletionRequest:
    """A request for completions; of one item if none is given."""
    plain: dict[str, Any] = {"is_chat": False, "has_logprobs": False, "is_stream": False, "with_usage": False}
    one = runner_pb2.ExecuteItem(item_id="0", n=1)
    return CompletionRequest(items=[*items] or [one], model=model, **{**plain, **settings})


def answers(
    name: str, chunks: Sequence[runner_pb2.SampleChunk], *, is_chat: bool = False
) -> tuple[str, dict[str, Any]]:
    """The text and its log-probabilities, which are the same in one piece and as a stream."""
    found = []
    for is_stream in (False, True):
        request = asked(is_chat=is_chat, has_logprobs=True, is_stream=is_stream)
        response = CompletionResponse(request, TokenTexts(kind(name)))
        response.begin(runner_pb2.ExecutionStarted())
        if is_stream:
            found.append(streamed([event for chunk in chunks for event in response.events(chunk)]))
        else:
            for chunk in chunks:
                response.add(chunk)
            (choice,) = json.loads("".join(response.pieces()))["choices"]
            found.append((choice["message"]["content"] if is_chat else choice["text"], choice["logprobs"]))
    whole, parts = found
    assert parts == (whole[0], {name: value for name, value in whole[1].items() if value is not None})
    return whole


def streamed(events: Sequence[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    text = ""
    lists: dict[str, list[Any]] = {}
    for event in json.loads(json.dumps(events, default=list)):
        (choice,) = event["choices"]
        text += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        for name, values in (choice.get("logprobs") or {}).items():
            if values is not None:
                lists[name] = [*lists.get(name, []), *values]
            assert all(offset <= len(text) for offset in values or () if name == "text_offset"), "it was sent"
    return text, lists


def id_of(name: str, token: str) -> int:
    token_id = kind(name).token_to_id(token)
    assert token_id is not None
    return token_id


# Names.


def test_alternatives_have_keys_of_their_own() -> None:
    """A letter and the byte of it, parts of characters, a chosen token that is not among the likely ones."""
    letter, same, part, other = (
        id_of("byte_fallback", token) for token in ("a", "<0x61>", "<0xE2>", "<0x82>")
    )
    end, chosen = id_of("byte_fallback", END), id_of("byte_fallback", "b")
    tops = [(same, -0.5), (letter, -0.25), (part, -1.0), (other, -2.0), (end, -3.0)]
    _, logprobs = answers("byte_fallback", chunks_of("byte_fallback", [letter, chosen], tops=[tops, tops]))
    assert logprobs["tokens"] == ["a", "b"]
    shared = {"bytes:\\xe2": -1.0, "bytes:\\x82": -2.0, END: -3.0}
    assert logprobs["top_logprobs"] == [
        # The chosen token has its name and its own value.
        {"a": 0.0, "bytes:\\x61": -0.5, **shared},
        {"b": -1.0, "a": -0.25, "bytes:\\x61": -0.5, **shared},
    ]


def test_a_token_has_the_text_that_it_adds() -> None:
    """A decoder strips a blank at the beginning of a text."""
    with_blank, without = id_of("metaspace", "\u2581the"), id_of("metaspace", "a")
    _, logprobs = answers(
        "metaspace", chunks_of("metaspace", [without, with_blank], tops=[[], [(without, -1.0)]])
    )
    assert logprobs["tokens"] == ["a", " the"]
    assert logprobs["top_logprobs"][1] == {" the": -1.0, "a": -1.0}


# Of many kinds, each gets a part of the examples.
FEW = settings(max_examples=settings().max_examples // 3)


# Offsets.

TEXTS = st.text(st.sampled_from("ab \u00e9\u20ac\u4e16\U0001f600") | st.characters(exclude_categories=["Cs"]))


def complete(tokenizer: Tokenizer, ids: Sequence[int]) -> int:
    """The complete characters of tokens."""
    return len(tokenizer.decode(list(ids)).rstrip("\ufffd"))


@pytest.mark.parametrize("name", ["byte_level", "byte_level_across_words", "byte_fallback"])
@given(text=TEXTS.filter(lambda text: "\ufffd" not in text))
def test_offsets_are_those_of_the_text(name: str, text: str) -> None:
    tokenizer = kind(name)
    ids = tokenizer.encode(text).ids
    sent, logprobs = answers(name, chunks_of(name, ids))
    assert sent == tokenizer.decode(ids)
    assert len(logprobs.get("tokens", ())) == len(ids)
    for at, offset in enumerate(logprobs.get("text_offset", ())):
        assert offset <= len(sent)
        if name != "byte_fallback":
            assert offset == complete(tokenizer, ids[:at])
    for token, (begin, end) in zip(
        logprobs.get("tokens", ()),
        itertools.pairwise([*logprobs.get("text_offset", ()), len(sent)]),
        strict=False,
    ):
        assert token.startswith("bytes:") or sent[begin:end].strip() == token.strip()


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
@FEW
def test_offsets_of_any_tokens_are_in_the_text(name: str, data: st.DataObject) -> None:
    every = st.integers(0, kind(name).get_vocab_size() - 1)
    ids = data.draw(st.lists(every, max_size=30))
    whole = kind(name).decode(ids)
    cut = st.tuples(st.integers(0, len(whole)), st.integers(1, 4)).map(lambda at: whole[at[0] : sum(at)])
    stops = data.draw(st.lists(cut.filter(bool), max_size=2)) if whole else []
    text, logprobs = answers(name, chunks_of(name, ids, stops))
    offsets = logprobs.get("text_offset", [])
    assert offsets == sorted(offsets) and all(offset <= len(text) for offset in offsets)


# Chats.


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_each_token_has_its_bytes_in_chats(name: str) -> None:
    text = "a\u20ac \U0001f608"
    ids = kind(name).encode(text).ids
    tops = [[(token_id, 0.0)] for token_id in ids]
    _, logprobs = answers(name, chunks_of(name, ids, tops=tops), is_chat=True)
    content = logprobs["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode().strip() == text
    assert all(entry["top_logprobs"][0]["bytes"] == entry["bytes"] for entry in content)
    assert any(entry["token"].startswith("bytes:\\x") for entry in content)


def test_an_end_token_has_no_entry() -> None:
    letter, end = id_of("byte_level", "a"), id_of("byte_level", END)
    for ends, expected in (([end], ["a"]), ([letter], ["a"]), ([], ["a", END])):
        ids = [letter, end] if letter not in ends else [letter]
        _, logprobs = answers("byte_level", chunks_of("byte_level", ids, ends=ends))
        assert logprobs["tokens"] == expected


# Echoes.


@pytest.mark.parametrize("ends", [(), (1,)])
def test_an_echo_alone_has_nothing_of_what_would_follow(ends: Sequence[int]) -> None:
    """Also if that would have been the end of the text."""
    (last,) = chunks_of("byte_level", [1], ends=ends)[:1]
    last.finish_reason = last.finish_reason or runner_pb2.FINISH_REASON_LENGTH
    last.usage.input_tokens, last.usage.output_tokens = 2, 1
    for is_stream in (False, True):
        request = asked(
            is_stream=is_stream, with_usage=is_stream, echo=True, echo_only=True, with_token_ids=True
        )
        response = CompletionResponse(request, TokenTexts(None), [Prompt([5, 6], "ab")])
        response.begin(runner_pb2.ExecutionStarted())
        if is_stream:
            first, end, with_usage = (*response.events(last), *response.last_events())
            choice = {**first["choices"][0], **end["choices"][0], "text": "ab"}
            usage = with_usage["usage"]
        else:
            response.add(last)
            whole = json.loads("".join(response.pieces()))
            (choice,), usage = whole["choices"], whole["usage"]
        assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("ab", [], "length")
        assert list(choice["prompt_token_ids"]) == [5, 6]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, 0)


async def test_the_text_of_many_prompts_does_not_block_others() -> None:
    items = [runner_pb2.ExecuteItem(item_id=str(index), n=1) for index in range(50)]
    for item in items:
        item.tokens.token_ids.append(1)
    request = asked(*items, echo=True)

    async def tokenizer() -> Tokenizer:
        return kind("byte_level")

    text: Any = SimpleNamespace(tokenizer=tokenizer)
    prompts, turns = await turns_of(prompts_of(request, text, OutputFormats()))
    assert [prompt.text for prompt in prompts] == [kind("byte_level").decode([1])] * 50
    assert turns > 50


# Memory.


async def test_the_tokens_of_a_prompt_take_what_a_message_takes_for_them() -> None:
    """However many choices there are: prompts that are returned may have millions together."""
    num_tokens, items = 3_000, [runner_pb2.ExecuteItem(item_id=str(index), n=2) for index in range(8)]
    for item in items:
        item.tokens.token_ids.extend(range(1000, 1000 + num_tokens))
    request = asked(*items, model=replace(MODEL, max_tokens=num_tokens), with_token_ids=True)
    text = TextModel(worker_pb2.WorkerReady, lambda: "")
    tracemalloc.start()
    try:
        prompts = await prompts_of(request, text, OutputFormats())
        response = CompletionResponse(request, TokenTexts(None), prompts)
        response.begin(runner_pb2.ExecutionStarted())
        size_bytes = sum(map(len, response.pieces()))
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        text.close()
    assert size_bytes > 2 * len(items) * num_tokens
    assert most_bytes < 16 * len(items) * num_tokens

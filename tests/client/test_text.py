"""The client's text helpers, with tokenizers of several kinds."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire import AsyncClient, Client
from quire.errors import InternalError, PreconditionFailed
from quire.text import ModelTokenizer
from quire.v1 import executor_pb2, types_pb2
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from tests.fake_executor import EOS, FakeExecutor
from tests.service.text.kinds import KINDS, kind

END = 0


def of_bytes() -> Tokenizer:
    """Each byte is a token, as where nothing is known."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<end>": END} | {letter: index for index, letter in enumerate(alphabet, start=1)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing("<end> $A", special_tokens=[("<end>", END)])
    return tokenizer


def of_words() -> Tokenizer:
    """A blank belongs to the word behind it, and is not written at the beginning of a text."""
    words = ["<end>", "\u2581Once", "\u2581upon", "\u2581a", "\u2581time", ","]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return tokenizer


def made_of(tokenizer: Tokenizer) -> ModelTokenizer:
    model = types_pb2.ModelDescription(eos_token_ids=[END])
    tokenizer_json = tokenizer.to_str().encode()
    return ModelTokenizer(executor_pb2.GetModelInfoResponse(model=model, tokenizer_json=tokenizer_json))


BYTES, WORDS = made_of(of_bytes()), made_of(of_words())


def test_the_end_of_the_tokenizer_ends_a_text_too() -> None:
    model = types_pb2.ModelDescription(eos_token_ids=[7])
    tokenizer_json = of_bytes().to_str().encode()
    for names, ends in (
        ({"eos_token": "<end>"}, {7, END}),
        ({"eos_token": "none of its tokens"}, {7}),
        ({}, {7}),
    ):
        info = executor_pb2.GetModelInfoResponse(
            model=model, tokenizer_json=tokenizer_json, special_tokens=names
        )
        assert ModelTokenizer(info).end_ids == ends


def test_texts_become_tokens_and_texts_again() -> None:
    plain = BYTES.encode("né 🙂", special_tokens=False)
    assert BYTES.encode("né 🙂") == [END, *plain] and len(plain) == 8
    assert BYTES.decode([END, *plain]) == "né 🙂"
    assert BYTES.decode([END, *plain], special_tokens=True) == "<end>né 🙂"
    assert BYTES.end_ids == {END}


def test_a_stream_never_shows_half_a_character() -> None:
    stream = BYTES.stream()
    shown = [stream.push(token_id) for token_id in BYTES.encode("é🙂!", special_tokens=False)]
    assert shown == ["", "é", "", "", "", "🙂", "!"]
    assert stream.flush() == ""
    half = BYTES.encode("🙂", special_tokens=False)[:2]
    assert [stream.push(token_id) for token_id in half] == ["", ""]
    assert set(stream.flush()) == {"\ufffd"}
    assert stream.flush() == "", "it was shown"


@given(st.text())
def test_what_a_stream_shows_is_the_text(text: str) -> None:
    stream = BYTES.stream()
    shown = [stream.push(token_id) for token_id in BYTES.encode(text)]
    assert "".join(shown) + stream.flush() == text


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
def test_what_a_stream_shows_of_any_tokens_is_what_decoding_them_gives(
    name: str, data: st.DataObject
) -> None:
    tokenizer = kind(name)
    every = range(tokenizer.get_vocab_size())
    parts = [token_id for token_id in every if tokenizer.decode([token_id]) == "\ufffd"] or [0]
    ids = data.draw(st.lists(st.sampled_from(every) | st.sampled_from(parts), max_size=60))
    model = made_of(tokenizer)
    stream = model.stream()
    shown = "".join(stream.push(token_id) for token_id in ids) + stream.flush()
    assert shown == model.decode(ids)
    before = tokenizer.encode("a" if name != "adder" else "1").ids
    behind = model.stream(before)
    shown = "".join(behind.push(token_id) for token_id in ids) + behind.flush()
    assert shown == model.decode(before + ids).removeprefix(model.decode(before))


def test_bytes_of_the_context_can_begin_a_character() -> None:
    tokenizer = kind("byte_fallback")
    ids = tokenizer.encode("\u4e16" * 8).ids[1:]
    for at in (9, 10, 11):
        stream = made_of(tokenizer).stream(ids[:at])
        shown = "".join(stream.push(token_id) for token_id in ids[at:]) + stream.flush()
        assert shown == "\u4e16" * 5


def test_special_tokens_in_the_context_do_not_hide_what_is_before() -> None:
    once, upon = 1, 2
    assert WORDS.stream(context=[once, *[END] * 20]).push(upon) == " upon"


def test_what_stands_before_decides_how_a_stream_begins() -> None:
    once, upon, comma = 1, 2, 5
    assert WORDS.stream().push(upon) == "upon"
    stream = WORDS.stream(context=[once])
    assert [stream.push(upon), stream.push(END), stream.push(comma), stream.push(once)] == [
        " upon",
        "",
        ",",
        " Once",
    ]


async def test_clients_hand_it_out(target: str, executor: FakeExecutor) -> None:
    executor.tokenizer_json = of_bytes().to_str().encode()
    with Client(target, timeout_s=20) as client:
        tokenizer = client.tokenizer()
        assert tokenizer.decode(tokenizer.encode("1+1")) == "1+1"
        assert tokenizer.end_ids == {EOS}
    async with AsyncClient(target, timeout_s=20) as awaiting:
        assert (await awaiting.tokenizer()).encode("1+1") == tokenizer.encode("1+1")


def test_a_model_without_a_tokenizer(target: str, executor: FakeExecutor) -> None:
    with Client(target, timeout_s=20) as client:
        with pytest.raises(PreconditionFailed) as caught:
            client.tokenizer()
        assert caught.value.reason == "NO_TOKENIZER"
        executor.tokenizer_json = b"{}"
        with pytest.raises(InternalError, match=r"tokenizer\.json cannot be used"):
            client.tokenizer()


def test_without_the_package_its_extra_is_named(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with Client(target, timeout_s=20) as client, pytest.raises(ImportError, match="pip install tokenizers"):
        client.tokenizer()

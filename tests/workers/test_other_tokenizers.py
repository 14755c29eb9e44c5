"""Directories without a tokenizer.json: tokens are those of the libraries whose files they have."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from transformers.integrations.mistral.tokenizer import MistralConverter

from tests.service.text.kinds import kind
from workers.common.gguf.splits import SPLITS
from workers.models.text import ModelText, read_text
from workers.models.tokenizer import TokenizerFile, read_tokenizer
from workers.models.vocabulary_files import MAX_TOKENS

PLENTY = 1 << 40
CORPUS = [
    "the cat sat on the mat, and people philosophise",
    "世界 世界, né € 😀😀 İstanbul Ⅷ ﬁne",
    '{"name": "x", "age": 12}\n\tfor i in range(10):\n\t\tprint(i)',
    "aab abb ba 0123456789 don't We'LL",
] * 4
TEXTS = st.lists(
    st.sampled_from([*"ab cdt,.!?\n\t0123'", "  ", "the", "people", "世", "é", "ﬁ", "Ⅷ", "\u3000", "€", "😀"])
    | st.text(max_size=3),
    max_size=8,
).map("".join)


def write(directory: Path, files: Mapping[str, bytes | dict[str, Any]]) -> Path:
    directory.mkdir(exist_ok=True)
    for name, content in files.items():
        data = json.dumps(content).encode() if isinstance(content, dict) else content
        (directory / name).write_bytes(data)
    return directory


def tokenizer_of(text: TokenizerFile | ModelText) -> Tokenizer:
    return Tokenizer.from_buffer(text.content if isinstance(text, TokenizerFile) else text.tokenizer_json)


def ours(directory: Path) -> Tokenizer:
    return tokenizer_of(read_tokenizer(directory, 1 << 20, PLENTY))


def ids(tokenizer: Tokenizer, text: str, *, special: bool = False) -> list[int]:
    found: list[int] = tokenizer.encode(text, add_special_tokens=special).ids
    return found


# SentencePiece.

RULES: dict[str, dict[str, Any]] = {
    "llama": {"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    "no space before": {
        "normalization_rule_name": "identity", "remove_extra_whitespaces": False, "add_dummy_prefix": False,
    },
    "normalised": {"normalization_rule_name": "nmt_nfkc"},
}  # fmt: skip


def trained(**settings: Any) -> bytes:
    """The content of a tokenizer.model."""
    model = io.BytesIO()
    rules: dict[str, Any] = {"model_type": "bpe", "vocab_size": 360, "byte_fallback": True, "minloglevel": 3}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, **rules | settings
    )
    return model.getvalue()


@pytest.fixture(scope="module", params=[*RULES])
def piece_models(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[sentencepiece.SentencePieceProcessor, Tokenizer]:
    content = trained(**RULES[request.param], user_defined_symbols=["<mask>"])
    theirs = sentencepiece.SentencePieceProcessor(model_proto=content)
    return theirs, ours(write(tmp_path_factory.mktemp("pieces"), {"tokenizer.model": content}))


@given(text=TEXTS)
def test_pieces_are_those_of_sentencepiece(
    piece_models: tuple[sentencepiece.SentencePieceProcessor, Tokenizer], text: str
) -> None:
    theirs, tokenizer = piece_models
    text = text.replace("\x00", "").replace("\u2581", "")
    tokens = theirs.encode(text)
    assert ids(tokenizer, text) == tokens
    assert tokenizer.decode(tokens) == theirs.decode(tokens)


def test_texts_begin_as_the_settings_say(tmp_path: Path) -> None:
    content = trained(**RULES["llama"])
    theirs = sentencepiece.SentencePieceProcessor(model_proto=content)
    model = {"tokenizer.model": content}
    plain = read_tokenizer(write(tmp_path / "plain", model), 1 << 20, PLENTY)
    assert ids(tokenizer_of(plain), "the cat", special=True) == [theirs.bos_id(), *theirs.encode("the cat")]
    assert plain.end_id == theirs.eos_id()
    said = {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False, "eos_token": "<|im_end|>"}
    other = read_tokenizer(
        write(tmp_path / "other", model | {"tokenizer_config.json": said}), 1 << 20, PLENTY
    )
    assert ids(tokenizer_of(other), "the cat", special=True) == theirs.encode("the cat")
    assert other.end_id == theirs.vocab_size()


@pytest.mark.parametrize("legacy", [True, False])
def test_a_space_is_added_after_special_tokens_as_the_settings_say(tmp_path: Path, *, legacy: bool) -> None:
    content = trained(**RULES["llama"])
    theirs = sentencepiece.SentencePieceProcessor(model_proto=content)
    said = {"tokenizer_class": "LlamaTokenizer", "legacy": legacy}
    tokenizer = ours(write(tmp_path, {"tokenizer.model": content, "tokenizer_config.json": said}))
    after = theirs.encode("the cat")
    if not legacy:
        after = theirs.encode("\nthe cat")[len(theirs.encode("\n")) :]
    assert ids(tokenizer, "a</s>the cat") == [*theirs.encode("a"), theirs.eos_id(), *after]


def test_added_tokens_take_the_place_of_unused_pieces(tmp_path: Path) -> None:
    """As in InternLM2."""
    unused = ["[UNUSED_TOKEN_0]", "[UNUSED_TOKEN_1]"]
    content = trained(**RULES["llama"], user_defined_symbols=unused)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=content)
    start = theirs.piece_to_id(unused[0])
    added = {str(start): {"content": "<|im_start|>", "special": True}}
    said = {"tokenizer_class": "InternLM2Tokenizer", "added_tokens_decoder": added}
    tokenizer = ours(write(tmp_path, {"tokenizer.model": content, "tokenizer_config.json": said}))
    assert ids(tokenizer, "<|im_start|>the cat", special=True) == [1, start, *theirs.encode("the cat")]
    assert tokenizer.get_vocab_size() == theirs.vocab_size()


def test_the_special_tokens_of_chatglm_are_no_parts_of_words(tmp_path: Path) -> None:
    """They are in no file: sop begins a text, and eop is in people."""
    content = trained(**RULES["llama"])
    theirs = sentencepiece.SentencePieceProcessor(model_proto=content)
    said = {"tokenizer_class": "ChatGLMTokenizer"}
    tokenizer = ours(write(tmp_path, {"tokenizer.model": content, "tokenizer_config.json": said}))
    mask, begin, user = (theirs.vocab_size() + index for index in (1, 3, 6))
    people = theirs.encode("people philosophise")
    assert ids(tokenizer, "people philosophise", special=True) == [mask, begin, *people]
    assert ids(tokenizer, "[gMASK]sop<|user|>people philosophise") == [mask, begin, user, *people]


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (
            {"hy.tiktoken": b"QQ== 1\n", "tokenizer_config.json": {"tokenizer_class": "HYTokenizer"}},
            "ranks 0",
        ),
        (
            {
                "hy.tiktoken": b"QQ== 0\nQg== 0\n",
                "tokenizer_config.json": {"tokenizer_class": "HYTokenizer"},
            },
            "ranks 0",
        ),
        ({"tokenizer.model": b"\x0a\xff"}, "is not a model of SentencePiece"),
        ({"tokenizer.model": trained() + b"\x0a\x03\x0a\x01\xff"}, "is not a model of SentencePiece"),
        ({"tokenizer.model": trained(model_type="unigram", vocab_size=320)}, "only BPE"),
        ({"tokenizer.model": trained(), "tokenizer_config.json": {"tokenizer_class": "X"}}, "got 'X'"),
        ({"tiktoken.model": b"QQ== 0\n", "tokenizer_config.json": {"tokenizer_class": "X"}}, "got 'X'"),
        ({"tiktoken.model": b"", "tokenizer_config.json": {"tokenizer_class": "X" * 1000}}, "XX...)"),
        ({"tekken.json": {"config": {}}}, "is not a tokenizer of Mistral"),
        (
            {"vocab.json": {"a": 5}, "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer"}},
            "the ids 0",
        ),
        (
            {
                "vocab.json": {"a": 0},
                "merges.txt": b"\n" * (MAX_TOKENS + 1),
                "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer"},
            },
            "more than 1048576 merges",
        ),
        (
            {
                "tokenizer.model": trained(),
                "tokenizer_config.json": {"added_tokens_decoder": {"4000000000": {"content": "x"}}},
            },
            "with the id 4000000000",
        ),
    ],
)
def test_other_files_are_told(
    tmp_path: Path, files: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The model is served all the same, for tokens."""
    assert read_tokenizer(write(tmp_path, files), 10, PLENTY) == TokenizerFile()
    (record,) = caplog.records
    assert why in record.getMessage() and "texts are refused" in record.getMessage()


# Ranks of bytes.


def ranks() -> dict[bytes, int]:
    """A vocabulary of tiktoken: of two tokens the one of the lower rank is made first."""
    letters = {chr(byte): byte for byte in (*range(33, 127), *range(161, 173), *range(174, 256))}
    rest = [byte for byte in range(256) if byte not in letters.values()]
    letters |= {chr(256 + index): byte for index, byte in enumerate(rest)}
    vocabulary = kind("byte_level").get_vocab(with_added_tokens=False)
    return {bytes(letters[letter] for letter in token): rank for token, rank in vocabulary.items()}


def lines(of: Mapping[bytes, int]) -> bytes:
    return b"".join(
        base64.b64encode(token) + f" {rank}\n".encode()
        for token, rank in sorted(of.items(), key=lambda item: item[1])
    )


SPECIAL = {"<|endoftext|>": 0, "[gMASK]": 1, "<sop>": 2, "<|im_end|>": 7}


@pytest.fixture(scope="module", params=[("ChatGLM4Tokenizer", "glm4"), ("TikTokenTokenizer", "kimi-k2")])
def byte_models(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[tiktoken.Encoding, Tokenizer]:
    class_name, split = request.param
    known = ranks()
    special = {token: len(known) + index for token, index in SPECIAL.items()}
    theirs = tiktoken.Encoding(
        split, pat_str=SPLITS[split].pattern, mergeable_ranks=known, special_tokens=special
    )
    added = {str(index): {"content": token, "special": True} for token, index in special.items()}
    said = {"tokenizer_class": class_name, "added_tokens_decoder": added, "eos_token": "<|endoftext|>"}
    name = "tokenizer.model" if split == "glm4" else "tiktoken.model"
    files: dict[str, Any] = {name: lines(known), "tokenizer_config.json": said}
    return theirs, ours(write(tmp_path_factory.mktemp("ranks"), files))


@given(text=TEXTS, end=st.booleans())
def test_tokens_are_those_of_tiktoken(
    byte_models: tuple[tiktoken.Encoding, Tokenizer], text: str, *, end: bool
) -> None:
    theirs, tokenizer = byte_models
    text += "<|im_end|>" * end
    tokens = theirs.encode(text, allowed_special="all")
    assert ids(tokenizer, text) == tokens
    before = [theirs.encode_single_token(token) for token in ("[gMASK]", "<sop>")]
    assert ids(tokenizer, text, special=True) == (before if theirs.name == "glm4" else []) + tokens
    assert tokenizer.decode(tokens, skip_special_tokens=False) == theirs.decode(tokens)


def test_the_first_qwen(tmp_path: Path) -> None:
    """Its special tokens are in no file, nor is what ends a text of its chats."""
    known = ranks()
    theirs = tiktoken.Encoding(
        "qwen", pat_str=SPLITS["qwen2"].pattern, mergeable_ranks=known, special_tokens={}
    )
    said = {"tokenizer_class": "QWenTokenizer"}
    text = read_text(
        write(tmp_path, {"qwen.tiktoken": lines(known), "tokenizer_config.json": said}), 1 << 20, PLENTY
    )
    start, end = len(known) + 1, len(known) + 2
    written = "<|im_start|>user\n12 caf\u0065\u0301<|im_end|>"
    expected = [start, *theirs.encode("user\n12 caf\u00e9"), end]
    assert ids(tokenizer_of(text), written, special=True) == expected
    assert text.end_id == end and tokenizer_of(text).get_vocab_size() == len(known) + 208


def tekken(directory: Path) -> Path:
    """A directory of Mistral, with 3 special tokens and 2 places for more."""
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in sorted(ranks().items(), key=lambda item: item[1])
    ]
    special = [
        {"rank": rank, "token_str": token, "is_control": True}
        for rank, token in enumerate(("<unk>", "<s>", "</s>"))
    ]
    config = {
        "pattern": SPLITS["tekken"].pattern, "num_vocab_tokens": len(vocab), "version": "v7",
        "default_vocab_size": len(vocab) + 5 - 10, "default_num_special_tokens": 5,
    }  # fmt: skip
    return write(directory, {"tekken.json": {"config": config, "vocab": vocab, "special_tokens": special}})


@given(text=TEXTS, end=st.booleans())
def test_tekken_is_read_as_the_library_reads_it(
    tmp_path_factory: pytest.TempPathFactory, text: str, *, end: bool
) -> None:
    directory = tekken(tmp_path_factory.getbasetemp() / "tekken")
    theirs = MistralConverter(str(directory / "tekken.json")).converted()
    tokenizer, text = ours(directory), text + "</s>" * end
    assert tokenizer.get_vocab() == theirs.get_vocab()
    assert ids(tokenizer, text) == ids(theirs, text)
    assert ids(tokenizer, text, special=True) == [1, *ids(theirs, text)]


def test_templates_get_the_special_tokens_of_tekken(tmp_path: Path) -> None:
    """Directories of Mistral have no other file that names them."""
    directory = write(tekken(tmp_path), {"chat_template.jinja": b"{{ bos_token }}{{ messages }}"})
    text = read_text(directory, 1 << 20, PLENTY)
    assert text.chat_template.special_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    assert text.end_id == 2


# vocab.json and merges.txt.


@pytest.fixture(scope="module", params=["GPT2Tokenizer", "Qwen2Tokenizer", "opt"])
def pairs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Tokenizer]:
    """Of a class that a file names, or that the library has for a type."""
    model = json.loads(kind("byte_level").to_str())["model"]
    newline = "\r\n" if request.param == "opt" else "\n"
    merges = "".join(f"{first} {second}{newline}" for first, second in model["merges"])
    said = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "add_bos_token": True}
    is_class = request.param.endswith("Tokenizer")
    directory = write(
        tmp_path_factory.mktemp("pairs"),
        {
            "vocab.json": model["vocab"],
            "merges.txt": f"#version: 0.2{newline}{merges}".encode(),
            "tokenizer_config.json": said | ({"tokenizer_class": request.param} if is_class else {}),
            "config.json": {"model_type": "gpt2" if is_class else request.param},
        },
    )
    return AutoTokenizer.from_pretrained(directory), ours(directory)


@given(text=TEXTS, end=st.booleans())
def test_pairs_are_merged_as_by_the_library(pairs: tuple[Any, Tokenizer], text: str, *, end: bool) -> None:
    theirs, tokenizer = pairs
    text += "</s>" * end
    tokens = theirs(text)["input_ids"]
    assert ids(tokenizer, text, special=True) == tokens
    assert tokenizer.decode(tokens, skip_special_tokens=False) == theirs.decode(tokens)

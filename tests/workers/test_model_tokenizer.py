"""The tokenizer that is sent to clients is that of transformers, whichever files its tokens are in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.service.text.kinds import kind
from workers.models.chat_template import read_chat_template
from workers.models.text import ModelText, read_text
from workers.models.tokenizer import TokenizerFile, read_tokenizer

PLENTY = 1 << 40
# As a directory's files describe their tokens.
FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
OTHER_NAMES = ("image_token", "audio_token")


def write(directory: Path, files: Mapping[str, object], tokenizer_json: Mapping[str, Any]) -> Path:
    """A directory with a tokenizer and these other files."""
    directory.mkdir(exist_ok=True)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    # Not a class that builds another tokenizer of the same vocabulary.
    own: Any = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, content in {
        "config": config,
        "tokenizer_config": {},
        "tokenizer": tokenizer_json,
        **files,
    }.items():
        whole = own | content if name == "tokenizer_config" else content
        (directory / f"{name}.json").write_text(json.dumps(whole))
    return directory


def of_kind(name: str = "byte_level") -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(kind(name).to_str())
    return parsed


def ours(directory: Path) -> Tokenizer:
    return Tokenizer.from_buffer(read_tokenizer(directory, 1 << 20, PLENTY).content)


CHATML = ["<|im_start|>", "<|im_end|>"]
TEXT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def described(content: str, **flags: object) -> dict[str, object]:
    return {"content": content, **dict.fromkeys(FLAGS, False), **flags}


def test_objects_that_transformers_refuses_are_special_tokens(tmp_path: Path) -> None:
    """Older directories have them in special_tokens_map.json."""
    for name in ("special_tokens_map", "tokenizer_config"):
        listed = {"additional_special_tokens": [described(token) for token in CHATML]}
        tokenizer = ours(write(tmp_path / name, {name: listed}, of_kind()))
        ids = tokenizer.encode(TEXT).ids
        assert all(tokenizer.token_to_id(token) in ids for token in CHATML)
        assert tokenizer.decode(ids) == "user\nhi\nassistant\n"


# Any directory.

CONTENTS = st.sampled_from(
    ["<|a|>", "<|b|>", "<end>", "the", "the cat", "<think>", "x", "\u4e16", " c ", "<|a|>>"]
)
TOKENS = st.builds(
    lambda content, flags: {"content": content, **flags},
    CONTENTS,
    st.fixed_dictionaries({}, optional=dict.fromkeys((*FLAGS, "special"), st.booleans())),
)
TYPED = TOKENS.map(lambda token: {"__type": "AddedToken", **token})
NAMED = st.fixed_dictionaries(
    {}, optional=dict.fromkeys((*NAMES, *OTHER_NAMES), CONTENTS | TYPED | st.none())
)
LISTED = st.lists(CONTENTS | TYPED, max_size=3)
OF_KIND = st.dictionaries(st.sampled_from(["image_token", "boi_token"]), CONTENTS | TYPED, max_size=2)
CONFIG = st.builds(
    lambda *parts: {name: value for part in parts for name, value in part.items()},
    NAMED,
    st.fixed_dictionaries(
        {},
        optional={
            "additional_special_tokens": LISTED,
            "extra_special_tokens": LISTED | OF_KIND,
            "added_tokens_decoder": st.dictionaries(st.integers(0, 400).map(str), TOKENS, max_size=4),
        },
    ),
)
UNTYPED = TOKENS.map(lambda token: {name: value for name, value in token.items() if name != "special"})
SPECIAL_TOKENS = st.builds(
    lambda named, extra: named | extra,
    st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, CONTENTS | UNTYPED)),
    st.fixed_dictionaries(
        {},
        optional={
            "additional_special_tokens": st.lists(CONTENTS, max_size=3),
            "extra_special_tokens": st.lists(CONTENTS | UNTYPED, max_size=3),
        },
    ),
)
ADDED = st.dictionaries(st.integers(0, 400), CONTENTS, max_size=4).map(
    lambda tokens: {content: token_id for token_id, content in tokens.items()}
)
OWN = st.lists(
    st.builds(
        lambda content, flags: {"id": 0, "content": content, **flags},
        CONTENTS,
        st.fixed_dictionaries(dict.fromkeys((*FLAGS, "special"), st.booleans())),
    ),
    max_size=4,
    unique_by=lambda token: str(token["content"]),
)
FILES = st.fixed_dictionaries(
    {}, optional={"tokenizer_config": CONFIG, "special_tokens_map": SPECIAL_TOKENS, "added_tokens": ADDED}
)
PADDING = {
    "strategy": "BatchLongest",
    "direction": "Right",
    "pad_to_multiple_of": 8,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "<pad>",
}
TRUNCATION = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}


def is_quirk(files: Mapping[str, Any]) -> bool:
    """Whether transformers overlooks that a token of added_tokens.json is special: an object describes it."""
    config = files.get("tokenizer_config", {})
    return "added_tokens" in files and any(isinstance(value, dict | list) for value in config.values())


@given(
    name=st.sampled_from(["byte_level", "byte_fallback", "metaspace"]),
    files=FILES,
    own=OWN,
    is_padded=st.booleans(),
    texts=st.lists(st.lists(CONTENTS | st.sampled_from(["a", " ", "the", "z"])).map("".join), max_size=3),
)
def test_any_directory_is_as_in_transformers(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    files: dict[str, Any],
    own: list[dict[str, Any]],
    is_padded: bool,
    texts: list[str],
) -> None:
    parsed = of_kind(name)
    known = {str(token["content"]) for token in parsed["added_tokens"]}
    parsed["added_tokens"] += [
        {**token, "id": 1000 + at} for at, token in enumerate(own) if token["content"] not in known
    ]
    # As the library writes it: with the ids that it gives.
    parsed = json.loads(Tokenizer.from_str(json.dumps(parsed)).to_str())
    if is_padded:
        parsed |= {"padding": PADDING, "truncation": TRUNCATION}
    if is_quirk(files):
        del files["added_tokens"]
    directory = write(tmp_path_factory.mktemp("model"), files, parsed)
    theirs = AutoTokenizer.from_pretrained(directory)
    found = read_tokenizer(directory, 1 << 20, PLENTY)
    tokenizer = Tokenizer.from_buffer(found.content)
    assert tokenizer.get_added_tokens_decoder() == theirs.added_tokens_decoder
    assert tokenizer.get_vocab() == theirs.get_vocab()
    assert found.end_id == theirs.eos_token_id
    names = read_chat_template(directory, PLENTY).special_tokens
    assert dict(names) == {
        name: token for name, token in theirs.special_tokens_map.items() if token != "<pad>"
    }
    for text in texts:
        ids = tokenizer.encode(text).ids
        assert ids == theirs(text)["input_ids"]
        for skip in (False, True):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip
            )


# What belongs to others.


@pytest.mark.parametrize("setting", ["truncation", "padding", "dropout"])
def test_settings_for_others_are_left_out(tmp_path: Path, setting: str) -> None:
    """Of the last call before the file was written, and of training."""
    parsed = of_kind()
    owner = parsed["model"] if setting == "dropout" else parsed
    owner[setting] = {"truncation": TRUNCATION, "padding": PADDING, "dropout": 0.9}[setting]
    tokenizer = ours(write(tmp_path, {}, parsed))
    expected = kind("byte_level").encode("the cat sat on the mat").ids
    assert all(tokenizer.encode("the cat sat on the mat").ids == expected for _ in range(5))
    assert (tokenizer.truncation, tokenizer.padding) == (None, None)


def test_a_tokenizer_that_is_whole_is_sent_as_it_is(tmp_path: Path) -> None:
    write(tmp_path, {"tokenizer_config": {"eos_token": "<end>"}}, of_kind())
    assert read_tokenizer(tmp_path, 1 << 20, PLENTY).content == (tmp_path / "tokenizer.json").read_bytes()


# Ends, and tokens that the model does not have.


def test_the_end_of_the_tokenizer_joins_those_of_the_configs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    parsed = of_kind()
    end_id = ours(write(tmp_path, {}, parsed)).get_vocab_size()
    write(tmp_path, {"tokenizer_config": {"eos_token": "<|im_end|>"}}, parsed)
    text = read_text(tmp_path, end_id + 1, PLENTY)
    assert text.end_id == end_id
    assert text.with_own_end([5]) == (5, end_id) and f"token {end_id} ends a text" in caplog.text
    assert text.with_own_end([end_id]) == (end_id,)
    # The model cannot choose it.
    assert read_text(tmp_path, end_id, PLENTY).end_id is None
    assert ModelText().with_own_end([5]) == (5,)


def test_a_token_beyond_the_vocabulary_is_no_reason_not_to_serve(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """gemma-3-1b-it has one for images, which its embedding lacks."""
    caplog.set_level("INFO")
    parsed = of_kind()
    write(tmp_path, {"tokenizer_config": {"image_token": "<image_soft_token>"}}, parsed)
    size = kind("byte_level").get_vocab_size()
    content = read_tokenizer(tmp_path, size, PLENTY).content
    assert Tokenizer.from_buffer(content).token_to_id("<image_soft_token>") == size
    assert f"1 of its tokens are not in the model's vocabulary of {size}" in caplog.text


def test_a_tokenizer_that_grows_too_large_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, {"added_tokens": {"<|x|>": 0}}, of_kind())
    size_bytes = (tmp_path / "tokenizer.json").stat().st_size
    assert read_tokenizer(tmp_path, 1 << 20, PLENTY).content
    assert read_tokenizer(tmp_path, 1 << 20, size_bytes // 2) == TokenizerFile()
    assert "too large" in caplog.text


@pytest.mark.parametrize("other", ["vocab.json", "tokenizer.model", ""])
def test_a_directory_without_a_tokenizer_json_says_so(
    tmp_path: Path, other: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Most likely it is an older one, and its owner wants texts."""
    if other:
        (tmp_path / other).write_text("{}")
    assert read_tokenizer(tmp_path, 10, PLENTY) == TokenizerFile()
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "texts are refused" in record.getMessage()
    assert record.getMessage().endswith(
        f"save_pretrained(directory) of transformers 4 makes it from {other}"
    ) is bool(other)

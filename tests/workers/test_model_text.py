"""What a directory has for callers who work with text: templates, special tokens, and how to draw."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.v1 import types_pb2
from quire.v1.sampling_settings import SETTINGS
from transformers import PreTrainedTokenizerFast

from service.api.request_limits import RequestLimits
from service.api.validation import check_output
from tests.chat_templates import TEMPLATES, byte_tokenizer
from workers.executors.llm import model_id_of
from workers.models.chat_template import MAX_BYTES, ChatTemplate, read_chat_template
from workers.models.errors import ModelError
from workers.models.generation_defaults import read_sampling_defaults
from workers.models.text import read_text

PLENTY = 1 << 40


def write(directory: Path, **files: Any) -> Path:
    """Files by their names without suffixes, of JSON but for texts."""
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / f"{name}{'.jinja' if isinstance(content, str) else '.json'}").write_text(text)
    return directory


# Templates.


def make_tokenizer(**settings: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=byte_tokenizer(), bos_token="<s>", eos_token="</s>", **settings
    )


def read_sources(directory: Path) -> dict[str, str]:
    return dict(read_chat_template(directory, PLENTY).sources)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_found_where_transformers_writes_it(tmp_path: Path, name: str) -> None:
    source = TEMPLATES[name]
    tokenizer = make_tokenizer(chat_template=source)
    tokenizer.save_pretrained(tmp_path / "file")
    tokenizer.save_pretrained(tmp_path / "setting", save_jinja_files=False)
    assert (tmp_path / "file" / "chat_template.jinja").exists()
    assert not (tmp_path / "setting" / "chat_template.jinja").exists()
    expected = ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"})
    for directory in ("file", "setting"):
        assert read_chat_template(tmp_path / directory, PLENTY) == expected


def test_several_templates_have_names(tmp_path: Path) -> None:
    listed = [{"name": name, "template": name.upper()} for name in ("default", "tool_use")]
    token = {"content": "<s>", "lstrip": False, "__type": "AddedToken"}
    write(tmp_path, tokenizer_config={"chat_template": listed, "bos_token": token, "eos_token": None})
    expected = ChatTemplate({"default": "DEFAULT", "tool_use": "TOOL_USE"}, {"bos_token": "<s>"})
    assert read_chat_template(tmp_path, PLENTY) == expected


def test_templates_of_a_directory_are_found_where_transformers_writes_them(tmp_path: Path) -> None:
    sources = {"default": "{{ d }}", "tool_use": "{{ t }}", "rag": "{{ documents }}"}
    make_tokenizer(chat_template=sources).save_pretrained(tmp_path)
    assert (tmp_path / "additional_chat_templates" / "rag.jinja").exists()
    assert read_sources(tmp_path) == sources
    listed = [{"name": name, "template": "setting"} for name in ("default", "rag")]
    write(tmp_path, tokenizer_config={"chat_template": listed})
    assert read_sources(tmp_path) == sources, "files win"
    (tmp_path / "chat_template.jinja").unlink()
    assert read_sources(tmp_path) == sources | {"default": "setting"}, "where the files have no default"


_TOKENS = {"bos_token": "<config>", "eos_token": "</config>", "unk_token": "<?>"}


@pytest.mark.parametrize("described", [False, True])
def test_special_tokens_are_those_of_transformers(tmp_path: Path, described: bool) -> None:
    """Older directories have them in a file of their own, which newer ones keep and do not mean."""
    make_tokenizer(chat_template="{{ t }}").save_pretrained(tmp_path)
    bos = {"content": "<map>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    config: dict[str, Any] = _TOKENS | ({"added_tokens_decoder": {}} if described else {})
    write(tmp_path, tokenizer_config=config, special_tokens_map={"bos_token": bos, "eos_token": "</map>"})
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    template = read_chat_template(tmp_path, PLENTY)
    assert template.special_tokens == theirs.special_tokens_map
    assert template.special_tokens["bos_token"] == ("<config>" if described else "<map>")


@pytest.mark.parametrize(
    "settings", [{}, {"chat_template": None}, {"chat_template": ""}, {"bos_token": "<s>"}]
)
def test_no_template(tmp_path: Path, settings: dict[str, Any]) -> None:
    assert read_chat_template(tmp_path, PLENTY) == ChatTemplate()
    template = read_chat_template(write(tmp_path, tokenizer_config=settings), PLENTY)
    assert not template.sources
    assert template.special_tokens == {name: text for name, text in settings.items() if name == "bos_token"}


@pytest.mark.parametrize("in_file", [False, True])
def test_a_template_too_large_to_be_handed_out_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, in_file: bool
) -> None:
    long = "x" * (MAX_BYTES + 1)
    write(tmp_path, **({"chat_template": long} if in_file else {"tokenizer_config": {"chat_template": long}}))
    assert read_chat_template(tmp_path, PLENTY) == ChatTemplate()
    assert "is too large to be sent to clients" in caplog.text


def test_template_and_tokenizer_share_the_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, chat_template="{{" + "t" * 398, tokenizer={"model": {"vocab": {"v" * 400: 0}}})
    tokenizer_bytes = (tmp_path / "tokenizer.json").stat().st_size
    whole = read_text(tmp_path, 1, 407 + tokenizer_bytes)
    assert whole.chat_template.sources and len(whole.tokenizer_json) == tokenizer_bytes
    assert not caplog.text
    cut = read_text(tmp_path, 1, 406 + tokenizer_bytes)
    assert cut.chat_template.sources and cut.tokenizer_json == b""
    assert not read_text(tmp_path, 1, 300).chat_template.sources
    assert "too large" in caplog.text


# How the model's makers draw.


def test_sampling_defaults(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == {}
    drawn = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0}
    penalty, others = (
        {"repetition_penalty": 1.05},
        {"eos_token_id": [1, 2], "max_length": 20, "do_sample": True},
    )
    write(tmp_path, generation_config=drawn | penalty | others)
    assert read_sampling_defaults(tmp_path) == drawn | penalty


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"temperature": 0.6, "top_p": 0.9}, {}),
        ({"do_sample": False, "top_k": 5, "repetition_penalty": 2}, {"repetition_penalty": 2.0}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": None, "top_k": 64}, {"temperature": 1.0, "top_k": 64}),
        ({"do_sample": True, "temperature": 0}, {"temperature": 0.0}),
    ],
)
def test_a_draw_is_as_in_transformers(
    tmp_path: Path, settings: dict[str, Any], expected: dict[str, float]
) -> None:
    assert read_sampling_defaults(write(tmp_path, generation_config=settings)) == expected


_JSON = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers())
_NAMES = ("do_sample", *(setting.name for setting in SETTINGS))


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(_NAMES, _JSON)))
def test_what_is_told_can_be_asked_for(
    tmp_path_factory: pytest.TempPathFactory, settings: dict[str, Any]
) -> None:
    directory = write(tmp_path_factory.mktemp("model"), generation_config=settings)
    told, error = dict[str, Any](), ""
    try:
        told = read_sampling_defaults(directory)
    except ModelError as refusal:
        error = str(refusal)
    sampling = types_pb2.SamplingParams(**told)
    check_output(types_pb2.OutputOptions(sampling=sampling), RequestLimits(1 << 10, 1 << 20), 1)
    assert not error or re.search(r"/generation_config\.json: is not valid JSON: (NaN|-?Infinity)", error)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("do_sample", "yes"), ("temperature", "hot"), ("temperature", -0.1), ("temperature", True),
        ("temperature", 101), ("top_k", 1.5), ("top_k", -1), ("top_k", 1 << 32), ("top_p", 0), ("top_p", 2),
        ("top_p", [0.5]), ("min_p", -1), ("repetition_penalty", 0), ("repetition_penalty", {}),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_be_used_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, value: object
) -> None:
    sound = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1}
    settings = sound | {"repetition_penalty": 1.05}
    told = read_sampling_defaults(write(tmp_path, generation_config=settings | {name: value}))
    without = {other: given for other, given in settings.items() if other != name}
    assert told == read_sampling_defaults(write(tmp_path, generation_config=without))
    assert re.search(rf"/generation_config\.json: {name}: must be .*, got .*: it is left out", caplog.text)


def test_a_setting_nested_too_deeply_to_be_shown_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, generation_config={"do_sample": True, "top_k": 5})
    file = tmp_path / "generation_config.json"
    file.write_text(f'{{"temperature": {"[" * 900 + "]" * 900}, {file.read_text()[1:]}')
    assert read_sampling_defaults(tmp_path) == {"temperature": 1.0, "top_k": 5}
    assert "temperature: " in caplog.text and "it is left out" in caplog.text


# Names.


def test_a_model_in_a_cache_of_the_hub_is_called_by_its_id() -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    assert model_id_of(Path(f"/c/hub/models--Qwen--Qwen3-0.6B/snapshots/{commit}")) == "Qwen/Qwen3-0.6B"
    assert model_id_of(Path(f"/c/hub/models--gpt2/snapshots/{commit}")) == "gpt2"
    assert model_id_of(Path("/models/qwen3")) == "qwen3"


def test_the_working_directory_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "qwen3" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "qwen3" / "inner")
    assert model_id_of(Path()) == "inner"
    assert model_id_of(Path("..")) == "qwen3"

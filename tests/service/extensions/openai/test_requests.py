"""Requests of OpenAI's API as items of an execution."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.v1 import runner_pb2, types_pb2
from quire.v1.sampling_settings import SETTINGS

from service.errors import InvalidArgument, QuireError, SequenceTooLong, Unsupported
from service.extensions.openai import errors
from service.extensions.openai.item_fields import CHAT, COMPLETION, GENERATE, ItemField, param_of
from service.extensions.openai.models import ResolvedModel
from service.extensions.openai.requests import chat, completion

DEFAULTS = types_pb2.SamplingParams(temperature=0.5, top_k=20)


def resolve(_model: str) -> ResolvedModel:
    return ResolvedModel("local", is_local=True, sampling_defaults=DEFAULTS)


def item(**settings: Any) -> runner_pb2.ExecuteItem:
    """The item of a chat request with some settings."""
    request = chat({"model": "m", "messages": [{"role": "user", "content": "x"}], **settings}, resolve)
    return request.items[0]


def test_recommended_sampling_settings_apply_unless_given() -> None:
    assert item().sampling == DEFAULTS
    assert item(temperature=None, top_p=None).sampling == DEFAULTS, "null means absent"
    given = item(temperature=0, top_k=-1, top_p=0.5, seed=-1, logit_bias={"7": -100}).sampling
    expected = types_pb2.SamplingParams(temperature=0, top_k=0, top_p=0.5, seed=(1 << 64) - 1)
    expected.logit_bias[7] = -100
    assert given == expected
    plain = ResolvedModel("other", is_local=False, sampling_defaults=types_pb2.SamplingParams())
    request = completion({"model": "m", "prompt": "x"}, lambda _: plain)
    assert request.items[0].sampling == types_pb2.SamplingParams(temperature=1.0)
    assert request.items[0].max_tokens == 16


# What clients send that asks for nothing: defaults of OpenAI, of other servers and of SDKs.
NEUTRAL: dict[str, Any] = {
    "n": 1, "best_of": 1, "stop": [], "logit_bias": {}, "seed": None, "top_k": 0, "stream": False,
    "stream_options": {}, "frequency_penalty": 0, "user": "me", "bad_words": [], "length_penalty": 1.0,
    "min_tokens": 0, "use_beam_search": False, "early_stopping": False, "ignore_eos": False,
    "stop_token_ids": [], "allowed_token_ids": None, "logits_processors": [], "skip_special_tokens": True,
    "spaces_between_special_tokens": True, "include_stop_str_in_output": False, "echo": False,
    "return_token_ids": False, "priority": 0, "structured_outputs": None, "guided_json": None,
    "prompt_logprobs": None, "truncate_prompt_tokens": None, "suffix": "", "extra_args": {},
}  # fmt: skip
NEUTRAL_OF_CHATS: dict[str, Any] = {
    **NEUTRAL, "tools": [], "tool_choice": "auto", "parallel_tool_calls": False, "functions": [],
    "function_call": "none", "logprobs": False, "top_logprobs": 0, "response_format": {"type": "text"},
    "modalities": ["text"], "audio": None, "verbosity": "medium", "web_search_options": None,
    "reasoning_effort": None, "add_generation_prompt": True, "continue_final_message": False,
    "chat_template_kwargs": {}, "documents": [], "include_reasoning": True, "add_special_tokens": False,
}  # fmt: skip


@pytest.mark.parametrize("name", NEUTRAL_OF_CHATS)
def test_a_neutral_value_asks_for_nothing(name: str) -> None:
    def same(made: runner_pb2.ExecuteItem, plain: runner_pb2.ExecuteItem) -> bool:
        # These two are set to what they are anyway.
        for each in (made, plain):
            each.sampling.frequency_penalty = each.sampling.top_k = 0
        return made == plain

    assert same(item(**{name: NEUTRAL_OF_CHATS[name]}), item())
    if name in NEUTRAL:
        body = {"model": "m", "prompt": "x"}
        made = completion({**body, name: NEUTRAL[name]}, resolve).items[0]
        assert same(made, completion(body, resolve).items[0])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bad_words", 0), ("bad_words", ""), ("length_penalty", 1.1), ("length_penalty", True),
        ("min_tokens", -1), ("min_tokens", False), ("use_beam_search", True), ("use_beam_search", 0),
        ("best_of", 2), ("functions", [{}]), ("verbosity", "low"),
        ("guided_json", "\ud800"),
        ("unknown", []), ("unknown", {}), ("unknown", False), ("unknown", 0), ("unknown", ""),
        ("stream_options", {"include_usage": True}), ("echo", True), ("add_special_tokens", True),
    ],
)  # fmt: skip
def test_any_other_value_of_what_is_not_supported_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        item(**{name: value})
    assert caught.value.field == name


def test_response_formats() -> None:
    assert item(response_format={"type": "json_object"}).constraint.json_schema == '{"type":"object"}'
    bare = item(response_format={"type": "json_object", "schema": {"type": "array"}})
    assert json.loads(bare.constraint.json_schema) == {"type": "array"}
    schema = {"type": "object", "properties": {"ä": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": schema}}
    assert json.loads(item(response_format=form).constraint.json_schema) == schema
    assert not item(response_format={"type": "text"}).HasField("constraint")
    deep: Any = {}
    for _ in range(900):
        deep = {"items": deep}
    form["json_schema"]["schema"] = deep  # type: ignore[index]
    item(response_format=form)


@pytest.mark.parametrize("prompt", [[], {}, 3, [True], [1.5], [-1], [1 << 32], ["a", 1], [[1], "a", None]])
def test_invalid_prompts(prompt: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        completion({"model": "m", "prompt": prompt}, resolve)
    assert errors.body(caught.value)["error"]["param"].startswith("prompt")


def test_the_settings_of_all_prompts_are_limited_before_they_are_copied() -> None:
    """Otherwise a body of 16 MB would take as many GB."""
    body = {"model": "m", "prompt": ["a"] * 1024, "guided_regex": "a" * 2000}
    request = completion(body, resolve, max_bytes=3_000_000)
    size_bytes = sum(item.ByteSize() for item in request.items)
    assert 0.9 * size_bytes < request.copied_bytes < size_bytes
    with pytest.raises(InvalidArgument) as caught:
        completion({**body, "guided_regex": "a" * 3000}, resolve, max_bytes=3_000_000)
    assert (caught.value.reason, caught.value.field) == ("REQUEST_TOO_LARGE", "prompt")


def test_token_prompts_are_limited_by_the_context_of_the_model() -> None:
    own = ResolvedModel("local", is_local=True, sampling_defaults=DEFAULTS, max_tokens=4)
    for prompt in ([1, 2, 3, 4], [[1], [5, 6, 7, 8]]):
        request = completion({"model": "m", "prompt": prompt}, lambda _: own)
        nested = prompt if isinstance(prompt[0], list) else [prompt]
        assert [list(item.tokens.token_ids) for item in request.items] == nested
    for prompt in ([1, 2, 3, 4, None], [[1], [1, 2, 3, 4, "x"]]):  # type: ignore[assignment]
        with pytest.raises(SequenceTooLong):
            completion({"model": "m", "prompt": prompt}, lambda _: own)
    with pytest.raises(InvalidArgument) as caught:
        completion({"model": "m", "prompt": [[1], [2, True]]}, lambda _: own)
    assert caught.value.field == "prompt[1][1]"


NAMES = st.sampled_from(
    [
        "model", "messages", "prompt", "role", "content", "type", "text", "temperature", "top_p", "top_k",
        "n", "stop", "seed", "max_tokens", "logprobs", "top_logprobs", "logit_bias", "tools", "tool_choice",
        "function", "name", "response_format", "json_schema", "schema", "stream", "stream_options",
        "include_usage", "user", "echo", "suffix", "best_of", "tool_calls", "id", "arguments",
    ]
)  # fmt: skip
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()))
    | st.sampled_from(["user", "assistant", "tool", "function", "text", "json_object", "auto", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(), inner, max_size=6),
    max_leaves=20,
)


@given(VALUES | st.dictionaries(NAMES, VALUES, max_size=10))
def test_any_value_is_a_request_or_refused(value: Any) -> None:
    message = {"role": "user", "content": "x"}
    for parse, base in ((completion, {"prompt": "x"}), (chat, {"messages": [message]})):
        for request in (value, {"model": "m", **base, **value} if isinstance(value, dict) else value):
            refusal = None
            try:
                assert parse(request, resolve).items[0].ByteSize()
            except QuireError as error:
                refusal = error
            if refusal is not None:
                assert errors.http_status(refusal) == 400
                json.dumps(errors.body(refusal), ensure_ascii=False).encode()


def test_an_error_with_the_name_of_the_requests_field_is_another_one() -> None:
    """Its text and its traceback say that name; the error of the item still names the item's."""
    error = Unsupported("sampling.top_k: not here", field="sampling.top_k")
    found = errors.of_request(error, lambda field: field.removeprefix("sampling."))
    assert (str(found), found.field, found.code) == ("top_k: not here", "top_k", error.code)
    assert found.reason == error.reason and error.field == "sampling.top_k"


TABLES = [CHAT, COMPLETION, GENERATE]


@pytest.mark.parametrize("table", TABLES)
def test_each_names_a_field_of_an_item(table: tuple[ItemField, ...]) -> None:
    for target in (target for one in table for target in (one.target, *one.also)):
        kind: Any = runner_pb2.ExecuteItem.DESCRIPTOR
        for name in target.split("."):
            kind = kind.fields_by_name[name].message_type


@pytest.mark.parametrize("table", TABLES)
def test_every_sampling_setting_is_on_every_route(table: tuple[ItemField, ...]) -> None:
    names = {one.name for one in table}
    assert {setting.name for setting in SETTINGS} <= names


def test_a_field_of_a_request_with_several_prompts_keeps_its_name() -> None:
    """Errors of a prompt are renamed before those of the whole request are."""
    for one in COMPLETION:
        assert param_of(one.name, COMPLETION) == one.name


@pytest.mark.parametrize(
    ("table", "field", "param"),
    [
        (CHAT, "items[0].sampling.top_k", "top_k"),
        (CHAT, "items[0].stop[1]", "stop[1]"),
        (CHAT, "items[0].max_tokens", "max_tokens"),
        (CHAT, "items[0].output.sampling.temperature", "temperature"),
        (CHAT, "items[0].chat.messages[2].content", "messages[2].content"),
        (
            CHAT,
            "chat.messages[1].tool_calls[0].arguments_json",
            "messages[1].tool_calls[0].function.arguments",
        ),
        (CHAT, "chat", "messages"),
        (CHAT, "chat.template", "messages"),
        (CHAT, "chat.tools_json", "tools"),
        (CHAT, "items[0].constraint.json_schema", "structured_outputs"),
        (CHAT, "sampling.penalty_from", "penalty_from"),
        (COMPLETION, "items[7].tokens.token_ids[3]", "prompt"),
        (COMPLETION, "items[7].text", "prompt"),
        (COMPLETION, "items[0].top_logprobs", "logprobs"),
        (COMPLETION, "sampling.logit_bias", "logit_bias"),
        (GENERATE, "items[0].tokens.token_ids[3]", "token_ids[3]"),
        (GENERATE, "items[0].sampling.top_p", "sampling_params.top_p"),
        (GENERATE, "items[0].constraint.mask", "sampling_params.allowed_token_ids"),
        (GENERATE, "items[0].top_logprobs", "sampling_params.logprobs"),
        (GENERATE, "items[0].n", "sampling_params.n"),
        (GENERATE, "cache_salt", "sampling_params.cache_salt"),
    ],
)
def test_an_error_names_the_field_of_the_request(
    table: tuple[ItemField, ...], field: str, param: str
) -> None:
    assert param_of(field, table) == param
